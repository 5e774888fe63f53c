"""Time as a parameter: decisions take instants, effects take a Clock, tests take their own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol


class Clock(Protocol):
    """Wall time for people and policy age, monotonic time for leases, sleep for loops. All in seconds."""

    def wall(self) -> float:
        """Seconds since the Unix epoch; may jump."""
        ...

    def monotonic(self) -> float:
        """Seconds that never go back; meaningful inside one process."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Suspend the calling task."""
        ...


class SystemClock:
    """The machine's clocks."""

    def wall(self) -> float:
        """Seconds since the Unix epoch."""
        return time.time()

    def monotonic(self) -> float:
        """Seconds since an arbitrary start."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Suspend the calling task."""
        await asyncio.sleep(seconds)


def steady(clock: Clock) -> Callable[[], float]:
    """Wall time as it is now, carried on by the monotonic clock: no step of the wall clock reaches who waits by it."""
    offset = clock.wall() - clock.monotonic()
    return lambda: clock.monotonic() + offset
