"""Waking waiters: whoever waits re-checks its own condition after every ring."""

from __future__ import annotations

import asyncio


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
