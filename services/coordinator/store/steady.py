"""Turns of a background loop that a failure does not end: said once, counted, tried again after a pause.

What fails a turn is somebody's (a full disk, a damaged row, a defect here), and no reason for the others to stop: the
process serves on without this loop's last turn. Only the end of the store ends a loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from heterorl.common.errors import HeterorlError
from heterorl.common.process.clock import Clock, ring_or_time
from heterorl.common.process.metrics import LOOP_FAILURES
from heterorl.coordinator.store.database import ENDED

_LOG = logging.getLogger(__name__)
PAUSE_S = 5.0


class Steady:
    """The turns of one loop."""

    def __init__(self, name: str, clock: Clock) -> None:
        self._name = name
        self._clock = clock
        self._problem = ""
        LOOP_FAILURES.labels(name)

    async def attempt(self, turn: Callable[[], Awaitable[object]]) -> bool:
        """Run one turn; returns whether it ended well.

        Raises:
            CorruptStore, StoreLost, Draining: the store has ended.
        """
        try:
            await turn()
        except ENDED:
            raise
        except Exception as error:  # noqa: BLE001 - said, counted and tried again
            self._tell(error)
            return False
        if self._problem:
            _LOG.warning("%s goes on", self._name)
            self._problem = ""
        return True

    async def pause(self, wake: asyncio.Event) -> None:
        """Wait until woken, and after a turn that failed no longer than PAUSE_S."""
        await ring_or_time(wake, clock=self._clock, seconds=PAUSE_S if self._problem else None)

    def _tell(self, error: Exception) -> None:
        LOOP_FAILURES.labels(self._name).inc()
        problem = f"{type(error).__name__}: {error}"
        if problem != self._problem:
            self._problem = problem
            is_known = isinstance(error, HeterorlError | OSError)
            _LOG.error("%s failed and is tried again: %s", self._name, problem, exc_info=not is_known)
