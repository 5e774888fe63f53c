"""An arena as a safetensors file, written without a second copy in memory.

u64 little-endian  length n of the header
n bytes            JSON: name -> {"dtype", "shape", "data_offsets": [begin, end)}, padded by spaces to 8 bytes
rest               the tensors' little-endian bytes, in the header's order
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from heterorl.common.process.files import replacing
from heterorl.common.weights.arena import WIDTH, Arena, Dtype, Layout

_NAMES: dict[Dtype, str] = {"bf16": "BF16", "fp16": "F16", "fp32": "F32", "fp8_e4m3": "F8_E4M3", "int8": "I8"}


def write_weights(
    arena: Arena, path: Path, *, names: Sequence[str], rename: Callable[[str], str] = lambda name: name
) -> int:
    """Write tensors; only this user may read the file, which appears complete or not at all.

    Args:
        arena: the weights.
        path: the file, replaced if it is there.
        names: the tensors; of tied ones the name to store them under (`stored_names`).
        rename: from a tensor's name to that in the file.

    Returns:
        Size of the file, bytes.
    """
    header: dict[str, object] = {}
    end = 0
    for name in names:
        spec = arena.layout.spec(name)
        start, end = end, end + spec.num_elements * WIDTH[spec.dtype]
        header[rename(name)] = {"dtype": _NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with replacing(path, is_durable=False, mode=0o600) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            values = arena.view(name)
            file.write(values.astype(values.dtype.newbyteorder("<"), copy=False).data)
    return 8 + len(text) + end


def stored_names(layout: Layout, is_derived: Callable[[str], bool]) -> list[str]:
    """One name for each storage: of tied tensors the first that is not derived from another, as checkpoints have it.

    Args:
        layout: the tensors.
        is_derived: whether a model makes the tensor of this name out of another one.
    """
    chosen: dict[str, str] = {}
    for spec in layout.specs:
        owner = spec.alias_of or spec.name
        if owner not in chosen or is_derived(chosen[owner]):
            chosen[owner] = spec.name
    return sorted(chosen.values())
