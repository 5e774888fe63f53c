"""Repeating calls that may have been lost: full jitter, a budget, the server's own delay, never a new key."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

import grpc.aio

from heterorl.common.errors import HeterorlError, RemoteError, Unreachable
from heterorl.common.process.clock import Clock
from heterorl.common.process.patience import Patience
from heterorl.common.rpc.outage import Outage
from heterorl.common.rpc.status import from_rpc_error

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How long to go on: waits are drawn from [0, min(cap_s, base_s * 2^n)] until budget_s is spent."""

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
    """Run `attempt` until it answers; the closure must reuse one idempotency key. `outage` is told of each try.

    Raises:
        RemoteError: the peer's typed refusal, at once unless it is an overload that names a delay.
        Unreachable: the transport kept failing for `budget_s`.
    """
    started = clock.monotonic()
    patience = Patience(clock=clock, rng=rng, base_s=policy.base_s, cap_s=policy.cap_s)
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
        # A transport that fails asks for no delay of its own.
        wait_s = patience.delay_s() if typed is None else patience.next_delay(typed)
        if clock.monotonic() - started + wait_s > policy.budget_s:
            raise typed or Unreachable(f"{name}: no answer in {policy.budget_s:g} s, last {problem}", retry_after_s=1.0)
        await clock.sleep(wait_s)


def _is_brief(error: HeterorlError) -> bool:
    """Whether a refusal passes within a call's budget; longer waits are the caller's, which may do more meanwhile."""
    return isinstance(error, RemoteError) and error.is_overload and error.is_transient and error.retry_after_s > 0
