"""Delivery goes on through outages of any length and settles each group by its own outcome."""

import asyncio
import logging
import random

import pytest

from heterorl.common.errors import DiskFull, InvalidRequest, MessageTooLarge, Unreachable
from heterorl.common.process.clock import Bell
from heterorl.common.process.logs import Rarely
from heterorl.common.types.rollout import DropReason, PushOutcome, PushStatus
from heterorl.common.wire.sealed_groups import open_group
from heterorl.sampler.outbox.delivery import Delivery, settle
from heterorl.sampler.outbox.outbox import Outbox
from tests.support.outboxes import spooled_groups
from tests.support.run import Run


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


async def test_message_over_a_limit_that_shrank_waits_for_the_next_registration(outbox):
    """The registration brings the new limit, and then what cannot be sent is counted as lost instead."""
    clock = SleepingClock()
    api = Coordinator(clock)
    real = api.push_groups

    async def push_groups(groups):
        outcomes = await real(groups)
        if len(api.pushed) <= 3:
            raise MessageTooLarge("SERVER: Received message larger than max (9 vs. 8)")
        return outcomes

    api.push_groups = push_groups
    await delivered(outbox, api, clock, until=lambda: outbox.level().num_groups == 0)

    assert len(api.pushed) == 4
    assert len(clock.slept) == 3


async def test_outage_of_an_hour_loses_nothing_and_is_no_busy_loop(outbox):
    clock = SleepingClock()
    api = Coordinator(clock, outage_s=3600.0)

    await delivered(outbox, api, clock, until=lambda: clock.now > 3600 and not outbox.level().num_groups)

    # Full jitter up to 15 s is 7.5 s on average: 3600 / 7.5 = 480 calls, with a deviation of 4.33 / 7.5 / sqrt(480),
    # 3 percent.
    assert len(api.pushed) == pytest.approx(480, rel=0.1)
    assert max(clock.slept) <= 15.0
    assert min(clock.slept) < 1.0
    assert {tuple(ids) for ids in api.pushed} == {tuple(api.pushed[0])}
    assert [group_id.sequence for group_id in api.pushed[-1]] == [1, 2, 3]


async def test_coordinator_that_asks_to_retry_without_a_delay_is_not_asked_in_a_circle(outbox):
    clock = SleepingClock()
    api = Coordinator(clock)
    api.status = PushStatus.RETRY

    await delivered(outbox, api, clock, until=lambda: clock.now > 900)

    assert len(api.pushed) < 175
    assert outbox.level().num_groups == 3


async def test_request_that_can_never_succeed_ends_the_loop(outbox):
    class Refusing:
        async def push_groups(self, groups):
            raise InvalidRequest("groups")

    with pytest.raises(InvalidRequest, match="correct the named field"):
        await delivered(outbox, Refusing(), SleepingClock(), until=lambda: False)
    assert outbox.level().num_groups == 3
    # An empty group was refused as well, so that nothing more was tried: the request is wrong, not the groups.
    assert len(_put_aside(outbox)) == 1


def _put_aside(outbox):
    return outbox._connection.execute("SELECT sequence, reason, payload FROM set_aside").fetchall()


@pytest.mark.parametrize("outcomes_before", [True, False], ids=["stream", "call"])
async def test_group_that_is_refused_for_good_holds_up_no_other(outbox, caplog, outcomes_before):
    (middle,) = [group for group in outbox.due(0.0, limit=3, max_bytes=1 << 20)[0] if group.id.sequence == 2]

    settled = []

    class Refusing(Coordinator):
        async def push_groups(self, groups):
            bad = [number for number, group in enumerate(groups) if group.data == middle.data]
            if not bad:
                outcomes = await super().push_groups(groups)
                settled.extend((group.id.sequence, bool(open_group(group).rollouts)) for group in groups)
                return outcomes
            # A stream's first outcomes may come before its end, and need not.
            if bad[0] and outcomes_before:
                return await self.push_groups(groups[: bad[0]])
            raise InvalidRequest("group.rollouts.reward_parts.name: not one line of printable characters")

    api = Refusing(SleepingClock())
    await delivered(outbox, api, api.clock, until=lambda: not outbox.level().num_groups)

    assert settled == [(1, True), (2, False), (3, True)]
    ((sequence, reason, payload),) = _put_aside(outbox)
    assert (sequence, payload) == (2, middle.data)
    assert "reward_parts.name" in reason
    assert "GROUP 2 OF THE OUTBOX IS REFUSED" in caplog.text
    assert sum(api.clock.slept) > 0


async def test_group_that_is_refused_for_good_on_a_full_disk_waits(outbox, monkeypatch):
    monkeypatch.setattr(outbox, "put_aside", lambda sequence, problem: False)

    class Refusing(Coordinator):
        async def push_groups(self, groups):
            await super().push_groups(groups)
            raise InvalidRequest("groups")

    api = Refusing(SleepingClock())
    await delivered(outbox, api, api.clock, until=lambda: api.clock.now > 600)

    assert outbox.level().num_groups == 3
    assert len(api.pushed) < 200


async def test_full_disk_that_holds_a_damaged_group_delays_the_delivery(outbox, monkeypatch, caplog):
    due, failures = outbox.due, [DiskFull("the outbox")] * 2

    def due_later(*given, **named):
        if failures:
            raise failures.pop()
        return due(*given, **named)

    monkeypatch.setattr(outbox, "due", due_later)
    api = Coordinator(SleepingClock())
    await delivered(outbox, api, api.clock, until=lambda: outbox.level().num_groups == 0)

    assert caplog.text.count("the outbox waits for room") == 2
    assert sum(api.clock.slept) > 0


