"""What one site may push, hold and take of a batch; and that the others do not notice."""

import dataclasses
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heterorl.common.process.logs import Rarely
from heterorl.common.process.metrics import REGISTRY
from heterorl.common.types.rollout import PushStatus
from heterorl.common.wire.sealed_groups import seal
from heterorl.coordinator import run_metrics
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.coordinator.core import Coordinator
from heterorl.coordinator.groups.queue import SiteOrder
from heterorl.coordinator.groups.schedule import decide_grant
from heterorl.coordinator.sites.sites import MAX_WAIT_S, Quotas, Rate, level_at, wait_s
from heterorl.sampler.outbox.delivery import settle
from tests.support.clock import ManualClock
from tests.support.run import INCARNATION, Run, credits_of


def quotas(tmp_path, **changes):
    return Quotas(CoordinatorConfig(data_dir=tmp_path, **changes))


def take(quotas, now, *, site="a", num_bytes=100):
    return quotas.take(site, num_bytes=num_bytes, pending_bytes=0, now=now)[0]


def test_bucket_gives_its_burst_at_once_and_its_rate_after_that(tmp_path):
    mine = quotas(tmp_path, site_groups_per_s=2.0, site_burst_s=3.0)

    # A burst of 3 s at 2/s is 6 groups; the next one needs half a second.
    assert [take(mine, 0.0) for _ in range(7)] == [0.0] * 6 + [0.5]
    assert take(mine, 0.25) == pytest.approx(0.25)
    assert take(mine, 0.5) == 0.0
    # However long the pause, no more than the burst.
    assert [take(mine, 1e6) for _ in range(7)] == [0.0] * 6 + [0.5]


def test_sites_have_buckets_of_their_own(tmp_path):
    mine = quotas(tmp_path, site_groups_per_s=1.0, site_burst_s=1.0)

    assert take(mine, 0.0) == 0.0
    assert take(mine, 0.0) > 0.0
    assert take(mine, 0.0, site="b") == 0.0
    assert (mine.refusals_of("a"), mine.refusals_of("b")) == (1, 0)


def test_group_larger_than_the_burst_passes_when_the_bucket_is_full(tmp_path):
    mine = quotas(tmp_path, site_bytes_per_s=100.0, site_burst_s=1.0)

    assert take(mine, 0.0, num_bytes=1000) == 0.0
    # 900 bytes of debt, then 100 bytes of room: 10 s.
    assert take(mine, 0.0, num_bytes=1000) == pytest.approx(10.0)
    assert take(mine, 10.0, num_bytes=1000) == 0.0


def test_refusal_of_one_quota_takes_nothing_of_the_other(tmp_path):
    mine = quotas(tmp_path, site_groups_per_s=1.0, site_bytes_per_s=10.0, site_burst_s=1.0)
    assert take(mine, 0.0, num_bytes=10) == 0.0

    assert take(mine, 1.0, num_bytes=10) == 0.0
    assert [take(mine, 1.5, num_bytes=5) for _ in range(3)] == [pytest.approx(0.5)] * 3
    assert take(mine, 2.0, num_bytes=10) == 0.0


@given(st.lists(st.tuples(st.floats(0, 5), st.integers(1, 50)), max_size=60))
def test_accepted_bytes_never_exceed_rate_times_time_and_burst(pushes):
    rate, burst, bucket, now, accepted = Rate(per_s=10.0, burst=40.0), 40.0, None, 0.0, 0
    for pause, amount in pushes:
        now += pause
        level = level_at(now, rate, bucket)
        if wait_s(level, rate, amount) == 0:
            bucket = level - amount, now
            accepted += amount
        # The one that passed last may have been larger than the burst.
        assert accepted <= burst + 10.0 * now + 50
    assert wait_s(-1e9, rate, 1.0) == MAX_WAIT_S


def test_site_may_hold_so_many_assignments():
    load = {"head_version": 0, "policy_version": 0, "outstanding": 5, "held": 3}
    config = CoordinatorConfig(groups_per_version=8, max_staleness_versions=4, max_outstanding_groups=32)

    reason = "quota: the site holds 3 assignments, site_work_groups is 4"
    assert decide_grant(config, **load, wanted=8, held_limit=4) == (1, reason)
    assert decide_grant(config, **load, wanted=8)[0] == 8


def serve(turns, waiting, count):
    """Serve so many groups of {site: number of groups}; every group of a site is older than any of the next."""
    waiting, served = dict(waiting), []
    for _ in range(count):
        oldest = {site: (number, left) for number, (site, left) in enumerate(waiting.items()) if left}
        if not oldest:
            break
        site = turns.next(oldest)
        waiting[site] -= 1
        served.append(site)
    return served


def test_plain_turns_serve_the_oldest_policy():
    turns = SiteOrder(order="oldest", share=1.0, window=8)

    assert turns.is_plain
    assert serve(turns, {"loud": 6, "b": 2}, 8) == ["loud"] * 6 + ["b"] * 2


def test_share_bounds_a_site_while_others_have_groups_and_only_then():
    turns = SiteOrder(order="oldest", share=0.25, window=8)

    served = serve(turns, {"loud": 100, "b": 6, "c": 6, "d": 6}, 40)
    # At most 2 of any 8 in a row while the others have groups; afterwards nobody waits for nothing.
    assert all(served[start : start + 8].count("loud") <= 2 for start in range(17))
    assert served[24:] == ["loud"] * 16


