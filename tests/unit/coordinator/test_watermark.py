"""Deduplication is by id, never by time: any order, any repetition, and one effect each."""

import asyncio
import dataclasses
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.types import DropReason, GroupId, PushStatus
from services.common.wire import group_to_bytes
from services.coordinator.config import CoordinatorConfig
from services.coordinator.core import Coordinator
from services.coordinator.watermark import MAX_GAP
from tests.support.clock import ManualClock
from tests.support.run import INCARNATION, SITE, Run

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


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(1, NUM_GROUPS), min_size=1, max_size=6), max_size=12))
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
    one = len(group_to_bytes(groups[0]))
    small = core.config.model_copy(update={"site_pending_bytes": one + 5})
    core.queue = dataclasses.replace(core.queue, config=small)
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