SAID = Rarely(logging.getLogger("test"), lambda: 0.0)


def test_only_terminal_outcomes_settle_a_group(tmp_path):
    run = Run(None, tmp_path)
    ids = [run.group(work, version=0).id for work in _work(5)]
    outcomes = [
        PushOutcome(id=ids[0], status=PushStatus.ACCEPTED),
        PushOutcome(id=ids[1], status=PushStatus.RETRY, retry_after_s=3.0),
        PushOutcome(id=ids[2], status=PushStatus.DUPLICATE),
        PushOutcome(id=ids[3], status=PushStatus.DROPPED, reason=DropReason.STALE_AT_INGEST),
        PushOutcome(id=ids[4], status=PushStatus.RETRY, retry_after_s=1.0),
    ]

    # The longest of the delays that are asked for.
    assert settle(outcomes, SAID) == ([1, 3, 4], 3.0)


def _work(count):
    from heterorl.common.types.rollout import WorkAssignment

    return [WorkAssignment(id=number, prompt_index=number, seed=1, lease_s=1.0) for number in range(count)]


async def test_outcomes_that_came_before_the_link_broke_count(outbox):
    class Breaking(Coordinator):
        async def push_groups(self, groups):
            return (await super().push_groups(groups))[:1]

    api = Breaking(SleepingClock())
    await delivered(outbox, api, api.clock, until=lambda: not outbox.level().num_groups)

    assert [[group_id.sequence for group_id in ids] for ids in api.pushed] == [[1, 2, 3], [2, 3], [3]]
    assert api.clock.slept == [], "each call made progress"


async def test_outcome_of_another_group_settles_nothing(outbox):
    class Confused(Coordinator):
        async def push_groups(self, groups):
            return list(reversed(await super().push_groups(groups)))

    api = Confused(SleepingClock())
    await delivered(outbox, api, api.clock, until=lambda: api.clock.now > 60)

    # Of three groups the middle one keeps its place; then of two none does.
    assert [group_id.sequence for group_id in api.pushed[-1]] == [1, 3]


async def test_disk_that_is_full_when_groups_are_forgotten_repeats_the_push(outbox, monkeypatch, caplog):
    api = Coordinator(SleepingClock())
    real, failures = outbox.delete, [DiskFull("/state")] * 3

    def delete(*args, **options):
        if failures:
            raise failures.pop()
        return real(*args, **options)

    monkeypatch.setattr(outbox, "delete", delete)
    await delivered(outbox, api, api.clock, until=lambda: not outbox.level().num_groups)

    assert len(api.pushed) == 4
    assert "no space left under /state" in caplog.text


async def test_clock_that_is_set_back_holds_no_group(outbox):
    class Stepping(SleepingClock):
        wall_now = 2_000_000_000.0

        def wall(self):
            return self.wall_now

    clock = Stepping()
    delivery = Delivery(api=Coordinator(clock), outbox=outbox, clock=clock, bell=Bell(), rng=random.Random(0))
    outbox._write("UPDATE groups SET release = ?", [(clock.wall(),)])
    clock.wall_now -= 210_000_000.0
    loop = asyncio.create_task(delivery.deliver())
    while delivery.num_delivered < 3:  # noqa: ASYNC110
        await asyncio.sleep(0)
    loop.cancel()
    await asyncio.wait([loop])

    assert delivery.num_delivered == 3


def test_words_of_the_coordinator_are_one_line(caplog, tmp_path):
    run = Run(None, tmp_path)
    ids = [run.group(work, version=0).id for work in _work(2)]
    text = "no\n2026-01-01 00:00:00,000 CRITICAL services: the store failed\x1b[2J" + "x" * 10_000
    outcomes = [PushOutcome(id=i, status=PushStatus.DROPPED, reason=DropReason.INVALID, message=text) for i in ids]
    said = Rarely(logging.getLogger("test"), lambda: 0.0)
    settle(outcomes, said)
    settle(outcomes, said)

    (record,) = caplog.records
    assert record.getMessage().startswith(
        "the coordinator dropped 2 of 2 groups (invalid), the first is group 1: no 2026"
    )
    assert "\n" not in record.getMessage()
    assert "\x1b" not in record.getMessage()
    assert len(record.getMessage()) < 500


async def test_full_coordinator_is_not_sent_the_whole_outbox_again_and_again(tmp_path):
    """As after an outage, when the queue takes a site's groups only as fast as the learner trains on them."""
    clock = SleepingClock()
    outbox = Outbox(tmp_path / "spool")
    outbox.put(spooled_groups(outbox, 60, tmp_path), release=[0.0] * 60)
    sent, taken = 0, 0

    class Full:
        async def push_groups(self, groups):
            nonlocal sent, taken
            sent += len(groups)
            # Room for 10 groups, and for one more each second.
            room = max(0, 10 + int(clock.now) - taken)
            taken += min(room, len(groups))
            statuses = [PushStatus.ACCEPTED] * room + [PushStatus.RETRY] * len(groups)
            return [
                PushOutcome(id=group.id, status=status, retry_after_s=1.0)
                for group, status in zip(groups, statuses, strict=False)
            ]

    await delivered(outbox, Full(), clock, until=lambda: not outbox.level().num_groups)
    outbox.close()

    assert (taken, clock.now < 100) == (60, True)
    assert sent < 3 * 60
