"""Background loops that survive failures, and workers of lowest priority.

A failed turn is logged once, counted and retried after PAUSE_S. Only the end of the store ends a loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from heterorl.common.errors import Draining, HeterorlError
from heterorl.common.process.clock import Clock, ring_or_time
from heterorl.common.process.metrics import LOOP_FAILURES
from heterorl.coordinator.store.database import ENDED

_LOG = logging.getLogger(__name__)
ResultT = TypeVar("ResultT")
PAUSE_S = 5.0
LOWEST_PRIORITY = 19


class _Stopped(Exception):
    """The process ends; unfinished work is discarded."""


class RetryingLoop:
    """The turns of one loop."""

    def __init__(self, name: str, clock: Clock) -> None:
        self._name = name
        self._clock = clock
        self._problem = ""
        LOOP_FAILURES.labels(name)

    async def attempt(self, turn: Callable[[], Awaitable[object]]) -> bool:
        """Run one turn; returns whether it succeeded.
        Raises ENDED: the store has ended."""
        try:
            await turn()
        except ENDED:
            raise
        except Exception as error:  # noqa: BLE001 - logged, counted and retried
            self._tell(error)
            return False
        if self._problem:
            _LOG.warning("%s succeeds again", self._name)
            self._problem = ""
        return True

    async def repeat(self, turn: Callable[[], Awaitable[object]], *, every_s: float) -> None:
        """Run a turn every `every_s` seconds until cancelled.
        Returns when the store ends."""
        with contextlib.suppress(*ENDED):
            while True:
                await self.attempt(turn)
                await self._clock.sleep(every_s)

    async def pause(self, wake: asyncio.Event) -> None:
        """Wait until woken; after a failed turn at most PAUSE_S."""
        await ring_or_time(wake, clock=self._clock, seconds=PAUSE_S if self._problem else None)

    def _tell(self, error: Exception) -> None:
        LOOP_FAILURES.labels(self._name).inc()
        problem = f"{type(error).__name__}: {error}"
        if problem != self._problem:
            self._problem = problem
            is_known = isinstance(error, HeterorlError | OSError)
            _LOG.error("%s failed and is tried again: %s", self._name, problem, exc_info=not is_known)


class BackgroundWorker:
    """A loop that runs when it is poked, and its thread.
    Belongs to the event loop."""

    def __init__(self, name: str, clock: Clock) -> None:
        self._steady = RetryingLoop(name, clock)
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._stopping = threading.Event()
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name, initializer=lower_priority)

    def poke(self) -> None:
        self._idle.clear()
        self._wake.set()

    async def settle(self) -> None:
        """Wait until the loop is idle; it must be running."""
        await self._idle.wait()

    async def close(self) -> None:
        """End the thread between two chunks."""
        self._stopping.set()
        await asyncio.to_thread(self._executor.shutdown)

    async def _loop(self, turn: Callable[[], Awaitable[object]]) -> None:
        """Run a turn after each poke until cancelled.
        Returns when the store ends."""
        with contextlib.suppress(*ENDED):
            while True:
                self._wake.clear()
                if await self._steady.attempt(turn) and not self._wake.is_set():
                    self._idle.set()
                await self._steady.pause(self._wake)

    async def _in_thread(self, function: Callable[[], ResultT]) -> ResultT:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, function)
        except _Stopped as error:
            raise Draining("the coordinator is stopping", retry_after_s=1.0) from error

    def _check_stop(self) -> None:
        """Called on the thread before each chunk."""
        if self._stopping.is_set():
            raise _Stopped


def lower_priority() -> None:
    """Give the calling thread the lowest priority."""
    # Linux has a priority for each thread; elsewhere this would slow the whole process.
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)
