"""Repeating calls that the network may have lost: idempotent ones only, full jitter, the peer's own delay on top."""

from __future__ import annotations

import logging
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from heterorl.common.errors import Draining, LeaseHeld, QuotaExceeded, RemoteError, StoreFull, Unreachable
from heterorl.common.process.clock import Clock

_LOG = logging.getLogger(__name__)
ResultT = TypeVar("ResultT")
REMIND_S = 600.0
"""How long nothing more is said of a wait that goes on."""
_SILENT = "the coordinator does not answer, going on"
_WAITS: tuple[tuple[type[Exception], str], ...] = (
    (LeaseHeld, "waiting for the lease"),
    (StoreFull, "the coordinator cannot write, going on when it can"),
    (QuotaExceeded, "the coordinator is busy, going on"),
    (Draining, "the coordinator takes no calls now, going on"),
    (Unreachable, _SILENT),
    (TimeoutError, _SILENT),
    (RemoteError, "the coordinator asks for a later call, going on"),
)


def is_transient(error: Exception) -> bool:
    """Whether the same call may succeed later without anybody changing anything."""
    if isinstance(error, Unreachable | Draining | TimeoutError):
        return True
    return isinstance(error, RemoteError) and error.retry_after_s > 0


def wait_of(error: Exception) -> str:
    """What is waited for after a failure, in words: only who is silent does not answer."""
    return next((words for kind, words in _WAITS if isinstance(error, kind)), _SILENT)


@dataclass(slots=True, kw_only=True)
class Patience:
    """Waits that grow with failures in a row: drawn from [0, min(cap_s, base_s * 2^n)] seconds."""

    clock: Clock
    rng: random.Random
    base_s: float
    cap_s: float
    num_failures: int = 0
    said: str = ""
    said_at: float = 0.0

    async def wait(self, error: Exception | None = None) -> None:
        """Sleep before the next attempt; says what is waited for when that changes, and now and then."""
        delay_s = self.rng.uniform(0.0, min(self.cap_s, self.base_s * 2 ** min(self.num_failures, 32)))
        if isinstance(error, RemoteError):
            delay_s += min(self.cap_s, error.retry_after_s)
        if error is not None:
            self._say(error)
        self.num_failures += 1
        await self.clock.sleep(delay_s)

    def _say(self, error: Exception) -> None:
        what = wait_of(error)
        now = self.clock.monotonic()
        if what != self.said or now - self.said_at >= REMIND_S:
            _LOG.warning("%s: %s", what, str(error) or type(error).__name__)
            self.said, self.said_at = what, now

    def reset(self) -> None:
        """Note a success."""
        self.num_failures = 0
        self.said = ""

    async def insist(self, call: Callable[[], Awaitable[ResultT]]) -> ResultT:
        """Repeat an idempotent call until it is answered.

        Raises:
            RemoteError: a typed refusal that waiting does not change.
        """
        while True:
            try:
                result = await call()
            except (RemoteError, TimeoutError) as error:
                if not is_transient(error):
                    raise
                await self.wait(error)
            else:
                self.reset()
                return result
