"""Clocks as parameters, for tests and virtual time, and bells."""

import asyncio
import itertools
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Protocol


class Clock(Protocol):
    """Wall time (people, policy age), monotonic time (leases) and sleep, in seconds."""

    def wall(self) -> float:
        """Seconds since the Unix epoch; may jump."""

    def monotonic(self) -> float:
        """Seconds that never go back; meaningful inside one process."""

    async def sleep(self, seconds: float) -> None:
        """Suspend the calling task."""


class SystemClock:
    """The machine's clocks."""

    def wall(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def steady(clock: Clock) -> Callable[[], float]:
    """Wall time at the start, continued by the monotonic clock without steps."""
    offset = clock.wall() - clock.monotonic()
    return lambda: clock.monotonic() + offset


class Bell:
    """Wakes all: take a ticket, look, then wait; no ring is lost."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def ticket(self) -> asyncio.Event:
        return self._event

    def ring(self) -> None:
        event, self._event = self._event, asyncio.Event()
        event.set()


class SlowBell:
    """Wakes all in turn: a thousand at once would delay other work.

    A ring wakes `at_once`, and each `pause_s` as many more. Take a ticket, look, then wait; no ring is lost.
    """

    def __init__(self, clock: Clock, *, at_once: int = 20, pause_s: float = 0.02) -> None:
        self._clock = clock
        self._at_once = at_once
        self._pause_s = pause_s
        self.num_rings = 0
        self._waiting: dict[asyncio.Future[None], None] = {}
        self._due: dict[asyncio.Future[None], None] = {}
        self._waking: asyncio.Task[None] | None = None

    @contextmanager
    def ticket(self) -> Iterator[asyncio.Future[None]]:
        """Ends at the next ring, in turn."""
        ticket = asyncio.get_running_loop().create_future()
        self._waiting[ticket] = None
        try:
            yield ticket
        finally:
            self._waiting.pop(ticket, None)
            self._due.pop(ticket, None)

    def ring(self) -> None:
        self.num_rings += 1
        self._due |= self._waiting
        self._waiting = {}
        if self._waking is None or self._waking.done():
            self._wake(self._at_once)
            self._waking = asyncio.ensure_future(self._wake_others()) if self._due else None

    def ring_at_once(self) -> None:
        """Wake all without a pause."""
        self.ring()
        self._wake(len(self._due))

    def _wake(self, count: int) -> None:
        for ticket in list(itertools.islice(self._due, count)):
            del self._due[ticket]
            if not ticket.done():
                ticket.set_result(None)

    async def _wake_others(self) -> None:
        while self._due:
            await self._clock.sleep(self._pause_s)
            self._wake(self._at_once)


async def ring_or_time(*tickets: asyncio.Event, clock: Clock, seconds: float | None) -> None:
    """Wait until a ticket rings, at most `seconds` (None: without end)."""
    if seconds is None and len(tickets) == 1:
        await tickets[0].wait()
        return
    waiting: list[asyncio.Future[Any]] = [asyncio.ensure_future(ticket.wait()) for ticket in tickets]
    if seconds is not None:
        waiting.append(asyncio.ensure_future(clock.sleep(max(0.0, seconds))))
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def ends_within(work: Coroutine[Any, Any, Any], *, clock: Clock, seconds: float) -> bool:
    """Whether `work` ended within `seconds`; else it is cancelled.

    An error of `work` is raised.
    """
    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(clock.sleep(seconds))]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        has_ended = tasks[0].done()
        if has_ended:
            tasks[0].result()
        return has_ended
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
