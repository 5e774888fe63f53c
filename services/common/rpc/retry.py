"""Retries of one call, and the log of an outage: full jitter, a budget, the server's delay, always the same key."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import grpc.aio

from heterorl.common.errors import HeterorlError, RemoteError, Unreachable
from heterorl.common.process.backoff import Backoff
from heterorl.common.process.clock import Clock
from heterorl.common.rpc.error_status import from_rpc_error
from heterorl.common.types.common import peer_words

_LOG = logging.getLogger(__name__)
SAY_AFTER_S = 2.0
"""Outages that end sooner are not logged."""
SILENT_S = 4.0
"""A call without an answer for so long counts as failed, unless another one was answered meanwhile."""
FIRST_EVERY_S = 10.0
LAST_EVERY_S = 600.0


class Outage:
    """Logs that the peer does not answer: after seconds, then ever more rarely, and once it answers again.

    All calls over the channel report to it.
    """

    def __init__(self, address: str, *, clock: Clock) -> None:
        self._address = address
        self._clock = clock
        self._since: float | None = None
        self._answered_at = clock.monotonic()
        self._say_at = 0.0
        self._every_s = FIRST_EVERY_S
        self._is_said = False

    def failed(self, problem: str) -> None:
        """Note a call without an answer."""
        self._note(problem, since=self._clock.monotonic())

    def answered(self) -> None:
        """Note an answer; a refusal is one too."""
        now = self._clock.monotonic()
        if self._is_said and self._since is not None:
            _LOG.info("the coordinator at %s answers again, after %.0f s", self._address, now - self._since)
        self._since, self._is_said, self._every_s = None, False, FIRST_EVERY_S
        self._answered_at = now

    @contextlib.contextmanager
    def watching(self, name: str) -> Iterator[None]:
        """Watch a call, and report it while it hangs."""
        timer = asyncio.get_running_loop().call_later(SILENT_S, self._hung, name)
        try:
            yield
        finally:
            timer.cancel()

    def _hung(self, name: str) -> None:
        now = self._clock.monotonic()
        if now - self._answered_at >= SILENT_S:
            self._note(f"{name} has no answer for {SILENT_S:g} s", since=now - SILENT_S)

    def _note(self, problem: str, *, since: float) -> None:
        now = self._clock.monotonic()
        if self._since is None:
            self._since, self._say_at = since, since + SAY_AFTER_S
        if now < self._say_at:
            return
        _LOG.warning(
            "the coordinator at %s has not answered for %.0f s, retrying: %s",
            self._address, now - self._since, peer_words(problem),
        )  # fmt: skip
        self._is_said = True
        self._say_at = now + self._every_s
        self._every_s = min(LAST_EVERY_S, 2 * self._every_s)


ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Waits drawn from [0, min(cap_s, base_s * 2^n)] until `budget_s` is spent."""

    base_s: float = 0.1
    cap_s: float = 5.0
    budget_s: float = 30.0


async def call(
    attempt: Callable[[], Awaitable[ResultT]],
    *,
    name: str,
    policy: RetryPolicy,
    clock: Clock,
    rng: random.Random,
    outage: Outage | None = None,
) -> ResultT:
    """Run `attempt` until it answers; the closure must reuse one idempotency key. Each try is reported to `outage`.

    Raises:
        RemoteError: the peer's typed refusal, at once unless it is an overload that states a delay.
        Unreachable: the transport failed for `budget_s`.
    """
    started = clock.monotonic()
    backoff = Backoff(clock=clock, rng=rng, base_s=policy.base_s, cap_s=policy.cap_s)
    while True:
        try:
            answer = await attempt()
            if outage is not None:
                outage.answered()
            return answer
        except grpc.aio.AioRpcError as error:
            typed = from_rpc_error(error)
            if typed is not None and outage is not None:
                outage.answered()
            if typed is not None and not _is_brief(typed):
                raise typed from error
            problem = f"{error.code().name}: {error.details()}"
            if typed is None and outage is not None:
                outage.failed(f"{name}: {problem}")
        # A failed transport states no delay.
        wait_s = backoff.delay_s() if typed is None else backoff.next_delay(typed)
        if clock.monotonic() - started + wait_s > policy.budget_s:
            raise typed or Unreachable(f"{name}: no answer in {policy.budget_s:g} s, last {problem}", retry_after_s=1.0)
        await clock.sleep(wait_s)


def _is_brief(error: HeterorlError) -> bool:
    """Whether a refusal passes within a call's budget; callers handle longer waits themselves."""
    return isinstance(error, RemoteError) and error.is_overload and error.is_transient and error.retry_after_s > 0
