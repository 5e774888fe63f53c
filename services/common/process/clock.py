"""Clocks as parameters, for tests and virtual time, and a Bell."""

import asyncio
import time
from collections.abc import Callable, Coroutine
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
