"""Deduplication is by id, never by time: any order, any repetition, and one effect each."""

import asyncio
import dataclasses
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heterorl.common.errors import InvalidRequest, Unreachable
from heterorl.common.types.rollout import DropReason, GroupId, PushStatus
from heterorl.common.types.run import Command, Heartbeat
from heterorl.common.wire.sealed_groups import seal
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.coordinator.core import Coordinator
from heterorl.coordinator.sites import incarnations
from heterorl.coordinator.sites.incarnations import MAX_GAP
from tests.support.clock import ManualClock
from tests.support.examples import examples
from tests.support.run import INCARNATION, SITE, Run
from tests.support.sampler_world import World

NUM_GROUPS = 12


async def begin(directory):
    config = CoordinatorConfig(data_dir=Path(directory) / "data", groups_per_version=100)
    core = await Coordinator.open(config, ManualClock())
    run = Run(core, Path(directory))
    await run.begin()
    await run.publish()
    await run.register()
    return core, run


async def memory(core):
    """(watermark, sequences remembered beyond it)."""
    watermark = await core.database.run(lambda c: c.execute("SELECT watermark FROM sites").fetchone()[0])
    beyond = await core.database.run(lambda c: c.execute("SELECT sequence FROM beyond_watermark").fetchall())
    return watermark, {row[0] for row in beyond}


@settings(max_examples=examples(16), deadline=None)
@given(st.lists(st.lists(st.integers(1, NUM_GROUPS), min_size=1, max_size=6), max_size=12))
@pytest.mark.slow
def test_any_order_and_any_duplicates_take_effect_once(batches):
    async def push_all(directory):
        core, run = await begin(directory)
        groups = {}
        for number, work in enumerate(await run.lease(NUM_GROUPS), start=1):
            groups[number] = run.group(work, id=GroupId(site=SITE, incarnation=INCARNATION, sequence=number))
        seen = set()
        for batch in batches:
            outcomes = await core.push_groups([groups[sequence] for sequence in batch])
            for sequence, outcome in zip(batch, outcomes, strict=True):
                # Within one batch as across batches: the first is accepted, all later ones are duplicates.
                assert outcome.status is (PushStatus.DUPLICATE if sequence in seen else PushStatus.ACCEPTED)
                seen.add(sequence)
            dense = max(n for n in range(NUM_GROUPS + 1) if set(range(1, n + 1)) <= seen)
            assert await memory(core) == (dense, {sequence for sequence in seen if sequence > dense})
            answer = await core.register(run.registration())
            assert answer.next_sequence == max(seen) + 1
        assert (await core.get_status()).ledger.acked == len(seen)
        await core.close()

    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(push_all(directory))


async def test_refused_and_dropped_groups_are_told_apart_by_their_memory(tmp_path):
    core, run = await begin(tmp_path)
    work, other = await run.lease(2)
    far = run.group(other, id=GroupId(site=SITE, incarnation=INCARNATION, sequence=MAX_GAP + 1))
    (refused,) = await core.push_groups([far])
    assert refused.status is PushStatus.RETRY
    assert await memory(core) == (0, set())

    first = GroupId(site=SITE, incarnation=INCARNATION, sequence=1)
    bad = run.group(work, id=first, generation_s=float("nan"))
    (dropped,) = await core.push_groups([bad])
    (again,) = await core.push_groups([bad])
    assert (dropped.status, dropped.reason) == (PushStatus.DROPPED, DropReason.INVALID)
    assert again.status is PushStatus.DUPLICATE
    (accepted,) = await core.push_groups([far])
    assert accepted.status is PushStatus.ACCEPTED, "one place nearer, it is within the gap"
    await core.close()


async def test_same_sequence_of_another_incarnation_is_another_group(tmp_path):
    core, run = await begin(tmp_path)
    await core.register(run.registration(incarnation="inc-2"))
    (first, _) = await run.lease(2)
    group = run.group(first)
    twin = dataclasses.replace(group, id=dataclasses.replace(group.id, incarnation="inc-2"))
    outcomes = await core.push_groups([group, twin])
    # Accepted, and surplus: two ids, one prompt.
    assert [(o.status, o.reason) for o in outcomes] == [
        (PushStatus.ACCEPTED, None),
        (PushStatus.DROPPED, DropReason.SURPLUS),
    ]
    await core.close()


async def test_full_queue_asks_for_patience_and_forgets_nothing(tmp_path):
    core, run = await begin(tmp_path)
    groups = [run.group(work) for work in await run.lease(2)]
    one = len(seal(groups[0]).data)
    core.context.queue.quotas._pending_limit = one + 5
    outcomes = await core.push_groups(groups)
    assert [outcome.status for outcome in outcomes] == [PushStatus.ACCEPTED, PushStatus.RETRY]
    assert outcomes[1].retry_after_s > 0

    await run.publish(consumed=[groups[0].id])
    (outcome,) = await core.push_groups([groups[1]])
    assert outcome.status is PushStatus.ACCEPTED
    await core.close()


def test_quota_below_the_largest_group_is_refused():
    with pytest.raises(ValueError, match="wait for ever"):
        CoordinatorConfig(site_pending_bytes=1 << 20)


