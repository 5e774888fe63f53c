"""Work leased ahead of need."""

import asyncio
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest

from heterorl.common.errors import EngineError, Unreachable
from heterorl.common.process.clock import Bell
from heterorl.common.types.rollout import DropReason, WorkAssignment, WorkGrant
from heterorl.common.wire.sealed_groups import open_group
from heterorl.sampler.rollout.prefetch import GROUPS_S, Prefetch, Rate
from tests.support.clock import ManualClock
from tests.support.sampler_world import World


@pytest.fixture
async def world(tmp_path):
    world = await World.open(tmp_path, max_work_ahead_s=3600.0, work_lease_s=5.0)
    world.settings = {"work_ahead_s": 10.0}
    await world.run.publish()
    yield world
    await world.close()


@pytest.mark.slow
async def test_assignment_that_ran_out_and_is_given_again_waits_once(world):
    world.start()
    generation = world.sampler.generation
    await world.until(lambda: len(generation.prefetch.look(1000)) > 10)
    world.engine.proceed.clear()
    await world.passed(0.5)
    held = {each.id for each in generation.prefetch.look(1000)}
    # The leases run out while the site cannot work.
    await world.passed(30.0, step_s=1.0)
    real, again = generation.prefetch.ask, set()

    async def ask(*given):
        count = await real(*given)
        numbers = [each.id for each in generation.prefetch.look(1000)]
        again.update(number for number in numbers if numbers.count(number) > 1)
        return count

    generation.prefetch.ask = ask
    world.engine.proceed.set()
    await world.until(lambda: not held & {each.id for each in generation.prefetch.look(1000)})

    assert len(held) > 10
    assert not again


async def test_assignment_whose_group_waits_on_disk_is_not_drawn_again(world):
    async def push_groups(groups):
        raise Unreachable("the link is down")

    world.link.replaced["push_groups"] = push_groups
    world.settings = {}
    world.start()
    # Leases of 5 s run out, and the coordinator grants these assignments again.
    await world.passed(20.0, step_s=0.5)
    groups, _ = world.outbox.due(math.inf, limit=1000, max_bytes=1 << 20)
    answered = [open_group(group).assignment for group in groups]

    assert len(answered) > 10
    assert len(set(answered)) == len(answered)


async def leased(world):
    """Assignments that the coordinator leases to the site."""
    rows = "SELECT assignment FROM work WHERE is_leased = 1"
    return {row[0] for row in await world.core.database.run(lambda connection: connection.execute(rows).fetchall())}


async def test_assignment_whose_group_was_accepted_on_the_way_of_its_grant_is_not_drawn_again(world):
    async def push_groups(groups):
        raise Unreachable("the link is down")

    async def lease_work(**asked):
        grant = await world.core.lease_work(**asked)
        await world.clock.sleep(2.0)
        return grant

    world.link.replaced["push_groups"] = push_groups
    world.settings = {}
    world.start()
    await world.passed(10.0, step_s=0.5)
    # The answer to a push overtakes the answer to the lease.
    world.link.replaced["lease_work"] = lease_work
    await world.passed(4.0, step_s=0.5)
    del world.link.replaced["push_groups"]
    await world.passed(30.0, step_s=0.5)
    dropped = (await world.core.get_status()).ledger.dropped

    assert await world.ledger_acked() > 20
    assert not dropped.get(DropReason.SURPLUS)


async def test_assignment_of_a_dropped_group_that_is_given_again_before_the_answer_is_drawn(tmp_path):
    world = await World.open(
        tmp_path, max_staleness_versions=1, groups_per_version=500, work_lease_s=100.0, max_work_ahead_s=3600.0
    )
    try:
        world.settings = {"work_ahead_s": 20.0}
        await world.run.publish()
        world.start()
        world.engine.is_paced = True
        await world.until(lambda: len(world.sampler.generation.prefetch) > 10, step_s=0.5)
        world.link.is_down = True
        await world.passed(30.0, step_s=0.5)
        drawn = set(world.outbox.assignments())
        for _ in range(3):
            await world.run.publish()

        async def push_groups(groups):
            outcomes = await world.core.push_groups(groups)
            await world.clock.sleep(20.0)
            return outcomes

        # The coordinator drops the groups as stale and gives their prompts out while the answer is on its way.
        world.link.replaced["push_groups"] = push_groups
        world.link.is_down = False
        await world.passed(60.0, step_s=0.5)
        del world.link.replaced["push_groups"]
        await world.passed(40.0, step_s=0.5)
        generation = world.sampler.generation
        here = {*generation.collector.unsettled(), *world.outbox.assignments()}
        here |= {each.id for each in generation.prefetch.look(1000)}

        assert len(drawn) > 10
        assert not drawn & await leased(world) - here
    finally:
        await world.close()


