"""A call that fails for hours is repeated for hours."""

import random

import grpc
import pytest

from heterorl.common.errors import Unreachable
from heterorl.common.rpc import retry


class EagerClock:
    """Sleeping is what makes its time go on."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now

    def wall(self):
        return self.now

    async def sleep(self, seconds):
        self.now += seconds


async def test_thousands_of_failures_within_the_budget_are_only_failures():
    tries = 0

    async def attempt():
        nonlocal tries
        tries += 1
        raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), "down")

    with pytest.raises(Unreachable, match="no answer in 20000 s"):
        await retry.call(
            attempt, name="GetStatus", policy=retry.RetryPolicy(budget_s=20_000.0, cap_s=5.0), clock=EagerClock(),
            rng=random.Random(0),
        )  # fmt: skip

    assert tries > 5000
