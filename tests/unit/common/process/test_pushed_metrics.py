"""Pushes of metrics: one an interval, and no failure ends them."""

import asyncio

import pytest

from heterorl.common.errors import PermissionDenied, Unreachable
from heterorl.common.process import metrics
from heterorl.common.process.pushed_metrics import UNWANTED_S, push_metrics, pushing
from tests.support.clock import ManualClock

REGISTRY = metrics.registry_of("sampler")
UNREACHABLE, DENIED = Unreachable("no answer", retry_after_s=1.0), PermissionDenied("a sampler of no run")


async def settled():
    for _ in range(5):
        await asyncio.sleep(0)


async def test_each_interval_has_one_push_and_an_outage_ends_nothing(caplog):
    answers, clock = [True, UNREACHABLE, UNREACHABLE, True], ManualClock()
    pushed = []

    async def push(series):
        pushed.append(clock.monotonic())
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async with pushing(push, registry=REGISTRY, interval_s=15.0, clock=clock):
        await settled()
        while answers:
            clock.advance(15.0)
            await settled()

    assert pushed == [1000.0, 1015.0, 1030.0, 1045.0]
    assert caplog.messages == []


@pytest.mark.parametrize("answer", [False, DENIED])
async def test_coordinator_that_takes_none_is_asked_rarely_and_said_once(caplog, answer):
    clock, pushed = ManualClock(), []

    async def push(series):
        pushed.append(clock.monotonic())
        if answer is DENIED:
            raise DENIED
        return answer

    async with pushing(push, registry=REGISTRY, interval_s=15.0, clock=clock):
        await settled()
        for _ in range(2):
            clock.advance(UNWANTED_S - 1.0)
            await settled()
            clock.advance(1.0)
            await settled()

    assert pushed == [1000.0, 1000.0 + UNWANTED_S, 1000.0 + 2 * UNWANTED_S]
    assert len(caplog.messages) == 1
    assert "does not take this node's metrics" in caplog.messages[0]


async def test_interval_of_zero_pushes_nothing():
    async def push(series):
        raise AssertionError("pushed")

    await push_metrics(push, registry=REGISTRY, interval_s=0.0, clock=ManualClock())
