"""Repeating calls that the network may have lost: idempotent ones only, full jitter, the peer's own delay on top."""

from __future__ import annotations

import logging
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from services.common.clock import Clock
from services.common.errors import Draining, RemoteError, Unreachable

_LOG = logging.getLogger(__name__)
ResultT = TypeVar("ResultT")


def is_transient(error: Exception) -> bool:
    """Whether the same call may succeed later without anybody changing anything."""
    if isinstance(error, Unreachable | Draining | TimeoutError):
        return True
    return isinstance(error, RemoteError) and error.retry_after_s > 0


@dataclass(slots=True, kw_only=True)
class Patience:
    """Waits that grow with failures in a row: drawn from [0, min(cap_s, base_s * 2^n)] seconds."""

    clock: Clock
    rng: random.Random
    base_s: float
    cap_s: float
    num_failures: int = 0

    async def wait(self, error: Exception | None = None) -> None:
        """Sleep before the next attempt; warns at the first failure of a row."""
        delay_s = self.rng.uniform(0.0, min(self.cap_s, self.base_s * 2 ** min(self.num_failures, 32)))
        if isinstance(error, RemoteError):
            delay_s += min(self.cap_s, error.retry_after_s)
        if error is not None and self.num_failures == 0:
            _LOG.warning("the coordinator does not answer, going on: %s", error)
        self.num_failures += 1
        await self.clock.sleep(delay_s)

    def reset(self) -> None:
        """Note a success."""
        self.num_failures = 0

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
