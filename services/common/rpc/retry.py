"""Repeating calls that may have been lost: full jitter, a budget, the server's own delay, never a new key."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

import grpc.aio

from heterorl.common.errors import Busy, QuotaExceeded, RemoteError, StoreFull, Unreachable
from heterorl.common.process.clock import Clock
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
    num_failures = 0
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
            is_overload = isinstance(typed, Busy | QuotaExceeded | StoreFull) and typed.retry_after_s > 0
            if typed is not None and not is_overload:
                raise typed from error
            cause: RemoteError | None = typed if isinstance(typed, RemoteError) else None
            problem = f"{error.code().name}: {error.details()}"
            if typed is None and outage is not None:
                outage.failed(f"{name}: {problem}")
        wait_s = rng.uniform(0.0, min(policy.cap_s, policy.base_s * 2 ** min(num_failures, 32)))
        if cause is not None:
            wait_s += cause.retry_after_s
        num_failures += 1
        if clock.monotonic() - started + wait_s > policy.budget_s:
            raise cause or Unreachable(f"{name}: no answer in {policy.budget_s:g} s, last {problem}", retry_after_s=1.0)
        await clock.sleep(wait_s)
