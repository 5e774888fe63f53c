"""Swaps during a batch: its groups span versions and count from the oldest; a swap that fails drops the batch."""

import asyncio

import pytest

from heterorl.common.errors import StaleWeights
from heterorl.common.process import metrics
from heterorl.common.types.rollout import Span
from heterorl.common.wire.sealed_groups import open_group
from heterorl.sampler.outbox.outbox import Outbox
from tests.support.sampler_world import World


@pytest.fixture
async def world(tmp_path):
    world = await World.open(tmp_path)
    world.settings = {"swap": "in_flight"}
    yield world
    await world.close()


async def hold_a_batch(world):
    """Let a batch begin with version 0 and stop in the middle of it."""
    await world.run.publish()
    world.start()
    await world.until(lambda: world.engine.num_batches >= 1)
    world.engine.proceed.clear()
    batches = world.engine.num_batches
    await world.until(lambda: world.engine.num_batches > batches)


async def test_groups_of_a_batch_that_was_under_way_span_versions_and_carry_the_oldest_root(world):
    pushed = []

    async def push(groups):
        pushed.extend(groups)
        return await world.core.push_groups(groups)

    world.link.replaced["push_groups"] = push
    await hold_a_batch(world)
    await world.run.publish()
    await world.run.publish()
    await world.until(lambda: world.engine.version == 2)
    assert world.engine.is_held

    world.engine.proceed.set()
    await world.until(lambda: any(len(group.versions) > 1 for group in pushed))

    group = next(open_group(group) for group in pushed if len(group.versions) > 1)
    spans = (Span(version=0, start=0, end=1), Span(version=2, start=1, end=3))
    assert all(rollout.spans == spans for rollout in group.rollouts)
    assert (group.oldest_version, group.state_root) == (0, world.run.roots[0])
    await world.until(lambda: any(group.oldest_version == 2 for group in pushed))
    counts = (await world.core.get_status()).ledger
    assert counts.acked >= len(pushed) - 2
    assert sum(counts.dropped.values()) == 0


async def test_group_that_began_after_the_swap_carries_the_new_root(world):
    """No token of it is of the version that the batch was leased with."""
    pushed = []

    async def push(groups):
        pushed.extend(groups)
        return await world.core.push_groups(groups)

    world.link.replaced["push_groups"] = push
    await hold_a_batch(world)
    await world.run.publish()
    await world.until(lambda: world.engine.version == 1)
    world.engine.begins_late = True
    world.engine.proceed.set()
    await world.until(lambda: any(group.oldest_version == 1 for group in pushed))

    assert {group.state_root for group in pushed if group.oldest_version == 1} == {world.run.roots[1]}
    assert sum((await world.core.get_status()).ledger.dropped.values()) == 0


async def test_batch_whose_swap_failed_gives_no_group_and_its_work_is_handed_back(world):
    def failures():
        return sum(metrics.ENGINE_FAILURES.labels(reason)._value.get() for reason in ("stale", "died"))

    before = failures()
    await hold_a_batch(world)
    spooled, abandoned = world.outbox.next_sequence, world.link.calls["abandon_work"]
    world.engine.load_failures = [StaleWeights(1, difference=0.65, tolerance=1e-4)]
    await world.run.publish()
    await world.until(lambda: failures() > before)
    assert world.sampler.generation.reported().policy_version == -1

    world.engine.proceed.set()
    await world.until(lambda: world.link.calls["abandon_work"] > abandoned)
    assert world.outbox.next_sequence == spooled
    await world.until(lambda: world.outbox.next_sequence > spooled)

    # The swap's, and not the batch's that it took along.
    assert failures() == before + 1
    assert world.engine.version == 1


async def test_stop_during_a_swap_ends_when_the_engine_has_the_weights_and_hands_everything_back(world):
    await hold_a_batch(world)
    world.engine.may_load.clear()
    await world.run.publish()
    await world.until(lambda: world.engine.is_loading)
    submitted, began = len(world.engine.submitted), world.clock.monotonic()
    world.stop.set()
    await world.passed(10.0)
    # Its thread cannot be cancelled, and must not outlive what it writes to.
    assert not world.is_ended

    world.engine.may_load.set()
    await world.end()

    assert world.clock.monotonic() - began < 12.0
    assert world.engine.version == 1
    assert len(world.engine.submitted) == submitted
    await _only_what_is_spooled_is_leased(world)


async def test_stop_during_the_start_of_an_engine_ends_it_within_seconds(world):
    await hold_a_batch(world)
    world.engine.may_load.clear()
    world.engine.is_starting = True
    await world.run.publish()
    await world.until(lambda: world.engine.is_loading)
    began = world.clock.monotonic()
    world.stop.set()
    await world.end()

    assert world.clock.monotonic() - began < 5.0
    assert world.engine.version == -1
    await _only_what_is_spooled_is_leased(world)


async def test_version_that_comes_during_a_stop_is_not_loaded(world):
    await hold_a_batch(world)

    async def abandon_work(**given):
        await asyncio.Event().wait()

    # The stop lasts as long as the work is not taken back.
    world.link.replaced["abandon_work"] = abandon_work
    began = world.clock.monotonic()
    world.stop.set()
    await world.until(lambda: not world.engine.is_held)
    assert world.clock.monotonic() - began < 1.0, "nobody waits for what the engine computes"
    await world.run.publish()
    await world.end()

    assert world.sampler.policy.head_version == 1
    assert [version for version, _ in world.engine.loaded] == [0]


async def _only_what_is_spooled_is_leased(world):
    leased = "SELECT count(*) FROM work WHERE is_leased = 1"
    (count,) = await world.core.database.run(lambda c: c.execute(leased).fetchone())
    outbox = Outbox(world.directory / "site")
    assert count == outbox.level().num_groups
    outbox.close()
