"""The engine is refilled as completions end; what each group needs is its own."""

import dataclasses
import threading

import pytest

from heterorl.common.errors import EngineDied, RewardError
from heterorl.common.tasks.task import TaskWrapper
from heterorl.common.types.rollout import RewardPart
from heterorl.common.wire.sealed_groups import open_group
from heterorl.sampler.outbox.outbox import Outbox
from tests.support.limits import WAIT_S
from tests.support.run import CONTRACT
from tests.support.sampler_world import World

SIZE = CONTRACT.group_size


@pytest.fixture
async def world(tmp_path):
    world = await World.open(tmp_path)
    world.settings = {"swap": "in_flight", "work_ahead_s": 10.0}

    async def register(registration):
        return dataclasses.replace(await world.core.register(registration), work_ahead_s=registration.work_ahead_s)

    world.link.replaced["register"] = register
    yield world
    await world.close()


async def generating(world, *, groups=1):
    await world.run.publish()
    world.start()
    world.engine.is_paced = True
    await world.until(lambda: world.outbox.next_sequence > groups)


class SlowTask(TaskWrapper):
    """Scores in threads; those of some prompts wait until they are let go, or fail then."""

    def __init__(self, task):
        super().__init__(task, digest=task.digest, num_workers=4)
        self.slow = set()
        self.go = threading.Event()
        self.fails = False

    def score(self, prompt, completion):
        if prompt.index in self.slow:
            assert self.go.wait(WAIT_S)
            if self.fails:
                raise RewardError("no answer in 5 s")
        return (RewardPart(name="correct", value=1.0),)


async def test_next_group_begins_while_others_are_under_way_and_the_engine_never_runs_dry(world):
    await generating(world, groups=4)
    drafts, lowest = world.sampler.generation.collector.drafts, []
    real = world.engine.collect

    def collect():
        lowest.append(drafts.num_running)
        return real()

    world.engine.collect = collect
    made = world.outbox.next_sequence
    await world.until(lambda: world.outbox.next_sequence > made + 10)

    # A fill and what waits inside for room; on a slow machine a completion or two may end before the loop comes round.
    assert sum(lowest) / len(lowest) >= world.engine.max_running
    assert min(lowest) >= world.engine.max_running - SIZE
    assert max(lowest) <= world.engine.max_running + 2 * SIZE


async def test_work_is_leased_ahead_and_an_outage_idles_nothing(world):
    await generating(world, groups=20)
    generation = world.sampler.generation
    await world.until(lambda: len(generation.prefetch) >= 0.75 * generation.prefetch.target > 10)
    world.link.is_down = True
    held, made = len(generation.prefetch), world.outbox.next_sequence
    await world.until(lambda: not len(generation.prefetch) and not generation.num_in_flight)

    assert world.outbox.next_sequence >= made + held
    last = world.outbox.next_sequence - 1
    world.link.is_down = False
    await world.until_acknowledged(last)
    counts = (await world.core.get_status()).ledger
    assert sum(counts.dropped.values()) == 0


async def test_slow_reward_of_one_group_holds_neither_the_engine_nor_other_groups(world):
    world.task = SlowTask(world.task)
    await generating(world)
    in_flight = next(iter(world.sampler.generation.collector.drafts))
    world.task.slow = {in_flight.assignment.prompt_index}
    made, batches = world.outbox.next_sequence, world.engine.num_batches
    await world.until(lambda: world.outbox.next_sequence > made + 6)

    assert world.engine.num_batches > batches + 6 * SIZE
    assert in_flight in list(world.sampler.generation.collector.drafts)
    world.task.fails = True
    failed = world.link.calls["abandon_work"]
    world.task.go.set()
    await world.until(lambda: world.link.calls["abandon_work"] == failed + 1)
    assert in_flight not in list(world.sampler.generation.collector.drafts)