def test_share_that_cannot_be_kept_is_an_equal_one():
    served = serve(SiteOrder(order="oldest", share=0.25, window=8), {"loud": 100, "b": 20}, 40)

    assert abs(served.count("loud") - 20) <= 1


@given(share=st.floats(0.01, 1.0), waiting=st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 12), min_size=1))
def test_turns_never_idle_and_keep_the_share(share, waiting):
    turns = SiteOrder(order="oldest", share=share, window=6)
    left, recent = dict(waiting), []
    for _ in range(sum(waiting.values())):
        oldest = {site: (ord(site), count) for site, count in left.items() if count}
        site = turns.next(oldest)
        assert site in oldest
        # Served over its share only if every other site with groups is at its own, and has no less.
        if recent[-5:].count(site) >= turns.cap:
            assert all(recent[-5:].count(other) >= recent[-5:].count(site) for other in oldest)
        left[site] -= 1
        recent.append(site)
    assert not any(left.values())


async def two_sites(core, directory, *, loud=12, quiet=3):
    directory.mkdir()
    run = Run(core, directory)
    await run.begin()
    await run.publish()
    for site in ("loud", "quiet"):
        await run.register(site=site)
    for site, count in (("loud", loud), ("quiet", quiet)):
        grant = await core.lease_work(site=site, incarnation=INCARNATION, max_groups=count, policy_version=0)
        groups = []
        for number, work in enumerate(grant.assignments, 1):
            group = run.group(work)
            groups.append(dataclasses.replace(group, id=dataclasses.replace(group.id, site=site, sequence=number)))
        await core.push_groups(groups)
    return run


async def leased_sites(core, run, count):
    sites = []
    stream = core.stream_groups(epoch=run.epoch, held=(), credits=credits_of(count))
    async for queued in stream:
        sites.append(queued.group.id.site)
        if len(sites) == count:
            break
    await stream.aclose()
    return sites


@pytest.mark.parametrize(("settings", "quiet_in_first_6"), [({}, 0), ({"site_batch_share": 0.5}, 3)])
async def test_loud_site_takes_no_more_than_its_turn_of_a_batch(tmp_path, settings, quiet_in_first_6):
    config = CoordinatorConfig(data_dir=tmp_path / "data", groups_per_version=6, **settings)
    core = await Coordinator.open(config, ManualClock())
    run = await two_sites(core, tmp_path / "run")

    sites = await leased_sites(core, run, 15)

    assert sites[:6].count("quiet") == quiet_in_first_6
    assert sorted(sites) == ["loud"] * 12 + ["quiet"] * 3
    await core.close()


async def test_refused_push_is_taken_later(tmp_path):
    clock = ManualClock()
    config = CoordinatorConfig(
        data_dir=tmp_path / "data", groups_per_version=8, site_groups_per_s=1.0, site_burst_s=2.0
    )
    core = await Coordinator.open(config, clock)
    (tmp_path / "run").mkdir()
    run = Run(core, tmp_path / "run")
    await run.begin()
    await run.publish()
    await run.register()
    groups = [run.group(work) for work in await run.lease(4)]

    outcomes = await core.push_groups(groups)
    assert [outcome.status.value for outcome in outcomes] == ["accepted", "accepted", "retry", "retry"]
    assert "site_groups_per_s is 1" in outcomes[2].message
    # What a sampler makes of it: both stay in its outbox, and it waits as asked.
    assert settle(outcomes, Rarely(logging.getLogger("test"), clock.monotonic)) == ([1, 2], pytest.approx(1.0))
    (site,) = (await core.get_status()).sites
    assert (site.groups_refused, site.quota_used) == (2, pytest.approx(1.0))
    clock.advance(2.0)
    assert {outcome.status for outcome in await core.push_groups(groups[2:])} == {PushStatus.ACCEPTED}
    status = await core.get_status()
    assert (status.ledger.pending, status.ledger.is_balanced) == (4, True)
    await core.close()


async def test_share_of_the_queue_goes_with_the_groups_that_the_learner_took(tmp_path):
    config = CoordinatorConfig(data_dir=tmp_path / "data", groups_per_version=8)
    core = await Coordinator.open(config, ManualClock())
    run = Run(core, tmp_path)
    await run.begin()
    await run.publish()
    await run.register()

    async def share():
        await run_metrics.observe_run(core)
        shown = REGISTRY.get_sample_value(
            "heterorl_coordinator_site_quota_ratio", {"site": "eu-1", "quota": "pending_bytes"}
        )
        (site,) = (await core.get_status()).sites
        assert site.quota_used == shown
        return shown

    groups = [run.group(work) for work in await run.lease(8)]
    await core.push_groups(groups[:4])
    core.context.queue.quotas._pending_limit = sum(len(seal(group).data) for group in groups[:4])
    assert await share() == 1.0
    assert {outcome.status for outcome in await core.push_groups(groups[4:])} == {PushStatus.RETRY}
    # The learner holds half of its version and waits for the rest: no publication makes room.
    await leased_sites(core, run, 4)
    assert await share() == 0.0
    assert {outcome.status for outcome in await core.push_groups(groups[4:])} == {PushStatus.ACCEPTED}
    assert await share() > 0.9
    await core.close()
