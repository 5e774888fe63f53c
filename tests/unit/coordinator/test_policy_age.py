"""The bound on how long a version is superseded: it never stops a run, and it knows the delays that sites declare."""

import math

import pytest

from heterorl.common.errors import ContractMismatch
from heterorl.common.types.rollout import DropReason, PushStatus
from heterorl.common.types.run import Heartbeat
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.coordinator.core import Coordinator
from heterorl.coordinator.groups import ledger, queue
from heterorl.coordinator.versions import lineage
from heterorl.sampler.delay import max_delay_s
from heterorl.sampler.sampler_config import SamplerConfig
from tests.support.run import INCARNATION, SITE, Run, credits_of
from tests.support.sampler_world import World

DAY = 86_400.0


async def begin(tmp_path, clock, **changes):
    config = CoordinatorConfig(**{"data_dir": tmp_path / "data", "groups_per_version": 4, **changes})
    core = await Coordinator.open(config, clock)
    run = Run(core, tmp_path)
    await run.begin()
    await run.publish()
    await run.register()
    return core, run


async def statuses(core, groups):
    return [outcome.reason or outcome.status for outcome in await core.push_groups(groups)]


async def streamed(core, run, count):
    stream = core.stream_groups(epoch=run.epoch, held=(), credits=credits_of(count))
    return [queued.group.oldest_version async for queued in stream]


@pytest.mark.parametrize("away_s", [7300.0, 400 * DAY])
async def test_run_goes_on_after_any_pause(tmp_path, clock, away_s):
    core, run = await begin(tmp_path, clock)
    before = await run.lease(2)
    (waiting, late) = (run.group(work) for work in before)
    assert await statuses(core, [waiting]) == [PushStatus.ACCEPTED]
    clock.advance(away_s)
    await run.begin(request_id="the learner is back")

    # What waited, what was held, and what is generated now: all of the newest version.
    assert await statuses(core, [late]) == [PushStatus.ACCEPTED]
    fresh = [run.group(work) for work in await run.lease(2)]
    assert await statuses(core, fresh) == [PushStatus.ACCEPTED] * 2
    assert await streamed(core, run, 4) == [0, 0, 0, 0]
    await run.publish(consumed=[waiting.id, late.id])
    assert (await core.database.run(ledger.counts)).dropped == {}
    await core.close()


@pytest.mark.parametrize("at_once", [1000, 1])
async def test_age_counts_from_the_next_version_that_is_not_abandoned(tmp_path, clock, monkeypatch, at_once):
    # However many one lease gives up, the next ones give up the rest.
    monkeypatch.setattr(queue, "DROPPED_AT_ONCE", at_once)
    core, run = await begin(tmp_path, clock, max_superseded_s=100, max_outstanding_groups=100)
    work = await run.lease(8)
    old = [run.group(entry, version=0) for entry in work]
    clock.advance(1000)
    await run.publish()
    clock.advance(99)
    # 1099 s after its publication, 99 s after the next one's.
    assert await statuses(core, old[:2]) == [PushStatus.ACCEPTED] * 2
    await run.publish(lineage_version=0, snapshot=True)
    clock.advance(99)
    # Version 1 was abandoned, so nobody could have had it instead; version 2 came 99 s ago.
    assert await statuses(core, old[2:4]) == [PushStatus.ACCEPTED] * 2
    clock.advance(2)
    assert await statuses(core, old[4:6]) == [DropReason.STALE_AT_INGEST] * 2
    new = [run.group(entry) for entry in await run.lease(1)]
    assert await statuses(core, new) == [PushStatus.ACCEPTED]

    # At the lease as at the intake.
    assert await streamed(core, run, 9) == [2]
    counts = await core.database.run(ledger.counts)
    assert counts.dropped == {DropReason.STALE_AT_INGEST: 2, DropReason.STALE_AT_LEASE: 4}
    await core.close()


async def test_group_of_the_newest_version_is_not_superseded_however_old_that_is(tmp_path, clock):
    core, run = await begin(tmp_path, clock)
    old, new = await run.lease(2)
    clock.advance(1000)
    await core.push_groups([run.group(old)])

    async def ages():
        stream = core.stream_sealed(epoch=run.epoch, held=(), credits=credits_of(1))
        return [(leased.policy_age_s, leased.superseded_s) async for leased in stream]

    assert await ages() == [(1000.0, 0.0)]
    await core.push_groups([run.group(new)])
    await run.publish()
    clock.advance(7)
    # What the learner had goes back to the queue with its new stream.
    assert (1007.0, 7.0) in await ages()
    await core.close()


@pytest.mark.parametrize("step_s", [DAY, -DAY])
async def test_step_of_the_wall_clock_does_not_stop_the_run(tmp_path, clock, step_s):
    core, run = await begin(tmp_path, clock)
    await run.publish()
    clock.wall_offset += step_s
    for _ in range(3):
        ids = [run.group(work) for work in await run.lease(2)]
        assert await statuses(core, ids) == [PushStatus.ACCEPTED] * 2
        await run.publish(consumed=[group.id for group in ids])
    assert (await core.database.run(ledger.counts)).dropped == {}
    await core.close()


