"""Signals that ask the demonstration to stop, caught from its first to its last line.

Guarantees: a signal is never lost and never breaks the stopping of the processes: it raises where nothing runs yet,
cancels where processes are watched, and is only noted everywhere else.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interruption:
    """A context in which SIGINT, SIGTERM and SIGHUP ask for the end; `number` is the first that came, 0 for none."""

    def __init__(self) -> None:
        self.number = 0
        self._action: Callable[[], object] = _do_nothing
        self._previous: dict[signal.Signals, Any] = {}

    @property
    def exit_code(self) -> int:
        """The shell's convention: 128 plus the signal, 130 for Ctrl-C."""
        return 128 + self.number

    def __enter__(self) -> Interruption:
        for number in _SIGNALS:
            # Under nohup a closed terminal is to be survived.
            if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def raising(self) -> Iterator[None]:
        """Raise KeyboardInterrupt at once: for work that holds no process."""
        with self._doing(_raise):
            yield

    @contextlib.contextmanager
    def cancelling(self) -> Iterator[None]:
        """Cancel the current task, also for a signal that came before; ends with the task's CancelledError.

        Raises:
            asyncio.CancelledError: a signal came.
        """
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None, "called in a coroutine"
        # From a signal handler only this wakes the loop.
        with self._doing(lambda: loop.call_soon_threadsafe(task.cancel)):
            if self.number:
                raise asyncio.CancelledError
            yield

    @contextlib.contextmanager
    def _doing(self, action: Callable[[], object]) -> Iterator[None]:
        self._action = action
        try:
            yield
        finally:
            self._action = _do_nothing

    def _note(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.number = self.number or number
        self._action()


def _do_nothing() -> None:
    pass


def _raise() -> None:
    raise KeyboardInterrupt
