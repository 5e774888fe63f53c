"""Waking waiters: whoever waits re-checks its own condition after every ring."""

from __future__ import annotations

import asyncio

from heterorl.common.process.clock import Clock


class Bell:
    """A level-free event: take a ticket, look at the state, then wait on the ticket; no ring in between is lost."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def ticket(self) -> asyncio.Event:
        """The event that the next ring sets."""
        return self._event

    def ring(self) -> None:
        """Wake everyone who holds the current ticket."""
        event, self._event = self._event, asyncio.Event()
        event.set()


async def ring_or_time(ticket: asyncio.Event, *, clock: Clock, seconds: float | None) -> None:
    """Wait for the ticket's ring, at most `seconds` (None: without end); leaves no task behind."""
    if seconds is None:
        await ticket.wait()
        return
    waiting = [asyncio.ensure_future(ticket.wait()), asyncio.ensure_future(clock.sleep(max(0.0, seconds)))]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
