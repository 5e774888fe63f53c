"""Tell a service manager how this process is: sd_notify(3), on the standard library alone.

    READY=1      sent once, when the process does what it is for
    STOPPING=1   sent when a stop begins, so that the manager waits for the batch or step under way
    WATCHDOG=1   sent from the event loop at half the manager's interval: a loop that is stuck sends none and is killed,
                 and so does one whose `Watch` has been silent for as long

Guarantees: without NOTIFY_SOCKET nothing happens; a manager that does not listen never ends or blocks the process.
What it must never do: send WATCHDOG=1 from a thread, which would go on while the loop is stuck.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass

from heterorl.common.process.clock import Clock

_LOG = logging.getLogger(__name__)


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
    """Take what the service manager set; these variables are its protocol and no configuration of ours.

    Args:
        environment: with NOTIFY_SOCKET, WATCHDOG_USEC and WATCHDOG_PID, or without.
        pid: this process, which WATCHDOG_PID must name; another process's watchdog is not ours to feed.
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


@contextlib.asynccontextmanager
async def supervised(notifier: Notifier, clock: Clock) -> AsyncIterator[Watch]:
    """Feed the watchdog while the body runs, the orderly stop included; the body may name what else must answer."""
    watch = Watch()
    feeding = asyncio.create_task(feed_watchdog(notifier, clock, watch))
    try:
        yield watch
    finally:
        feeding.cancel()
        await asyncio.gather(feeding, return_exceptions=True)


def on_stop(signals: Iterable[int], *, notifier: Notifier, stop: Callable[[], None]) -> None:
    """At any of the signals say STOPPING=1 and call `stop`; to be called on the running loop."""

    def begin() -> None:
        notifier.stopping()
        stop()

    for number in signals:
        asyncio.get_running_loop().add_signal_handler(number, begin)