async def test_watermark_passes_over_what_a_site_can_no_longer_push(tmp_path):
    """A store restored from a copy of before: what was acknowledged since never comes again."""
    core, run = await begin(tmp_path)
    groups = [
        run.group(work, id=GroupId(site=SITE, incarnation=INCARNATION, sequence=number))
        for work, number in zip(await run.lease(6), (1, 2, 11, 12, 14, MAX_GAP + 5), strict=True)
    ]
    await core.push_groups(groups[:5])
    assert await memory(core) == (2, {11, 12, 14})
    (stuck,) = await core.push_groups(groups[5:])
    assert stuck.status is PushStatus.RETRY

    # 3 to 10 are settled, 13 is still in the outbox.
    answer = await core.register(run.registration(lowest_sequence=13))
    assert answer.next_sequence == 15
    assert await memory(core) == (12, {14})
    (taken,) = await core.push_groups(groups[5:])
    assert taken.status is PushStatus.ACCEPTED
    thirteenth = run.group((await run.lease(1))[0], id=dataclasses.replace(groups[0].id, sequence=13))
    assert [o.status for o in await core.push_groups([thirteenth, *groups[2:5]])] == [
        PushStatus.ACCEPTED, *[PushStatus.DUPLICATE] * 3
    ]  # fmt: skip
    assert await memory(core) == (14, {MAX_GAP + 5})
    await core.close()


@pytest.mark.sqlite
async def test_group_behind_a_gap_reads_few_of_those_before_it(tmp_path):
    core, _ = await begin(tmp_path)

    def remember(connection, sequence):
        incarnations.remember(connection, GroupId(site=SITE, incarnation=INCARNATION, sequence=sequence))

    def operation(connection):
        for sequence in range(2, 1000):
            remember(connection, sequence)
        statements = []
        connection.set_trace_callback(statements.append)
        remember(connection, 1001)
        connection.set_trace_callback(None)
        reads = [connection.execute(each).fetchall() for each in statements if each.startswith("SELECT")]
        remember(connection, 1)
        return max(map(len, reads))

    assert await core.database.run(operation) < 500
    assert await memory(core) == (999, {1001})
    await core.close()


async def test_watermark_only_rises_and_only_that_of_who_says_so(tmp_path):
    core, run = await begin(tmp_path)
    await run.push(3)
    await core.register(run.registration(incarnation="inc-2", lowest_sequence=500))
    for lowest in (0, 1, 3, 4):
        await core.register(run.registration(lowest_sequence=lowest))
        assert (await core.database.run(_watermarks)) == {"inc-1": 3, "inc-2": 499}
    with pytest.raises(InvalidRequest, match="lowest_sequence"):
        await core.register(run.registration(lowest_sequence=2**64 - 1))
    answer = await core.register(run.registration(lowest_sequence=2**62))
    assert answer.next_sequence == 2**62
    # Who lied is told so, and has harmed itself alone: nothing is acknowledged that has no account.
    (outcome,) = await core.push_groups([run.group((await run.lease(1))[0])])
    assert (outcome.status, outcome.reason) == (PushStatus.DROPPED, DropReason.CONFLICT)
    assert "lowest sequence" in outcome.message
    counts = (await core.get_status()).ledger
    assert (counts.acked, counts.pending, counts.is_balanced) == (3, 3, True)
    await core.close()


def _watermarks(connection):
    return dict(connection.execute("SELECT incarnation, watermark FROM sites"))


async def test_heartbeat_asks_to_register_again_before_the_gap_is_used_up(tmp_path):
    core, run = await begin(tmp_path)
    beat = Heartbeat(site=SITE, incarnation=INCARNATION, policy_version=0, state_root="", tokens_per_s=1)
    far = run.group((await run.lease(1))[0])
    far = dataclasses.replace(far, id=dataclasses.replace(far.id, sequence=MAX_GAP // 2 + 1))
    await core.push_groups([far])
    assert await core.heartbeat(beat) == (Command.REGISTER,)
    (site,) = (await core.get_status()).sites
    assert site.tokens_per_s == 1.0, "what it reports counts"
    await core.register(run.registration(lowest_sequence=far.id.sequence + 1))
    assert await core.heartbeat(beat) == ()
    await core.close()


async def test_sampler_says_what_it_can_still_push(tmp_path):
    world = await World.open(tmp_path)
    await world.run.publish()
    world.start()
    await world.until_acknowledged(6)

    async def push_groups(groups):
        raise Unreachable("the link is down")

    world.link.replaced["push_groups"] = push_groups
    await world.until(lambda: world.spooled() >= 4)
    lowest = world.outbox.lowest_sequence()
    kept = world.spooled()

    def restore(connection):
        # A copy of the store from before most of them came.
        connection.execute("DELETE FROM groups WHERE sequence > 2")
        connection.execute("UPDATE sites SET watermark = 2, accepted = 2")
        connection.execute("UPDATE ledger SET count = 2 WHERE account = 'acked'")
        connection.execute("DELETE FROM beyond_watermark")

    await world.core.database.run(restore)
    await world.kill()
    del world.link.replaced["push_groups"]
    world.start()
    await world.until_acknowledged(2 + kept)
    watermark, beyond = await memory(world.core)
    counts = (await world.core.get_status()).ledger
    await world.close()

    assert lowest > 3, "some of them are settled"
    assert watermark >= lowest - 1 + kept
    assert beyond == set()
    assert counts.is_balanced