async def test_rewards_that_come_too_slowly_stop_the_engine_before_memory_fills(world):
    world.task = SlowTask(world.task)
    await generating(world)
    world.task.slow = set(range(CONTRACT.num_prompts))
    drafts = world.sampler.generation.collector.drafts
    await world.until(lambda: not drafts.num_running)
    unscored, speed = drafts.num_unscored, world.sampler.generation.collector.groups
    before = speed.per_s(world.clock.monotonic())
    await world.passed(60.0, step_s=1.0)

    # The site is as fast as its rewards: what it leases ahead follows from that.
    assert speed.per_s(world.clock.monotonic()) < before / 2
    assert unscored == drafts.num_unscored <= 2 * world.engine.max_running + 3 * SIZE
    made = world.outbox.next_sequence
    world.task.go.set()
    await world.until(lambda: world.outbox.next_sequence > made + 4)


async def test_swap_that_drains_waits_for_what_is_under_way_and_lets_nothing_more_begin(world):
    world.settings["swap"] = "drain"
    pushed = []

    async def push(groups):
        pushed.extend(groups)
        return await world.core.push_groups(groups)

    world.link.replaced["push_groups"] = push
    await generating(world, groups=3)
    for _ in range(3):
        version = await world.run.publish()
        await world.until(lambda version=version: world.engine.version == version)
    await world.until(lambda: any(group.oldest_version == 3 for group in pushed))

    assert {group.versions for group in pushed} == {(0,), (1,), (2,), (3,)}
    assert sum((await world.core.get_status()).ledger.dropped.values()) == 0


async def test_swap_beside_what_is_under_way_gives_each_group_its_oldest_root_and_forgets_the_others(world):
    pushed = []

    async def push(groups):
        pushed.extend(groups)
        return await world.core.push_groups(groups)

    world.link.replaced["push_groups"] = push
    await generating(world, groups=3)
    for _ in range(4):
        version = await world.run.publish()
        await world.until(lambda version=version: world.engine.version == version)
    await world.until(lambda: any(group.oldest_version == 4 for group in pushed))

    assert any(len(open_group(group).rollouts[0].spans) > 1 for group in pushed)
    assert all(group.state_root == world.run.roots[group.oldest_version] for group in pushed)
    assert sum((await world.core.get_status()).ledger.dropped.values()) == 0
    await world.until(lambda: 0 not in world.sampler.generation.swap.state_roots)
    await world.until(lambda: set(world.sampler.generation.swap.state_roots) == {4})


async def test_engine_that_dies_loses_what_it_computed_and_keeps_what_only_waits_for_rewards(world):
    world.task = SlowTask(world.task)
    await generating(world)
    drafts = world.sampler.generation.collector.drafts
    scored = next(iter(drafts))
    world.task.slow = {scored.assignment.prompt_index}
    await world.until(lambda: len(scored.completions) == SIZE)
    asked = []

    async def abandon_work(*, assignments, **named):
        asked.extend(assignments)
        await world.core.abandon_work(assignments=assignments, **named)

    world.link.replaced["abandon_work"] = abandon_work
    world.engine.batch_failures = [EngineDied("killed")]
    await world.until(lambda: bool(asked))
    made = world.outbox.next_sequence
    world.task.go.set()
    await world.until(lambda: world.outbox.next_sequence > made + 3)

    assert scored.assignment.id not in asked
    assert scored not in list(drafts)
    assert len(asked) == len(set(asked)) >= 2


async def test_stop_hands_back_the_reserve_and_what_is_under_way(world):
    await generating(world, groups=20)
    asked = []

    async def abandon_work(*, assignments, **named):
        asked.extend(assignments)
        await world.core.abandon_work(assignments=assignments, **named)

    world.link.replaced["abandon_work"] = abandon_work
    world.stop.set()
    await world.end()

    leased = "SELECT count(*) FROM work WHERE is_leased = 1"
    rows = await world.core.database.run(lambda c: c.execute(leased).fetchone())
    outbox = Outbox(world.directory / "site")
    assert rows == (outbox.level().num_groups,)
    outbox.close()
    assert len(asked) > 2


async def test_process_after_a_kill_says_what_it_can_still_answer(world):
    await generating(world, groups=20)
    stated = []

    async def register(registration):
        stated.append(registration.held)
        return await world.core.register(registration)

    world.link.is_down = True
    await world.until(lambda: world.spooled() >= 5)
    await world.kill()
    world.link.is_down = False
    world.link.replaced["register"] = register
    world.start()
    await world.until(lambda: world.engine.num_batches > 2)

    assert len(stated[0]) >= 5
    assert set(stated[0]) <= set(range(10_000))
