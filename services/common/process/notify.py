"""Service manager notifications (sd_notify(3)) and watchdogs, with the standard library only.

    READY=1      sent once, when the service works
    STOPPING=1   sent when a stop begins, so that the manager waits for the current batch or step
    WATCHDOG=1   sent from the event loop at half the manager's interval; not sent while the loop or its `Watch` hangs

Most managers have no watchdog: a timer also writes all threads and ends the process with code 1 when its loop hangs
for HUNG_S, or its `Watch` for at most 1.5 times as long.

Guarantees: messages need NOTIFY_SOCKET; a manager that does not listen never ends or blocks the process. WATCHDOG=1
never comes from a thread, which would go on while the loop hangs. A process that SIGSTOP stops for HUNG_S may end.
"""

import asyncio
import contextlib
import faulthandler
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass

from heterorl.common.process.clock import Clock, SystemClock

_LOG = logging.getLogger(__name__)
TICK_S, HUNG_S = 1.0, 60.0
"""How often the loop postpones the timer, and the timer."""


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


async def _end_when_hung(watch: Watch) -> None:
    """A timer of C, which needs no GIL; each turn postpones it."""
    while True:
        # A Watch that is silent for half of it has the rest.
        if watch.silent_s() < HUNG_S / 2:
            faulthandler.dump_traceback_later(HUNG_S, exit=True, file=2)
        await asyncio.sleep(TICK_S)


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
    clock, notifier, stop, watch = SystemClock(), from_environment(), asyncio.Event(), Watch()
    on_stop((signal.SIGTERM, signal.SIGINT), notifier=notifier, stop=stop.set)
    faulthandler.dump_traceback_later(HUNG_S, exit=True, file=2)
    feeding = [asyncio.create_task(feed_watchdog(notifier, clock, watch)), asyncio.create_task(_end_when_hung(watch))]
    try:
        yield Process(stop=stop, notifier=notifier, clock=clock, watch=watch)
    finally:
        for task in feeding:
            task.cancel()
        await asyncio.gather(*feeding, return_exceptions=True)
        faulthandler.cancel_dump_traceback_later()