async def test_oldest_usable_version_is_within_both_bounds(tmp_path, clock):
    core, run = await begin(tmp_path, clock)
    for _ in range(5):
        clock.advance(10)
        await run.publish()
    now = clock.wall()

    def usable(**bounds):
        return core.database.run(lambda c: lineage.oldest_usable(c, head=5, now=now, **bounds))

    assert await usable(max_versions=2, max_s=1e9) == 3
    # Version 3 came 20 s ago, version 2 30 s: all before 2 had a newer one for longer than 25 s.
    assert await usable(max_versions=9, max_s=25) == 2
    assert await usable(max_versions=9, max_s=0.5) == 4
    clock.advance(1)
    now = clock.wall()
    assert await usable(max_versions=9, max_s=0.5) == 5
    await core.close()


@pytest.mark.parametrize("delay_s", [7200.1, -1.0, math.nan, math.inf])
async def test_delay_that_the_bound_does_not_allow_is_refused_when_the_site_registers(tmp_path, clock, delay_s):
    core, run = await begin(tmp_path, clock)
    with pytest.raises(ContractMismatch, match="max_superseded_s = 7200"):
        await core.register(run.registration(max_delay_s=delay_s))
    await core.register(run.registration(max_delay_s=7200.0))
    await core.close()


@pytest.mark.parametrize(
    ("delay", "expected"),
    [
        ({"kind": "none"}, 0.0),
        ({"kind": "fixed", "value": 1800.0}, 3600.0),
        ({"kind": "lognormal", "low": 60.0, "high": 1920.0}, 3840.0),
        ({"kind": "fixed", "value": 1800.0, "time_scale": 30.0}, 120.0),
        ({"kind": "fixed", "value": 1800.0, "semantics": "refresh_interval"}, 1800.0),
        ({"kind": "fixed", "value": 64, "unit": "versions"}, 0.0),
    ],
)
def test_sampler_declares_what_its_delay_model_adds_there_and_back(delay, expected):
    assert max_delay_s(SamplerConfig.model_validate({"delay": delay}).delay) == pytest.approx(expected)


async def test_lease_lasts_longer_by_the_delay_that_its_site_declared(tmp_path, clock):
    core, run = await begin(tmp_path, clock)
    await core.register(run.registration(max_delay_s=3600.0))
    await core.register(run.registration(site="us-1"))

    async def leased_by_other():
        grant = await core.lease_work(site="us-1", incarnation=INCARNATION, max_groups=1, policy_version=0)
        await core.abandon_work(site="us-1", incarnation=INCARNATION, assignments=[w.id for w in grant.assignments])
        return [work.id for work in grant.assignments]

    async def alive_for(seconds):
        beat = Heartbeat(site=SITE, incarnation=INCARNATION, policy_version=0, state_root="", tokens_per_s=0)
        for _ in range(int(seconds) // 100):
            clock.advance(100)
            await core.heartbeat(beat)
        clock.advance(seconds % 100)

    (work,) = await run.lease(1)
    assert work.lease_s == 3720.0
    await alive_for(3719)
    assert await leased_by_other() == [1]
    # A restart gives a fresh term, which is no shorter.
    await core.close()
    core = await Coordinator.open(core.config, clock)
    assert await leased_by_other() == [1]
    await alive_for(3719)
    assert await leased_by_other() == [1]
    clock.advance(2)
    assert await leased_by_other() == [0]
    await core.close()


async def test_site_that_died_keeps_its_work_no_longer_for_the_delay_that_it_declared(tmp_path, clock):
    core, run = await begin(tmp_path, clock)
    await core.register(run.registration(max_delay_s=7200.0))
    (work,) = await run.lease(1)
    await core.register(run.registration(site="us-1"))
    clock.advance(121)
    grant = await core.lease_work(site="us-1", incarnation=INCARNATION, max_groups=1, policy_version=0)
    assert [entry.id for entry in grant.assignments] == [work.id]
    await core.close()


async def test_group_with_numbers_at_their_ends_is_dropped_like_any_other(tmp_path, clock):
    core, run = await begin(tmp_path, clock)
    for version, reason in ((2**63 - 1, DropReason.UNKNOWN_VERSION), (-(2**63), DropReason.INVALID)):
        (work,) = await run.lease(1)
        assert await statuses(core, [run.group(work, version=version)]) == [reason]
    await core.close()


@pytest.mark.slow
async def test_half_an_hour_of_transit_each_way_runs_with_the_default_bounds(tmp_path):
    world = await World.open(tmp_path)
    world.settings = {"delay": {"kind": "fixed", "value": 1800.0}}
    await world.run.publish()
    world.start()
    await world.passed(120.0, step_s=2.0)
    for _ in range(3):
        await world.run.publish()
        await world.passed(1900.0, step_s=20.0)
    (site,) = (await world.core.get_status()).sites
    counts = await world.core.database.run(ledger.counts)
    await world.close()

    assert (world.core.config.max_superseded_s, world.core.config.work_lease_s) == (7200.0, 120.0)
    assert site.policy_version >= 1
    assert counts.acked > 300
    assert counts.dropped == {}
    assert site.site == SITE
