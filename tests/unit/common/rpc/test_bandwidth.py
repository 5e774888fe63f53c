"""A token bucket on a clock that only moves when somebody sleeps."""

import asyncio

import pytest

from heterorl.common.rpc.transport_options import BURST_S, TokenBucket


class SleepClock:
    """Time passes only in `sleep`, at once."""

    def __init__(self):
        self.now = 50.0

    def monotonic(self):
        return self.now

    async def sleep(self, seconds):
        self.now += seconds


@pytest.mark.parametrize("size", [1, 1000, 1 << 20, 50 << 20])
async def test_mean_rate_is_the_cap_however_large_the_takes(size):
    clock = SleepClock()
    bucket = TokenBucket(bytes_per_s=1e6, clock=clock)
    began = clock.now

    for _ in range(20):
        await bucket.take(size)

    assert clock.now - began == pytest.approx(20 * size / 1e6)


async def test_a_pause_is_worth_no_more_than_the_burst():
    clock = SleepClock()
    bucket = TokenBucket(bytes_per_s=1e6, clock=clock)
    clock.now += 3600

    waits = [await bucket.take(100_000) for _ in range(4)]

    assert waits == pytest.approx([0, 0, 0.4 - BURST_S - 0.1, 0.1])


async def test_takers_side_by_side_share_the_cap():
    clock = SleepClock()
    bucket = TokenBucket(bytes_per_s=1e6, clock=clock)
    slept = []

    async def sleep(seconds):
        slept.append(seconds)

    clock.sleep = sleep
    await asyncio.gather(*(bucket.take(500_000) for _ in range(4)))

    assert slept == pytest.approx([0.5, 1.0, 1.5, 2.0])


async def test_no_cap_never_waits():
    clock = SleepClock()
    bucket = TokenBucket(bytes_per_s=0.0, clock=clock)

    assert await bucket.take(1 << 40) == 0.0
    assert clock.now == 50.0
