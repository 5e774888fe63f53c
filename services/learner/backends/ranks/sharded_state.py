"""fp32 masters and AdamW moments by parameter name, wherever a backend keeps their pieces.

Guarantees: a gathered tensor has the bits of its pieces; no rank but rank 0 ever holds more than its own pieces for
it, and rank 0 one whole parameter at a time.
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
    """Reads and writes one rank's pieces, and gathers whole tensors on rank 0. All ranks call together."""

    shapes: Mapping[str, torch.Size]
    """Whole shapes of what is trained, by name."""
    pieces: Pieces
    """Which rank has which piece of every tensor."""

    @abstractmethod
    def read(self, name: str, key: Key, *, start: int, size: int) -> torch.Tensor:
        """Elements [start, start + size) of this rank's piece, flat, on its device; not to be written to."""

    @abstractmethod
    def put(self, name: str, key: Key, whole: torch.Tensor) -> None:
        """Set this rank's piece.

        `whole` is the flattened tensor of a type that fp32 has exactly, of which no more is read than is needed; it may
        lie on a disk.
        """

    @abstractmethod
    def steps(self) -> int:
        """Optimizer steps that the moments have seen."""

    @abstractmethod
    def reset(self, *, steps: int) -> None:
        """Moments of 0 and a count of steps, whether the optimizer has taken one before or not."""

    def gather_all(self, key: Key = "") -> Iterator[tuple[str, torch.Tensor | None]]:
        """All tensors in fp32 on rank 0's CPU, sorted by name, one at a time; None on the others.

        A caller that stops early must let it run to its end.
        """
        for name in sorted(self.shapes):
            own = self.read(name, key, start=0, size=self.pieces.own[name].size)
            yield name, self.pieces.gather(name, own.to("cpu", torch.float32))


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Elements [start, start + size) of a flattened parameter."""

    start: int
    size: int


class Pieces:
    """Which rank has which piece of every parameter; brings them together on rank 0."""

    def __init__(self, own: Mapping[str, Piece], *, shapes: Mapping[str, torch.Size], ranks: Collectives) -> None:
        """Tell the others; all ranks call.

        Rank 0 takes from each the pieces that it states.
        """
        self.own = own
        self._shapes = shapes
        self._ranks = ranks
        table = {name: [piece.start, piece.size] for name, piece in own.items()}
        tables = [json.loads(data) for data in ranks.all_gather_bytes(json.dumps(table).encode())]
        self.tables: list[dict[str, Piece]] = [
            {name: Piece(start=start, size=size) for name, (start, size) in table.items()} for table in tables
        ]
        """Each rank's pieces, as it speaks for them."""

    def gather(self, name: str, values: torch.Tensor) -> torch.Tensor | None:
        """The whole tensor on rank 0's CPU; None on the others, which have sent their `values`."""
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
