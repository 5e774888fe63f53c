"""Newest first: the order of the published program, its bound, and that nothing waits for ever."""

import dataclasses
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heterorl.common.types.rollout import DropReason
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.coordinator.core import Coordinator
from heterorl.coordinator.groups.queue import LATE_EVERY, SiteOrder, newest_first
from tests.support.clock import ManualClock
from tests.support.run import INCARNATION, Run, credits_of

BOUND = 6


def published_rule(waiting, *, newest_taken, window):
    """The order as the published program has it: files sorted by time, versions compared with the newest processed."""
    newest = max(version for version, _ in waiting)
    by_time = sorted(waiting, key=lambda group: group[1])
    if newest_taken < newest:
        return next(group for group in by_time if group[0] == newest)
    return next((group for group in by_time if group[0] >= newest_taken - window), None)


@given(st.sets(st.tuples(st.integers(0, 12), st.integers(0, 99)), min_size=1), st.integers(-1, 12), st.integers(0, 12))
def test_rank_and_window_are_the_published_rule(waiting, newest_taken, bound):
    floor = newest_taken - bound // 2
    within = [group for group in waiting if group[0] >= floor]
    chosen = min(within, key=lambda group: newest_first(*group, newest_taken=newest_taken), default=None)

    expected = published_rule(waiting, newest_taken=newest_taken, window=bound // 2)
    # Two groups of one arrival do not exist.
    if len({arrival for _, arrival in waiting}) == len(waiting):
        assert chosen == expected


def test_a_share_bounds_a_site_under_newest_first_too():
    turns = SiteOrder(order="newest", share=0.25, window=8)
    # One site has newer groups than all others.
    ranks = {"loud": (0, -9, 1), "b": (1, 0, 2), "c": (1, 0, 3), "d": (1, 0, 4)}
    served = [turns.next(ranks) for _ in range(20)]

    assert not turns.is_plain
    assert all(served[start : start + 8].count("loud") == 2 for start in range(8))


@pytest.fixture
async def world(tmp_path):
    config = CoordinatorConfig(
        data_dir=tmp_path / "data", groups_per_version=2, max_staleness_versions=BOUND, max_outstanding_groups=1000,
        lease_order="newest",
    )  # fmt: skip
    core = await Coordinator.open(config, ManualClock())
    run = Run(core, tmp_path)
    await run.begin()
    await run.publish()
    await run.register()
    yield SimpleNamespace(core=core, run=run, sequence=0)
    await core.close()


async def push(world, *versions):
    """Push a group of each version, in this order; their sequences are 1, 2, ..."""
    grant = await world.core.lease_work(
        site="eu-1", incarnation=INCARNATION, max_groups=len(versions), policy_version=world.run.head
    )
    groups = []
    for version, work in zip(versions, grant.assignments, strict=True):
        world.sequence += 1
        group = world.run.group(work, version=version)
        groups.append(dataclasses.replace(group, id=dataclasses.replace(group.id, sequence=world.sequence)))
    outcomes = await world.core.push_groups(groups)
    assert {outcome.status.value for outcome in outcomes} == {"accepted"}


async def leased(world, count, *, held=()):
    got = []
    async for queued in world.core.stream_groups(epoch=world.run.epoch, held=held, credits=credits_of(count)):
        got.append(queued.group)
        if len(got) == count:
            break
    return got


async def test_a_newer_version_first_then_what_came_first(world):
    for _ in range(4):
        await world.run.publish()
    await push(world, 1, 3, 2, 3, 1)

    # The first of version 3; then no version is newer, so by arrival.
    assert [group.id.sequence for group in await leased(world, 5)] == [2, 1, 3, 4, 5]


async def test_each_new_version_is_taken_once_before_the_rest(world):
    await world.run.publish()
    await push(world, 0, 1, 0)
    first = await leased(world, 2)
    await world.run.publish(consumed=[group.id for group in first])
    await push(world, 2, 2)

    assert [group.id.sequence for group in first] == [2, 1]
    assert [group.id.sequence for group in await leased(world, 3)] == [4, 3, 5]


async def test_every_fourth_group_is_of_those_behind_the_window_and_each_one_where_no_other_waits(world):
    for _ in range(BOUND):
        await world.run.publish()
    # The window behind version 6, which is taken first, is 3 wide. Of those behind it 1 ends before 2.
    await push(world, 6, 2, 1, 6, 6, 6, 6, 6, 2)

    assert [group.oldest_version for group in await leased(world, 9)] == [6, 6, 6, 6, 1, 6, 6, 2, 2]


async def test_what_is_beyond_the_bound_is_dropped_counted_and_its_prompt_handed_out_again(world):
    await push(world, 0)
    for _ in range(BOUND + 1):
        await world.run.publish()
    await push(world, BOUND + 1)

    assert [group.oldest_version for group in await leased(world, 1)] == [BOUND + 1]
    ledger = (await world.core.get_status()).ledger
    assert ledger.dropped == {DropReason.STALE_AT_LEASE: 1}
    assert ledger.is_balanced
    grant = await world.core.lease_work(site="eu-1", incarnation=INCARNATION, max_groups=1, policy_version=BOUND + 1)
    assert grant.assignments[0].id == 0, "the prompt of the group that was dropped"


async def test_a_site_that_is_always_behind_the_window_is_trained_on_beside_a_fast_one(world):
    taken = []
    for _ in range(40):
        # The fast site alone could fill each version of two groups.
        await push(world, world.run.head, world.run.head, max(0, world.run.head - BOUND // 2 - 1))
        got = await leased(world, 2)
        taken += [world.run.head - group.oldest_version for group in got]
        await world.run.publish(consumed=[group.id for group in got])

    # Of 80 groups a quarter, but for the first versions, which none is behind.
    assert 16 <= sum(age > BOUND // 2 for age in taken) <= 24
    assert max(taken) <= BOUND


@given(st.data())
def test_no_group_is_older_than_the_bound_when_it_is_taken(data):
    # Of the rule alone: heads move on, versions come with any lag, the bound is kept where groups are leased.
    bound = data.draw(st.integers(0, 12))
    taken, head, waiting, passed = -1, 0, [], 0
    turns = SiteOrder(order="newest", share=1.0, window=1)
    for arrival in range(60):
        head += data.draw(st.integers(0, 1))
        waiting.append((max(0, head - data.draw(st.integers(0, bound))), arrival))
        floor = taken - bound // 2
        fresh = [group for group in waiting if head - group[0] <= bound]
        within, late = ([group for group in fresh if (group[0] < floor) is is_late] for is_late in (False, True))
        is_late_next = turns.is_late_next(has_late=bool(late), has_others=bool(within))
        passed = 0 if is_late_next or not late else passed + 1
        # None of those behind the window waits for more than three others.
        assert passed < LATE_EVERY
        if fresh:
            chosen = (
                min(late) if is_late_next else min(within, key=lambda group: newest_first(*group, newest_taken=taken))
            )
            waiting.remove(chosen)
            assert head - chosen[0] <= bound
            taken = max(taken, chosen[0])
