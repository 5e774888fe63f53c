"""Retry policy: backoff with full jitter, added to the server's delay.

Permanent errors are not retried.

    error                    next_delay
    RemoteError              as its class states (`is_transient`): a delay, or the error again
    TimeoutError             a delay
    anything else            the error again

Waits for other things than an answer (a disk, an engine, damaged bytes) use `delay_s`.
"""

import logging
import math
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from heterorl.common.errors import RemoteError, Unauthenticated, Unreachable
from heterorl.common.process.clock import Clock
from heterorl.common.types.common import MAX_ASKED_S, peer_seconds

_LOG = logging.getLogger(__name__)
ResultT = TypeVar("ResultT")
REMIND_S = 600.0
"""Between two log lines about one wait."""


def is_transient(error: Exception) -> bool:
    """Whether the unchanged call may succeed later."""
    return error.is_transient if isinstance(error, RemoteError) else isinstance(error, TimeoutError)


def log_level(error: Exception) -> int:
    """Level of a failed call: the link logs silence and refused certificates."""
    return logging.DEBUG if isinstance(error, Unreachable | Unauthenticated) else logging.INFO


@dataclass(slots=True, kw_only=True)
class Backoff:
    """Waits in [0, min(cap_s, base_s * 2^n)] after n failures in a row.

    Each adds the delay that the peer asks for. `asked_cap_s` bounds the delay that a peer may ask for at once. A row of
    failures ends after `budget_s`: the next one is raised.
    """

    clock: Clock
    rng: random.Random
    base_s: float = 1.0
    cap_s: float = 15.0
    asked_cap_s: float = MAX_ASKED_S
    budget_s: float = math.inf
    num_failures: int = 0
    failed_at: float = 0.0
    said: type[Exception] | None = None
    said_at: float = 0.0

    def delay_s(self, *, asked_s: float = 0.0) -> float:
        longest = min(self.cap_s, self.base_s * 2 ** min(self.num_failures, 32))
        self.num_failures += 1
        return min(self.asked_cap_s, peer_seconds(asked_s)) + self.rng.uniform(0.0, longest)

    def next_delay(self, error: Exception) -> float:
        """Return a failure's wait; raises it if permanent or past the budget."""
        now = self.clock.monotonic()
        if self.num_failures == 0:
            self.failed_at = now
        if not is_transient(error) or now - self.failed_at >= self.budget_s:
            raise error
        return self.delay_s(asked_s=error.retry_after_s if isinstance(error, RemoteError) else 0.0)

    def reset(self) -> None:
        self.num_failures = 0
        self.said = None

    async def wait(self, error: Exception | None = None) -> None:
        """Sleep before the next attempt, or raise a permanent failure.

        Logs the error when its kind changes, and every REMIND_S.
        """
        delay_s = self.delay_s() if error is None else self.next_delay(error)
        if error is not None:
            now = self.clock.monotonic()
            if type(error) is not self.said or now - self.said_at >= REMIND_S:
                _LOG.warning("the coordinator is asked again: %s", str(error) or "it does not answer")
                self.said, self.said_at = type(error), now
        await self.clock.sleep(delay_s)

    async def retry(self, call: Callable[[], Awaitable[ResultT]], *, resets: bool = True) -> ResultT:
        """Repeat an idempotent call until it succeeds; raises permanent refusals.

        A call that only asks how another one went `resets` nothing: its success ends no row of failures.
        """
        while True:
            try:
                result = await call()
            except (RemoteError, TimeoutError) as error:
                await self.wait(error)
            else:
                if resets:
                    self.reset()
                return result
