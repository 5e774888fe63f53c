"""A clock that moves only when told."""

from __future__ import annotations

import asyncio

from heterorl.common.process.clock import Bell


class ManualClock:
    """Implements heterorl.common.process.clock.Clock; sleepers wake when `advance` passes their instant."""

    def __init__(self, now: float = 1000.0) -> None:
        self._now = now
        self.wall_offset = 1_700_000_000.0
        """What is added to make wall time of it: a step of it moves no instant."""
        self._sleepers: list[tuple[float, asyncio.Future[None]]] = []

    def wall(self) -> float:
        return self.wall_offset + self._now

    def monotonic(self) -> float:
        return self._now

    async def sleep(self, seconds: float) -> None:
        future = asyncio.get_running_loop().create_future()
        self._sleepers.append((self._now + seconds, future))
        await future

    def advance(self, seconds: float) -> None:
        self._now += seconds
        for at, future in self._sleepers:
            if at <= self._now and not future.done():
                future.set_result(None)
        self._sleepers = [(at, future) for at, future in self._sleepers if not future.done()]


class CountingBell(Bell):
    """A bell that knows how many tickets were taken."""

    def __init__(self) -> None:
        super().__init__()
        self.num_tickets = 0

    def ticket(self) -> asyncio.Event:
        self.num_tickets += 1
        return super().ticket()

    async def until_asked(self, before: int) -> None:
        """Wait until a ticket was taken after the first `before` ones, and its taker waits."""
        while self.num_tickets <= before:  # noqa: ASYNC110 - a number
            await asyncio.sleep(0.001)
