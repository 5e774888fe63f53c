"""A call repeats itself for lost answers and for short overloads, within its budget; the rest is its caller's."""

import random

import grpc
import grpc.aio
import pytest

from heterorl.common.errors import (
    Busy,
    Draining,
    LeaseHeld,
    Quarantined,
    QuotaExceeded,
    StoreFull,
    Unauthenticated,
    Unreachable,
)
from heterorl.common.rpc.calls import RetryPolicy, call_with_retries
from heterorl.common.rpc.error_status import to_status

POLICY = RetryPolicy(base_s=0.1, cap_s=5.0, budget_s=30.0)


class SleepingClock:
    """Time that passes by sleeping."""

    def __init__(self):
        self.slept = []
        self.now = 0.0

    def wall(self):
        return self.now

    def monotonic(self):
        return self.now

    async def sleep(self, seconds):
        self.slept.append(seconds)
        self.now += seconds


def sent(error):
    code, message, trailers = to_status(error)
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailers), details=message)


async def called(failure, *, times):
    clock, failures = SleepingClock(), [failure] * times

    async def attempt():
        if failures:
            raise failures.pop()
        return "answer"

    answer = await call_with_retries(attempt, name="Ask", policy=POLICY, clock=clock, rng=random.Random(0))
    return answer, clock.slept


@pytest.mark.parametrize("error_class", [Busy, QuotaExceeded, StoreFull])
async def test_overload_that_names_a_delay_is_waited_out(error_class):
    answer, slept = await called(sent(error_class("full", retry_after_s=2.0)), times=3)

    assert answer == "answer"
    assert len(slept) == 3
    assert all(2.0 <= seconds <= 2.4 for seconds in slept)


@pytest.mark.parametrize(
    "error",
    [
        Busy("x"),
        QuotaExceeded("a payload over the limit"),
        StoreFull("x"),
        Draining("x", retry_after_s=1.0),
        LeaseHeld("x", retry_after_s=1.0),
        Quarantined("x", retry_after_s=5.0),
        Unauthenticated("expired", retry_after_s=5.0),
    ],
)
async def test_longer_waits_are_the_callers(error):
    with pytest.raises(type(error)):
        await called(sent(error), times=1)


async def test_lost_answers_are_asked_for_until_the_budget_is_spent():
    lost = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), details="cut")

    answer, slept = await called(lost, times=4)
    assert answer == "answer"
    assert all(seconds <= bound for seconds, bound in zip(slept, [0.1, 0.2, 0.4, 0.8], strict=True))
    with pytest.raises(Unreachable, match="Ask: no answer in 30 s, last UNAVAILABLE: cut"):
        await called(lost, times=10_000)


async def test_thousands_of_failures_within_the_budget_are_only_failures():
    tries = 0

    async def attempt():
        nonlocal tries
        tries += 1
        raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), "down")

    policy = RetryPolicy(budget_s=20_000.0, cap_s=5.0)
    with pytest.raises(Unreachable, match="no answer in 20000 s"):
        await call_with_retries(attempt, name="GetStatus", policy=policy, clock=SleepingClock(), rng=random.Random(0))

    assert tries > 5000
