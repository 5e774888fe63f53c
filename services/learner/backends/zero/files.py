"""The files of `heterorl.learner.backends.state` in pieces: written one tensor at a time, read one piece at a time.

A safetensors file is: u64 little-endian length n of the header; n bytes of JSON {name: {"dtype", "shape",
"data_offsets": [begin, end]}}, padded with spaces to a multiple of 8; the tensors' little-endian bytes back to back.

Guarantees: the files are those that the torch backend writes, so either backend continues the other's run, at any
number of ranks; memory for one tensor at a time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from heterorl.common.errors import CorruptStore

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


class TensorFile:
    """A safetensors file whose tensors stay on the disk until a piece of them is read."""

    def __init__(self, path: Path) -> None:
        """Read and check the header.

        Raises:
            CorruptStore: the file is missing or broken.
        """
        self._path = path
        try:
            with safe_open(path, "pt") as file:
                # Meta tensors: what is checked is type and shape.
                self.tensors = {
                    name: torch.empty(part.get_shape(), dtype=_dtype(part.get_dtype()), device="meta")
                    for name in file.keys()  # noqa: SIM118 - not a dictionary
                    for part in [file.get_slice(name)]
                }
            with path.open("rb") as raw:
                length = int.from_bytes(raw.read(8), "little")
                header = json.loads(raw.read(length))
        except (OSError, ValueError, SafetensorError) as error:
            raise CorruptStore(f"{path} cannot be read: {error}") from error
        self._offsets = {name: 8 + length + header[name]["data_offsets"][0] for name in self.tensors}

    def flat(self, name: str) -> torch.Tensor:
        """A flattened fp32 or uint8 tensor, mapped from the disk; not to be written to."""
        meta = self.tensors[name]
        dtype = np.dtype("<f4") if meta.dtype == torch.float32 else np.dtype(np.uint8)
        if not meta.numel():
            return torch.empty(0, dtype=meta.dtype)
        # Copy on write: torch takes writable arrays only, and nothing reaches the file.
        return torch.from_numpy(
            np.memmap(self._path, dtype, mode="c", offset=self._offsets[name], shape=(meta.numel(),))
        )


def _dtype(name: str) -> torch.dtype:
    # Any other type is wrong here; float64 stands for it and is refused with its name.
    return _TORCH.get(name, torch.float64)
