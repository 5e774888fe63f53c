"""Groups are leased for the version that will consume them, which is not always the next one."""

import pytest

from heterorl.common.types.rollout import DropReason
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.coordinator.core import Coordinator
from heterorl.coordinator.versions import lineage
from tests.support.clock import ManualClock
from tests.support.run import CONTRACT, Run, credits_of


async def _begin(tmp_path, *, groups_per_version, bound=1, **changes):
    config = CoordinatorConfig(
        data_dir=tmp_path / "data", groups_per_version=2, max_staleness_versions=bound, max_outstanding_groups=1000,
        **changes,
    )  # fmt: skip
    core = await Coordinator.open(config, ManualClock())
    run = Run(core, tmp_path)
    grant = await core.acquire_lease(
        holder="learner", contract=CONTRACT, request_id="r", groups_per_version=groups_per_version
    )
    run.epoch = grant.epoch
    await run.publish()
    await run.register()
    return core, run


async def _leased(core, run, count):
    """Sequences of the groups that a new stream with so many credits gets; it holds them all."""
    got = []
    async for queued in core.stream_groups(epoch=run.epoch, held=(), credits=credits_of(count)):
        got.append(queued.group.id.sequence)
        if len(got) == count:
            break
    return got


@pytest.mark.parametrize(
    ("generation_s", "stands_s", "expected"),
    [
        (0.0, 0.0, 0),
        (9.0, 0.0, 0),
        (10.0, 0.0, 0),  # its own version
        (10.1, 0.0, 1),
        (600.0, 0.0, 59),
        (600.0, 5.0, 59),
        (600.0, 100.0, 5),  # no version for 100 s
        (600.0, 3600.0, 0),
        (1e308, 0.0, 999_999),  # what a site says is no reason for an error
    ],
)
async def test_versions_that_come_are_counted_by_how_long_the_last_ones_took(
    tmp_path, generation_s, stands_s, expected
):
    core, run = await _begin(tmp_path, groups_per_version=2)
    clock = core.clock

    def coming():
        return core.database.run(
            lambda connection: lineage.coming(connection, generation_s, head=run.head, now=clock.wall())
        )

    assert await coming() == 0, "one version says nothing"
    clock.advance(5000.0)
    for _ in range(lineage.VERSIONS_TIMED + 1):
        clock.advance(10.0)
        await run.publish()
    clock.advance(stands_s)

    assert await coming() == expected
    await core.close()


async def test_group_at_the_bound_is_not_leased_behind_a_whole_step(tmp_path):
    core, run = await _begin(tmp_path, groups_per_version=2, bound=1)
    work = await run.lease(4)
    await run.publish()
    # Head 1, groups of version 0: 0 is what version 2 may consume, and no later one.
    await core.push_groups([run.group(entry, version=0) for entry in work])

    assert await _leased(core, run, 4) == [1, 2]

    ledger = (await core.get_status()).ledger
    assert (ledger.leased, ledger.pending) == (2, 2), "the others wait: they may come sooner"
    await core.close()


async def test_group_at_the_bound_is_leased_when_those_before_it_are_given_up(tmp_path):
    core, run = await _begin(tmp_path, groups_per_version=2, bound=1)
    work = await run.lease(3)
    await run.publish()
    groups = [run.group(entry, version=0) for entry in work]
    await core.push_groups(groups)
    stream = core.stream_groups(epoch=run.epoch, held=(), credits=credits_of(3))
    first = [(await anext(stream)).group.id.sequence for _ in range(2)]

    await core.abandon_groups(epoch=run.epoch, ids=[groups[0].id], reason="test")

    assert first == [1, 2]
    assert (await anext(stream)).group.id.sequence == 3, "woken by the bell"
    await stream.aclose()
    await core.close()


async def test_fresh_groups_are_leased_ahead(tmp_path):
    core, run = await _begin(tmp_path, groups_per_version=2, bound=3)
    await run.push(8)

    # Staleness 0 now, 3 when the fourth version after the head consumes the last of them.
    assert await _leased(core, run, 8) == [1, 2, 3, 4, 5, 6, 7, 8]
    await core.close()


@pytest.mark.parametrize("share", [1.0, 0.5])
async def test_learner_that_does_not_say_its_step_is_leased_by_the_head_alone(tmp_path, share):
    core, run = await _begin(tmp_path, groups_per_version=0, bound=1, site_batch_share=share)
    work = await run.lease(4)
    await run.publish()
    await core.push_groups([run.group(entry, version=0) for entry in work])

    assert sorted(await _leased(core, run, 4)) == [1, 2, 3, 4]
    await core.close()


@pytest.mark.parametrize("mask_stale", [False, True])
async def test_group_that_is_abandoned_for_its_age_is_counted_and_handed_out_again(tmp_path, mask_stale):
    core, run = await _begin(tmp_path, groups_per_version=0, bound=1, mask_stale=mask_stale)
    work = await run.lease(2)
    groups = [run.group(entry, version=0) for entry in work]
    await core.push_groups(groups)
    await _leased(core, run, 2)
    stream = core.stream_groups(epoch=run.epoch, held=[group.id for group in groups], credits=credits_of())
    assert [queued async for queued in stream] == []
    await run.publish()
    await run.publish()

    ids, why = [groups[0].id], "2 versions old"
    await core.abandon_groups(epoch=run.epoch, ids=ids, reason=why, counted_as=DropReason.STALE_AT_COMMIT)

    ledger = (await core.get_status()).ledger
    assert ledger.dropped == {DropReason.STALE_AT_COMMIT: 1}
    (again,) = await run.lease(1)
    assert again.prompt_index == groups[0].prompt_index
    await core.close()
