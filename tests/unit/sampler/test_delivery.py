"""Delivery goes on through outages of any length and settles each group by its own outcome."""

import asyncio
import random

import pytest

from services.common.bell import Bell
from services.common.errors import InvalidRequest, Unreachable
from services.common.types import DropReason, PushOutcome, PushStatus
from services.sampler.delivery import Delivery, settle
from services.sampler.outbox import Outbox
from tests.support.run import Run
from tests.unit.sampler.test_outbox import spooled_groups


class SleepingClock:
    """Time that passes by sleeping."""

    def __init__(self):
        self.now = 0.0
        self.slept = []

    def wall(self):
        return self.now

    def monotonic(self):
        return self.now

    async def sleep(self, seconds):
        self.slept.append(seconds)
        self.now += seconds
        await asyncio.sleep(0)


class Coordinator:
    """Answers pushes after `outage_s`; notes every call."""

    def __init__(self, clock, outage_s=0.0):
        self.clock, self.outage_s = clock, outage_s
        self.pushed = []
        self.status = PushStatus.ACCEPTED

    async def push_groups(self, groups):
        self.pushed.append([group.id for group in groups])
        if self.clock.now < self.outage_s:
            raise Unreachable("cut")
        return [PushOutcome(id=group.id, status=self.status) for group in groups]


@pytest.fixture
def outbox(tmp_path):
    outbox = Outbox(tmp_path / "spool")
    outbox.put(spooled_groups(outbox, 3, tmp_path), release=[0.0] * 3)
    yield outbox
    outbox.close()


async def delivered(outbox, api, clock, *, until):
    delivery = Delivery(api=api, outbox=outbox, clock=clock, bell=Bell(), rng=random.Random(0))
    loop = asyncio.create_task(delivery.deliver())
    while True:
        if until() or loop.done():
            break
        await asyncio.sleep(0)
    loop.cancel()
    await asyncio.wait([loop])
    if not loop.cancelled():
        loop.result()


async def test_outage_of_hours_loses_nothing_and_is_no_busy_loop(outbox):
    clock = SleepingClock()
    api = Coordinator(clock, outage_s=7200.0)

    await delivered(outbox, api, clock, until=lambda: clock.now > 7200 and not outbox.level().num_groups)

    # Full jitter up to 15 s is 7.5 s on average: 7200 / 7.5 = 960 calls, with a deviation of 4.33 / 7.5 / sqrt(960),
    # 2 percent.
    assert len(api.pushed) == pytest.approx(960, rel=0.1)
    assert max(clock.slept) <= 15.0
    assert min(clock.slept) < 1.0
    assert {tuple(ids) for ids in api.pushed} == {tuple(api.pushed[0])}
    assert [group_id.sequence for group_id in api.pushed[-1]] == [1, 2, 3]


async def test_coordinator_that_asks_to_retry_without_a_delay_is_not_asked_in_a_circle(outbox):
    clock = SleepingClock()
    api = Coordinator(clock)
    api.status = PushStatus.RETRY

    await delivered(outbox, api, clock, until=lambda: clock.now > 3600)

    assert len(api.pushed) < 700
    assert outbox.level().num_groups == 3


async def test_request_that_can_never_succeed_ends_the_loop(outbox):
    class Refusing:
        async def push_groups(self, groups):
            raise InvalidRequest("groups")

    with pytest.raises(InvalidRequest, match="correct the named field"):
        await delivered(outbox, Refusing(), SleepingClock(), until=lambda: False)
    assert outbox.level().num_groups == 3


def test_only_terminal_outcomes_settle_a_group(tmp_path):
    run = Run(None, tmp_path)
    ids = [run.group(work, version=0).id for work in _work(4)]
    outcomes = [
        PushOutcome(id=ids[0], status=PushStatus.ACCEPTED),
        PushOutcome(id=ids[1], status=PushStatus.RETRY, retry_after_s=3.0),
        PushOutcome(id=ids[2], status=PushStatus.DUPLICATE),
        PushOutcome(id=ids[3], status=PushStatus.DROPPED, reason=DropReason.STALE_AT_INGEST),
    ]

    assert settle(outcomes) == ([1, 3, 4], 3.0)


def _work(count):
    from services.common.types import WorkAssignment

    return [WorkAssignment(id=number, prompt_index=number, seed=1, lease_s=1.0) for number in range(count)]
