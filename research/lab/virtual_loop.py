"""An event loop whose time is a number: days pass in seconds, and every run is the same run.

    thread work   runs inline at the call; its answer comes after the virtual seconds that it charged
    idle          time jumps to the next timer; when there is none, the run can never go on, which is an error

Guarantees: one thread, no wall time, so that what happens depends on the code and its seeds alone.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

EPOCH = 1_700_000_000.0
"""Wall time at virtual second 0."""
ResultT = TypeVar("ResultT")


class Deadlock(RuntimeError):
    """Nothing is ready and no timer is set: every task waits for another."""


class _JumpingSelector(selectors.DefaultSelector):
    """Does not wait: it moves the loop's time by what it was asked to wait."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if timeout is None:
            raise Deadlock("every task waits for another one")
        self.loop.now += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """See the module docstring. `now` is the virtual time in seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self._charged = 0.0
        selector = _JumpingSelector()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        """The virtual time."""
        return self.now

    def charge(self, seconds: float) -> None:
        """Say, from inside thread work, how long it takes in virtual time."""
        self._charged += seconds

    def run_in_executor(  # type: ignore[override]
        self, _executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """Run at once, for any executor; deliver after the charged time."""
        self._charged = 0.0
        future: asyncio.Future[Any] = self.create_future()
        deliver: Callable[[], None]
        try:
            result = func(*args)
        except Exception as error:  # noqa: BLE001 - delivered to whoever awaits the future
            problem = error
            deliver = lambda: None if future.done() else future.set_exception(problem)  # noqa: E731
        else:
            deliver = lambda: None if future.done() else future.set_result(result)  # noqa: E731
        if self._charged > 0.0:
            self.call_later(self._charged, deliver)
        else:
            self.call_soon(deliver)
        return future


class VirtualClock:
    """Implements heterorl.common.process.clock.Clock on a virtual loop."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def wall(self) -> float:
        """Seconds since the Unix epoch."""
        return EPOCH + self._loop.now

    def monotonic(self) -> float:
        """Virtual seconds."""
        return self._loop.now

    async def sleep(self, seconds: float) -> None:
        """Suspend the calling task for virtual seconds."""
        await asyncio.sleep(seconds)


def run_virtually(body: Callable[[VirtualLoop], Coroutine[Any, Any, ResultT]]) -> ResultT:
    """Run a coroutine to its end on a virtual loop of its own.

    Raises:
        Deadlock: it can never end.
    """
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(body(loop))
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
