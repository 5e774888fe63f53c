"""The files of `heterorl.learner.backends.state` written one tensor at a time; `loading.tensor_file` reads them.

Guarantees: the files are those that the torch backend writes, so either backend continues the other's run, at any
number of ranks; memory for one tensor at a time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

_SIZES = {"F32": 4, "U8": 1}
_TORCH = {"F32": torch.float32, "U8": torch.uint8}


def write_tensors(
    path: Path, table: Sequence[tuple[str, str, tuple[int, ...]]], tensors: Iterable[torch.Tensor]
) -> None:
    """Write a safetensors file from tensors that come one after another.

    Args:
        path: new file.
        table: name, `F32` or `U8`, and shape of each tensor.
        tensors: in the order of `table`; consumed one at a time.
    """
    header: dict[str, object] = {}
    end = 0
    for name, dtype, shape in table:
        begin, end = end, end + _SIZES[dtype] * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for (name, dtype, shape), tensor in zip(table, tensors, strict=True):
            assert tuple(tensor.shape) == shape, name
            assert tensor.dtype == _TORCH[dtype], name
            file.write(tensor.contiguous().numpy().data)
