"""Work leased ahead of need."""

import math

import pytest

from heterorl.common.errors import Unreachable
from heterorl.common.wire.sealed_groups import open_group
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