async def test_reserve_that_others_drew_in_a_pause_is_not_drawn_again(tmp_path):
    world = await World.open(
        tmp_path, groups_per_version=500, max_outstanding_groups=4000, work_lease_s=20.0, max_work_ahead_s=3600.0
    )
    try:
        world.settings = {"work_ahead_s": 20.0}
        await world.run.publish()
        world.start()
        world.engine.is_paced = True
        prefetch = world.sampler.generation.prefetch
        await world.until(lambda: len(prefetch) > 10, step_s=0.5)
        # The engine hangs for longer than the term of the leases, without a link.
        world.engine.is_paced = False
        world.engine.proceed.clear()
        world.link.is_down = True
        await world.passed(60.0, step_s=1.0)
        reserve = {each.id for each in prefetch.look(1000)}
        await world.run.register("near")
        near = await world.core.lease_work(site="near", incarnation="inc-1", max_groups=100, policy_version=0)
        drawn = [world.run.group(work) for work in near.assignments]
        await world.core.push_groups([replace(group, id=replace(group.id, site="near")) for group in drawn])
        world.link.is_down = False
        await world.passed(20.0, step_s=1.0)
        world.engine.proceed.set()
        world.engine.is_paced = True
        await world.passed(40.0, step_s=0.5)
        rows = "SELECT assignment FROM groups WHERE reason = 'surplus'"
        again = await world.core.database.run(lambda connection: connection.execute(rows).fetchall())

        assert len(reserve & {work.id for work in near.assignments}) > 5
        assert not reserve & {number for (number,) in again}
    finally:
        await world.close()


async def test_assignment_that_is_being_returned_is_not_drawn(world):
    may_return, is_returned, granted = asyncio.Event(), asyncio.Event(), set()
    real_lease, real_abandon = world.core.lease_work, world.core.abandon_work

    async def lease_work(**given):
        grant = await real_lease(**given)
        granted.update(each.id for each in grant.assignments)
        if granted & returning:
            # The coordinator takes it back, also from the new lease, before the sampler has the grant.
            may_return.set()
            await is_returned.wait()
        return grant

    async def abandon_work(**given):
        await may_return.wait()
        await real_abandon(**given)
        is_returned.set()

    world.link.replaced["abandon_work"] = abandon_work
    returning = set()
    world.start()
    # The engine loses groups, and the link does not take them back before their leases run out.
    world.engine.batch_failures.append(EngineError("it crashed"))
    collector = world.sampler.generation.collector
    await world.until(lambda: bool(collector._returned))
    returning |= {number for number, _ in collector._returned}
    world.engine.proceed.clear()
    await world.passed(60.0, step_s=1.0)
    world.link.replaced["lease_work"] = lease_work
    world.engine.proceed.set()
    await world.until(lambda: is_returned.is_set() and world.link.calls["abandon_work"] > 1)
    await world.passed(2.0)

    assert returning & granted
    assert not sum((await world.core.get_status()).ledger.dropped.values())


async def test_question_that_is_open_at_a_stop_leaves_nothing_leased(world):
    is_granted = asyncio.Event()

    async def lease_work(**given):
        grant = await world.core.lease_work(**given)
        is_granted.set()
        await world.clock.sleep(1.0)
        return grant

    world.link.replaced["lease_work"] = lease_work
    world.start()
    await world.until(is_granted.is_set)
    before = await leased(world)
    world.stop.set()
    await world.end()

    assert before
    assert not await leased(world)


class Granted:
    """A WorkClient whose coordinator gives the same two assignments at each question, for 5 s."""

    def __init__(self):
        self.clock, self.session, self.returned = ManualClock(), SimpleNamespace(work_ahead_s=0.0), []

    async def ask(self, version, count, *, num_prompts):
        work = tuple(WorkAssignment(id=number, prompt_index=number, seed=1, lease_s=5.0) for number in range(2))
        return WorkGrant(assignments=work, reason="", retry_after_s=0.0)

    async def abandon(self, numbers):
        self.returned += numbers
        return True


def reserve(work, begun):
    return Prefetch(
        work=work, num_prompts=9, room_groups=2, rate=Rate(GROUPS_S), news=Bell(), begun=lambda: begun, spooled=tuple
    )


async def test_assignment_that_the_engine_refused_keeps_the_end_of_its_lease():
    work = Granted()
    prefetch = reserve(work, [])
    await prefetch.ask(0, 2)
    refused = prefetch.look(1)
    prefetch.drop(1)
    prefetch.put_back(refused)
    assert prefetch.missing == 0
    work.clock.advance(6.0)

    assert prefetch.missing == 2


async def test_assignment_that_the_engine_refused_is_not_returned_while_it_waits():
    work, begun = Granted(), []
    prefetch = reserve(work, begun)
    await prefetch.ask(0, 2)
    refused = prefetch.look(1)
    prefetch.drop(1)
    begun.append(0)
    work.clock.advance(6.0)
    # The coordinator gives it again while the engine is asked.
    await prefetch.ask(0, 2)
    begun.clear()
    prefetch.put_back(refused)
    await prefetch.ask(0, 2)

    assert [each.id for each in prefetch.look(9)] == [0, 1]
    assert work.returned == []


async def test_end_gives_what_waits_and_what_was_skipped_once_its_group_is_gone():
    begun = [0]
    prefetch = reserve(Granted(), begun)
    await prefetch.ask(0, 2)

    assert await prefetch.end() == [1]
    begun.clear()
    assert await prefetch.end() == [0]
    assert (await prefetch.ask(0, 2), await prefetch.end()) == (0, [])
