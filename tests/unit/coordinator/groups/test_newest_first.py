"""Newest first: the order of the published program, its bound, and that nothing waits for ever."""

import dataclasses
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heterorl.common.types.rollout import DropReason
from heterorl.coordinator.config import CoordinatorConfig
from heterorl.coordinator.core import Coordinator
from heterorl.coordinator.groups.order import Turns, newest_first, oldest_in_window
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
    floor = oldest_in_window(newest_taken, max_staleness_versions=bound)
    within = [group for group in waiting if group[0] >= floor]
    chosen = min(within, key=lambda group: newest_first(*group, newest_taken=newest_taken), default=None)

    expected = published_rule(waiting, newest_taken=newest_taken, window=bound // 2)
    # Two groups of one arrival do not exist.
    if len({arrival for _, arrival in waiting}) == len(waiting):
        assert chosen == expected


def test_a_share_bounds_a_site_under_newest_first_too():
    turns = Turns(order="newest", share=0.25, window=8)
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


async def test_what_left_the_window_is_dropped_counted_and_its_prompt_handed_out_again(world):
    for _ in range(BOUND):
        await world.run.publish()
    # The window behind version 5 is 3 wide: versions 2 and later.
    await push(world, 1, 5, 2)
    first = await leased(world, 2)
    ledger = (await world.core.get_status()).ledger
    assert [group.oldest_version for group in first] == [5, 2]
    assert (ledger.leased, ledger.pending) == (2, 1), "it goes when the next group is asked for"

    held = [group.id for group in first]
    again = world.core.stream_groups(epoch=world.run.epoch, held=held, credits=credits_of(1))
    waiting = anext(again)
    await push(world, 6)
    assert (await waiting).group.oldest_version == 6
    await again.aclose()

    ledger = (await world.core.get_status()).ledger
    assert ledger.dropped == {DropReason.STALE_AT_LEASE: 1}
    assert ledger.is_balanced
    grant = await world.core.lease_work(site="eu-1", incarnation=INCARNATION, max_groups=1, policy_version=6)
    assert grant.assignments[0].id == 0, "the prompt of the group that was dropped"


@given(st.data())
def test_no_group_is_older_than_the_bound_when_it_is_taken(data):
    # Of the rule alone: heads move on, versions come with any lag, the bound is kept where groups are leased.
    bound = data.draw(st.integers(0, 12))
    taken, head, waiting = -1, 0, []
    for arrival in range(60):
        head += data.draw(st.integers(0, 1))
        waiting.append((max(0, head - data.draw(st.integers(0, bound))), arrival))
        floor = max(head - bound, oldest_in_window(taken, max_staleness_versions=bound))
        within = [group for group in waiting if group[0] >= floor]
        if within:
            chosen = min(within, key=lambda group: newest_first(*group, newest_taken=taken))
            waiting.remove(chosen)
            assert head - chosen[0] <= bound
            # Twice the window: the newest that was taken is at most half of the bound newer than any that is.
            assert chosen[0] >= taken - bound // 2
            taken = max(taken, chosen[0])
