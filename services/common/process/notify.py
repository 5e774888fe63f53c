"""Tell a service manager how this process is: sd_notify(3), on the standard library alone.

    READY=1      sent once, when the process does what it is for
    STOPPING=1   sent when a stop begins, so that the manager waits for the batch or step under way
    WATCHDOG=1   sent from the event loop at half the manager's interval: a loop that is stuck sends none and is killed,
                 and so does one whose `Watch` has been silent for as long

Most managers have no watchdog: a thread ends the process, under each of them, whose loop or `Watch` hangs for HUNG_S.

Guarantees: without NOTIFY_SOCKET no manager is told anything; one that does not listen never ends or blocks the
process. A process that stood still as a whole (SIGSTOP, a machine that sleeps) has not hung when it goes on.
What it must never do: send WATCHDOG=1 from a thread, which would go on while the loop is stuck.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import os
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass

from heterorl.common.process.clock import Clock

_LOG = logging.getLogger(__name__)
TICK_S, HUNG_S = 5.0, 60.0
"""How often the thread looks, and for how long the loop or what must answer may stand still."""


class Notifier:
    """The service manager's end of a datagram socket; silent when there is none.

    Args:
        address: path of the socket, `@name` in the abstract namespace, or empty for none.
        watchdog_s: seconds within which the manager wants to hear from the loop; 0 when it does not.
    """

    def __init__(self, address: str = "", *, watchdog_s: float = 0.0) -> None:
        # '@' stands for the leading zero byte of an abstract address, which no variable can carry.
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self._has_failed = False
        self.watchdog_s = watchdog_s if address else 0.0

    def ready(self, status: str) -> None:
        """Say that the service does its work now; `status` is one line for `systemctl status`."""
        self._send("READY=1", f"STATUS={status}")

    def stopping(self) -> None:
        """Say that the stop has begun."""
        self._send("STOPPING=1", "STATUS=stopping")

    def alive(self) -> None:
        """Say that the event loop turns."""
        self._send("WATCHDOG=1")

    def _send(self, *assignments: str) -> None:
        if not self._address:
            return
        message = "\n".join(assignments).encode()
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                # A full queue means that the manager is late, not we: this message is dropped, the next one counts.
                sender.setblocking(False)
                sender.sendto(message, self._address)
            self._has_failed = False
        except OSError as error:
            if not self._has_failed:
                _LOG.warning("the service manager cannot be notified: %s", error)
            self._has_failed = True


def from_environment(environment: Mapping[str, str] = os.environ, *, pid: int | None = None) -> Notifier:
    """Take NOTIFY_SOCKET, WATCHDOG_USEC and WATCHDOG_PID, the service manager's protocol and no configuration of ours.

    WATCHDOG_PID must name this process: another process's watchdog is not ours to feed.
    """
    own_pid = str(os.getpid() if pid is None else pid)
    microseconds = environment.get("WATCHDOG_USEC", "")
    is_watched = microseconds.isdecimal() and environment.get("WATCHDOG_PID", own_pid) == own_pid
    return Notifier(environment.get("NOTIFY_SOCKET", ""), watchdog_s=int(microseconds) / 1e6 if is_watched else 0.0)


@dataclass(slots=True)
class Watch:
    """What has to answer beside the loop; `silent_s` tells for how long it has owed an answer, 0 where it owes none."""

    silent_s: Callable[[], float] = lambda: 0.0


async def feed_watchdog(notifier: Notifier, clock: Clock, watch: Watch) -> None:
    """Send WATCHDOG=1 twice per interval for ever; returns at once when nobody asked for it."""
    interval_s = notifier.watchdog_s / 2
    while interval_s > 0:
        silent_s = watch.silent_s()
        if silent_s < interval_s:
            notifier.alive()
        else:
            _LOG.error("the watchdog is not fed: what must answer has not for %.0f s", silent_s)
        await clock.sleep(interval_s)


class HangGuard:
    """Counts looks at which nothing had moved; `turned` is called by the loop.

    Looks are counted and no seconds: while the whole process stands still, nobody looks.
    """

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._has_turned = True
        self._num_still = 0
        self._num_silent = 0

    def turned(self) -> None:
        """The loop turns."""
        self._has_turned = True

    def look(self) -> str:
        """What has hung; empty while nothing has."""
        self._num_still = 0 if self._has_turned else self._num_still + 1
        self._has_turned = False
        # Twice: an answer that is due may be on its way when the process goes on.
        self._num_silent = self._num_silent + 1 if self._watch.silent_s() >= HUNG_S else 0
        if self._num_still * TICK_S >= HUNG_S:
            return "the event loop"
        return "what must answer beside the event loop" if self._num_silent > 1 else ""


def _guard(guard: HangGuard, over: threading.Event) -> None:
    """End the process when something has hung; the thread's body."""
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
    """Feed the watchdogs while the body runs, the orderly stop included; the body may name what else must answer."""
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
    """At any of the signals say STOPPING=1 and call `stop`; to be called on the running loop."""

    def begin() -> None:
        notifier.stopping()
        stop()

    for number in signals:
        asyncio.get_running_loop().add_signal_handler(number, begin)
