"""Sharded fp32 masters and AdamW moments, by parameter name.

Guarantees: a gathered tensor has the bits of its pieces. In addition to its own pieces rank 0 holds one
whole parameter at a time.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from heterorl.learner.backends.ranks.collectives import Collectives

Key = Literal["", "exp_avg", "exp_avg_sq"]
"""The master itself, or one of its moments."""
MOMENTS: tuple[Key, Key] = ("exp_avg", "exp_avg_sq")


class ShardedState(ABC):
    """Reads and writes one rank's pieces, and gathers tensors on rank 0.
    All ranks call together."""

    shapes: Mapping[str, torch.Size]
    """Whole shapes of the trained tensors, by name."""
    pieces: Pieces

    @abstractmethod
    def read(self, name: str, key: Key, *, start: int, size: int) -> torch.Tensor:
        """Elements [start, start + size) of this rank's piece, on its device.
        The tensor is flat, and not to be written to."""

    @abstractmethod
    def put(self, name: str, key: Key, whole: torch.Tensor) -> None:
        """Set this rank's piece from the flattened `whole`.

        `whole` may be mapped from a disk. Its type is one that fp32 holds exactly; only the piece is read.
        """

    @abstractmethod
    def steps(self) -> int:
        """Optimizer steps that the moments have seen."""

    @abstractmethod
    def reset(self, *, steps: int) -> None:
        """Set moments to 0 and the count to `steps`.
        The optimizer may not have stepped yet."""

    def gather_all(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """All masters in fp32 on rank 0's CPU, one at a time.

        They are sorted by name; the other ranks get None. A caller that stops early must exhaust it.
        """
        for name in sorted(self.shapes):
            own = self.read(name, "", start=0, size=self.pieces.own[name].size)
            yield name, self.pieces.gather(name, own.to("cpu", torch.float32))


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Elements [start, start + size) of a flattened parameter."""

    start: int
    size: int


class Pieces:
    """Which rank has which piece of every parameter."""

    def __init__(self, own: Mapping[str, Piece], *, shapes: Mapping[str, torch.Size], ranks: Collectives) -> None:
        """Exchange the tables of pieces; all ranks call."""
        self.own = own
        self._shapes = shapes
        self._ranks = ranks
        table = {name: [piece.start, piece.size] for name, piece in own.items()}
        tables = [json.loads(data) for data in ranks.all_gather_bytes(json.dumps(table).encode())]
        self.tables: list[dict[str, Piece]] = [
            {name: Piece(start=start, size=size) for name, (start, size) in table.items()} for table in tables
        ]
        """Pieces that rank 0 takes from each rank, by rank."""

    def gather(self, name: str, values: torch.Tensor) -> torch.Tensor | None:
        """The whole tensor on rank 0's CPU; None on the others.
        The others have sent their `values`."""
        if self._ranks.rank:
            if self.own[name].size:
                self._ranks.send(values.contiguous())
            return None
        whole = torch.empty(self._shapes[name].numel(), dtype=torch.float32)
        whole[self.own[name].start :][: values.numel()] = values
        for rank in range(1, self._ranks.world_size):
            piece = self.tables[rank][name]
            if piece.size:
                self._ranks.receive(whole[piece.start : piece.start + piece.size], rank=rank)
        return whole.reshape(self._shapes[name])
