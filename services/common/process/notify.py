"""Service manager notifications (sd_notify(3)) and watchdogs, with the standard library only.

    READY=1      sent once, when the service works
    STOPPING=1   sent when a stop begins, so that the manager waits for the current batch or step
    WATCHDOG=1   sent from the event loop at half the manager's interval; not sent while the loop or its `Watch` hangs

Most managers have no watchdog: a thread also ends the process when its loop or its `Watch` hangs for HUNG_S.

Guarantees: messages need NOTIFY_SOCKET; a manager that does not listen never ends or blocks the process. A process that
stood still as a whole (SIGSTOP, suspend) does not count as hung afterwards. WATCHDOG=1 never comes from a thread, which
would go on while the loop hangs.
"""

import asyncio
import contextlib
import faulthandler
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass

from heterorl.common.process.clock import Clock, SystemClock

_LOG = logging.getLogger(__name__)
TICK_S, HUNG_S = 5.0, 60.0
"""Interval of the thread's looks, and the longest time without a turn or an answer."""


class Notifier:
    """Sends datagrams to the service manager's socket; silent without one.

    `address` is a path, or `@name` in the abstract namespace. `watchdog_s` is the manager's interval; 0 if it has none.
    """

    def __init__(self, address: str = "", *, watchdog_s: float = 0.0) -> None:
        # '@' stands for the leading zero byte of an abstract address.
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self._has_failed = False
        self.watchdog_s = watchdog_s if address else 0.0

    def ready(self, status: str) -> None:
        """Report that the service works; `status` is one line for `systemctl status`."""
        self._send("READY=1", f"STATUS={status}")

    def stopping(self) -> None:
        self._send("STOPPING=1", "STATUS=stopping")

    def alive(self) -> None:
        self._send("WATCHDOG=1")

    def _send(self, *assignments: str) -> None:
        if not self._address:
            return
        message = "\n".join(assignments).encode()
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                # A full queue means a late manager: drop this message, the next one counts.
                sender.setblocking(False)
                sender.sendto(message, self._address)
            self._has_failed = False
        except OSError as error:
            if not self._has_failed:
                _LOG.warning("the service manager gets no notifications, check NOTIFY_SOCKET: %s", error)
            self._has_failed = True


def from_environment(environment: Mapping[str, str] = os.environ, *, pid: int | None = None) -> Notifier:
    """Read NOTIFY_SOCKET, WATCHDOG_USEC and WATCHDOG_PID, the service manager's protocol.

    WATCHDOG_PID must name this process: the watchdog of another process is not fed.
    """
    own_pid = str(os.getpid() if pid is None else pid)
    microseconds = environment.get("WATCHDOG_USEC", "")
    is_watched = microseconds.isdecimal() and environment.get("WATCHDOG_PID", own_pid) == own_pid
    return Notifier(environment.get("NOTIFY_SOCKET", ""), watchdog_s=int(microseconds) / 1e6 if is_watched else 0.0)


@dataclass(slots=True)
class Watch:
    """A second thing that must answer; `silent_s`: seconds it owes, or 0."""

    silent_s: Callable[[], float] = lambda: 0.0


async def feed_watchdog(notifier: Notifier, clock: Clock, watch: Watch) -> None:
    """Send WATCHDOG=1 twice per interval; returns at once without an interval."""
    interval_s = notifier.watchdog_s / 2
    while interval_s > 0:
        silent_s = watch.silent_s()
        if silent_s < interval_s:
            notifier.alive()
        else:
            _LOG.error(
                "the watched thread owes an answer for %.0f s; without one the service manager restarts this process",
                silent_s,
            )
        await clock.sleep(interval_s)


class HangGuard:
    """Counts looks since the loop's last turn; the loop calls `turned`.

    Not seconds: a process that stands still as a whole makes no looks.
    """

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._has_turned = True
        self._num_still = 0
        self._num_silent = 0

    def turned(self) -> None:
        self._has_turned = True

    def look(self) -> str:
        """The name of the part that hangs; empty while both turn."""
        self._num_still = 0 if self._has_turned else self._num_still + 1
        self._has_turned = False
        # Twice: after a standstill an answer may still be on its way.
        self._num_silent = self._num_silent + 1 if self._watch.silent_s() >= HUNG_S else 0
        if self._num_still * TICK_S >= HUNG_S:
            return "the event loop"
        return "the watched thread" if self._num_silent > 1 else ""


def _guard(guard: HangGuard, over: threading.Event) -> None:
    while not over.wait(TICK_S):
        if hung := guard.look():
            # No logging: the loop may have its lock.
            faulthandler.dump_traceback(sys.__stderr__ or 2, all_threads=True)
            os.write(2, f"the process ends: {hung} has not turned for {HUNG_S:g} s\n".encode())
            os._exit(1)


async def _turn(guard: HangGuard) -> None:
    while True:
        guard.turned()
        await asyncio.sleep(TICK_S / 2)


@contextlib.asynccontextmanager
async def supervised(notifier: Notifier, clock: Clock) -> AsyncIterator[Watch]:
    """Feed the watchdogs during the body, which may set the Watch."""
    watch, over = Watch(), threading.Event()
    guard = HangGuard(watch)
    threading.Thread(target=_guard, args=(guard, over), name="hang-guard", daemon=True).start()
    feeding = [asyncio.create_task(feed_watchdog(notifier, clock, watch)), asyncio.create_task(_turn(guard))]
    try:
        yield watch
    finally:
        over.set()
        for task in feeding:
            task.cancel()
        await asyncio.gather(*feeding, return_exceptions=True)


def on_stop(signals: Iterable[int], *, notifier: Notifier, stop: Callable[[], None]) -> None:
    """On a signal send STOPPING=1 and call `stop`; needs a running loop."""

    def begin() -> None:
        notifier.stopping()
        stop()

    for number in signals:
        asyncio.get_running_loop().add_signal_handler(number, begin)


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A running service; SIGTERM and SIGINT set `stop`."""

    stop: asyncio.Event
    notifier: Notifier
    clock: Clock
    watch: Watch


@contextlib.asynccontextmanager
async def running() -> AsyncIterator[Process]:
    """Run the body as a service, with its signals and watchdogs."""
    clock, notifier, stop = SystemClock(), from_environment(), asyncio.Event()
    on_stop((signal.SIGTERM, signal.SIGINT), notifier=notifier, stop=stop.set)
    async with supervised(notifier, clock) as watch:
        yield Process(stop=stop, notifier=notifier, clock=clock, watch=watch)
