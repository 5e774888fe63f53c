"""The files of `heterorl.learner.backends.state` written in pieces; `loading.tensor_file` reads them.

Guarantees: the files are those that the torch backend writes, so either backend continues the other's run, at any
number of ranks; memory for one tensor or piece at a time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import torch

from heterorl.learner.backends.loading.tensor_file import TensorFile
from heterorl.learner.backends.ranks.collectives import Collectives

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


class RelayedFile:
    """The tensors of rank 0's file; all ranks ask for the same ones in the same order."""

    def __init__(self, own: TensorFile | None, ranks: Collectives) -> None:
        """Learn what there is.

        Args:
            own: the file, on rank 0.
            ranks: the others.
        """
        tensors = {} if own is None else own.tensors
        table = {name: [_NAMES[tensor.dtype], list(tensor.shape)] for name, tensor in tensors.items()}
        stated = json.loads(ranks.broadcast_bytes(json.dumps(table).encode()))
        self.tensors = {
            name: torch.empty(shape, dtype=_TORCH[dtype], device="meta") for name, (dtype, shape) in stated.items()
        }
        self._own, self._ranks = own, ranks

    def flat(self, name: str) -> torch.Tensor:
        """See TensorFile; in this process's memory."""
        meta = self.tensors[name]
        values = torch.empty(meta.numel(), dtype=meta.dtype) if self._own is None else self._own.flat(name).clone()
        if meta.numel():
            self._ranks.broadcast(values.view(torch.uint8))
        return values
