"""A safetensors file that is laid out before it is written, piece by piece; `tensor_file` reads it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import torch

_TORCH = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_SIZES = {name: dtype.itemsize for name, dtype in _TORCH.items()}
_NAMES = {dtype: name for name, dtype in _TORCH.items()}


Entry = tuple[str, str, tuple[int, ...]]
"""Name, type as the format calls it, and shape of a tensor."""


def name_of_type(dtype: torch.dtype) -> str:
    """What the format calls a type.

    Raises:
        KeyError: it is none of those that are written.
    """
    return _NAMES[dtype]


def type_of_name(name: str) -> torch.dtype:
    """The type that the format calls by this name.

    Raises:
        KeyError: it is none of those that are written.
    """
    return _TORCH[name]


class FilePlan:
    """Where everything is in a safetensors file that is yet to be written."""

    def __init__(self, table: Sequence[Entry], *, metadata: Mapping[str, str] = MappingProxyType({})) -> None:
        self.table = table
        entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
        starts: dict[str, int] = {}
        end = 0
        for name, dtype, shape in table:
            begin, end = end, end + _SIZES[dtype] * math.prod(shape)
            starts[name] = begin
            entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self.header = len(text).to_bytes(8, "little") + text
        """What the file begins with."""
        self.num_bytes = len(self.header) + end
        self._starts = starts

    def place(self, name: str) -> int:
        """First byte of a tensor."""
        return len(self.header) + self._starts[name]


def write_tensors(path: Path, table: Sequence[Entry], tensors: Iterable[torch.Tensor]) -> None:
    """Write a safetensors file from tensors that come one after another.

    Args:
        path: new file.
        table: of the tensors.
        tensors: in the order of `table`; consumed one at a time.
    """
    with path.open("wb") as file:
        file.write(FilePlan(table).header)
        for (name, dtype, shape), tensor in zip(table, tensors, strict=True):
            assert tuple(tensor.shape) == shape, name
            assert tensor.dtype == _TORCH[dtype], name
            file.write(tensor.contiguous().numpy().data)
