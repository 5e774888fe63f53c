"""Ranks as threads of one process: what `Collectives` does over gloo, over queues."""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from tests.support.limits import WAIT_S

ResultT = TypeVar("ResultT")
_GONE = object()
"""The last word of a rank that ended by an error, as the end of its process closes its connections."""


class _Wires:
    def __init__(self, world_size: int) -> None:
        self.lines: dict[tuple[int, int], queue.Queue[Any]] = {
            (one, other): queue.Queue() for one in range(world_size) for other in range(world_size)
        }


def _next(line: queue.Queue[Any]) -> Any:
    value = line.get(timeout=WAIT_S)
    if value is _GONE:
        line.put(value)
        raise RuntimeError("Connection closed by peer")
    return value


class _Messages:
    def __init__(self, rank: int, wires: _Wires) -> None:
        self.rank, self._lines = rank, wires.lines

    def send(self, values: torch.Tensor, *, rank: int = 0) -> None:
        self._lines[self.rank, rank].put(values.clone())

    def receive(self, values: torch.Tensor, *, rank: int) -> None:
        values.copy_(_next(self._lines[rank, self.rank]))

    def send_bytes(self, data: bytes, *, rank: int) -> None:
        self._lines[self.rank, rank].put(data)

    def receive_bytes(self, *, rank: int) -> bytes:
        data: bytes = _next(self._lines[rank, self.rank])
        return data


class ThreadRanks(_Messages):
    """One rank's side."""

    def __init__(self, rank: int, world_size: int, wires: _Wires, aside: _Wires) -> None:
        super().__init__(rank, wires)
        self.world_size = world_size
        self.aside = _Messages(rank, aside)
        self.largest_exchange = 0
        self.are_on_one_machine = True

    def _all_to_all(self, values: list[Any]) -> list[Any]:
        for rank, value in enumerate(values):
            self._lines[self.rank, rank].put(value)
        return [_next(self._lines[rank, self.rank]) for rank in range(self.world_size)]

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        return self._all_to_all([data] * self.world_size)

    def broadcast_bytes(self, data: bytes = b"") -> bytes:
        return self.all_gather_bytes(data)[0]

    def broadcast(self, values: torch.Tensor) -> None:
        values.copy_(self._all_to_all([values.clone()] * self.world_size)[0])

    def all_agree(self, is_fine: bool) -> bool:
        return all(self._all_to_all([is_fine] * self.world_size))

    def exchange(self, sent: torch.Tensor, sent_sizes: list[int], received_sizes: list[int]) -> torch.Tensor:
        assert sent.numel() == sum(sent_sizes)
        self.largest_exchange = max(self.largest_exchange, sent.numel(), sum(received_sizes))
        received = self._all_to_all([part.clone() for part in sent.split(sent_sizes)])
        assert [part.numel() for part in received] == received_sizes
        return torch.cat(received)


def on_all_ranks(world_size: int, work: Callable[[ThreadRanks], ResultT]) -> list[ResultT | Exception]:
    """What each rank returned or raised, by rank."""
    wires, aside = _Wires(world_size), _Wires(world_size)

    def run(rank: int) -> ResultT | Exception:
        try:
            return work(ThreadRanks(rank, world_size, wires, aside))
        except Exception as error:  # noqa: BLE001 - handed to the test
            for (one, _), line in [*wires.lines.items(), *aside.lines.items()]:
                if one == rank:
                    line.put(_GONE)
            return error

    with ThreadPoolExecutor(world_size) as executor:
        return list(executor.map(run, range(world_size)))
