"""Members that a site lost: a share that decays, the bound on it, and what a site wins that hides low rewards."""

import dataclasses

import numpy as np
import pytest

from heterorl.common.process import metrics
from heterorl.common.types.common import SiteId
from heterorl.common.types.rollout import DropReason, FinishReason, GroupId, PushStatus
from heterorl.common.types.sample import SampleFilter, SampleKind, SamplePage
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.coordinator.core import Coordinator
from heterorl.coordinator.groups import ledger
from heterorl.coordinator.sites.quarantine import WINDOW_GROUPS, lost_problem, moved_share
from tests.support.clock import ManualClock
from tests.support.run import CONTRACT, INCARNATION, SITE, Run, rollout

SIZE, BOUND = 8, 0.2
OTHER = SiteId("us-1")
LOST = FinishReason.TOOL_LOST
FAR = dataclasses.replace(CONTRACT, group_size=SIZE, min_members=SIZE // 2)


def taken(losses, bound=BOUND):
    """Of each group, by how many of its members it lost: whether it is taken."""
    share, found = 0.0, []
    for lost in losses:
        share = moved_share(share, lost / SIZE)
        found.append(not (lost and lost_problem(share, bound)))
    return np.array(found)


def test_a_share_moves_by_a_fiftieth_of_the_difference():
    assert moved_share(0.0, 0.5) == 0.5 / WINDOW_GROUPS
    assert moved_share(0.3, 0.3) == 0.3
    share = 0.5
    for _ in range(WINDOW_GROUPS):
        share = moved_share(share, 0.0)
    assert 0.18 < share < 0.184  # 0.5 / e


@pytest.mark.parametrize(
    ("share", "bound", "is_above"), [(0.2, 0.2, False), (0.21, 0.2, True), (1.0, 1.0, False), (0.01, 0.0, True)]
)
def test_a_site_is_above_the_bound_and_not_at_it(share, bound, is_above):
    text = lost_problem(share, bound)

    assert bool(text) == is_above
    assert not text or f"{share:.1%} of the members" in text


def test_a_site_that_loses_all_low_rewards_is_cut_off():
    """Its rewards are 0 or 1; it loses members below the mean, as many as min_members lets it."""
    rewards = np.random.default_rng(1).integers(0, 2, (2000, SIZE))
    below = (rewards < rewards.mean(1, keepdims=True)).sum(1)
    losses = np.minimum(below, SIZE // 2)
    found = taken(losses)

    first = found.argmin()
    assert 20 < first < 40
    assert not found[first:][losses[first:] > 0].any()


def test_a_site_that_knows_the_rule_hides_no_more_than_the_bound():
    """It loses half of a group wherever that is taken, and none elsewhere."""
    share, hidden, groups = 0.0, 0.0, 5000
    for _ in range(groups):
        lost = 0.5 if not lost_problem(moved_share(share, 0.5), BOUND) else 0.0
        share = moved_share(share, lost)
        hidden += lost

    assert hidden / groups < BOUND + WINDOW_GROUPS / groups


@pytest.mark.parametrize("seed", range(3))
def test_an_honest_site_that_loses_one_in_twenty_has_no_group_dropped(seed):
    assert taken(np.random.default_rng(seed).binomial(SIZE, 0.05, 20_000)).all()


def test_partial_groups_cost_what_was_lost_and_no_whole_groups():
    random = np.random.default_rng(0)
    is_lost = random.random((20_000, SIZE)) < 0.05
    tokens = random.lognormal(7, 1, (20_000, SIZE))
    is_trained = ~is_lost & ((~is_lost).sum(1, keepdims=True) >= SIZE // 2)

    assert 1 - tokens[is_trained].sum() / tokens.sum() < 0.06
    assert 0.32 < 1 - tokens[~is_lost.any(1)].sum() / tokens.sum() < 0.35


@pytest.fixture
def config(tmp_path):
    return CoordinatorConfig(data_dir=tmp_path / "data", groups_per_version=8, max_outstanding_groups=1000, seed=7)


@pytest.fixture
async def run(core, tmp_path):
    return await begun(core, tmp_path)


async def begun(core, tmp_path):
    run = Run(core, tmp_path)
    run.contract = FAR
    await run.begin()
    await run.publish()
    await run.register()
    return run


def members(run, lost):
    reasons = [LOST] * lost + [FinishReason.EOS] * (SIZE - lost)
    return tuple(rollout(run.head, finish_reason=reason, reward=float(place)) for place, reason in enumerate(reasons))


async def push(core, run, lost, *, incarnation=INCARNATION):
    """A group of the next assignment that lost so many members."""
    grant = await core.lease_work(site=SITE, incarnation=incarnation, max_groups=1, policy_version=run.head)
    (work,) = grant.assignments
    group = run.group(work, rollouts=members(run, lost))
    group = dataclasses.replace(group, id=dataclasses.replace(group.id, incarnation=incarnation))
    (outcome,) = await core.push_groups([group])
    return work, outcome


async def until_dropped(core, run):
    for number in range(1, 100):
        work, outcome = await push(core, run, 4)
        if outcome.status is not PushStatus.ACCEPTED:
            return number, work, outcome
    raise AssertionError("no group was dropped")


async def shares(core):
    return await core.database.run(lambda connection: dict(connection.execute("SELECT site, share FROM lost_shares")))


async def test_groups_above_the_bound_are_dropped_counted_kept_and_their_prompts_handed_out_again(core, run):
    before = metrics.LOST_MEMBERS.labels(metrics.SITES.of(SITE), LOST.value)._value.get()
    number, work, outcome = await until_dropped(core, run)

    assert (number, outcome.status, outcome.reason) == (26, PushStatus.DROPPED, DropReason.LOST_MEMBERS)
    assert "4 of 8 members are lost; site: it loses 20.4% of the members" in outcome.message
    assert "max_lost_share is 20.0%" in outcome.message
    status = await core.get_status()
    assert status.ledger.dropped == {DropReason.LOST_MEMBERS: 1}
    assert status.ledger.is_balanced
    assert await core.database.run(ledger.recount) == status.ledger
    (site,) = status.sites
    assert site.problem.startswith("it loses 20.4% of the members")
    assert (site.quarantine, site.groups_failed) == ("", 0)
    wanted = SampleFilter(kept_because="lost_members", kind=SampleKind.REJECTED)
    page = await core.list_samples(wanted=wanted, page=SamplePage())
    assert [sample.detail for sample in page.samples] == [outcome.message]
    assert metrics.LOST_MEMBERS.labels(metrics.SITES.of(SITE), LOST.value)._value.get() == before + 4 * number

    # Behind as many new ones as came after it, and at least a version's worth.
    given = [each.id for _ in range(10) for each in await run.lease(1)]
    assert given == [*range(26, 34), work.id, 34]


async def test_whole_groups_are_taken_and_bring_the_share_down(core, run):
    await until_dropped(core, run)
    for _ in range(4):
        assert (await push(core, run, 4))[1].reason is DropReason.LOST_MEMBERS
    high = (await shares(core))[SITE]
    work = await run.lease(3)
    first, second, third = [run.group(each, rollouts=members(run, 0)) for each in work]
    # The last one comes before the gap is closed.
    outcomes = await core.push_groups([first, third, second])

    assert [outcome.status for outcome in outcomes] == [PushStatus.ACCEPTED] * 3
    assert (await shares(core))[SITE] == pytest.approx(high * (1 - 1 / WINDOW_GROUPS) ** 3)
    assert (await push(core, run, 1))[1].reason is DropReason.LOST_MEMBERS
    for _ in range(4):
        assert (await push(core, run, 0))[1].status is PushStatus.ACCEPTED
    # It is below the bound again, and one that lost a member is taken.
    assert (await push(core, run, 1))[1].status is PushStatus.ACCEPTED
    assert (await core.get_status()).sites[0].problem == ""


async def test_a_site_that_starts_again_keeps_its_share_and_others_have_their_own(core, run, config, tmp_path):
    await until_dropped(core, run)
    await run.register(incarnation="inc-2")
    run.sequence = 0
    _, outcome = await push(core, run, 4, incarnation="inc-2")
    assert outcome.reason is DropReason.LOST_MEMBERS

    await run.register(site=OTHER)
    (work,) = (
        await core.lease_work(site=OTHER, incarnation=INCARNATION, max_groups=1, policy_version=run.head)
    ).assignments
    group_id = GroupId(site=OTHER, incarnation=INCARNATION, sequence=1)
    (outcome,) = await core.push_groups([run.group(work, id=group_id, rollouts=members(run, 4))])
    assert outcome.status is PushStatus.ACCEPTED

    found = await shares(core)
    await core.close()
    again = await Coordinator.open(config, ManualClock())
    try:
        assert await shares(again) == found
    finally:
        await again.close()


async def test_an_operator_lets_a_site_begin_from_nothing(core, run):
    await until_dropped(core, run)
    await core.release_site(site=SITE, reason="its sandbox is repaired")

    assert await shares(core) == {}
    assert (await push(core, run, 4))[1].status is PushStatus.ACCEPTED


async def test_what_is_dropped_for_another_reason_counts_nothing_and_whole_runs_cost_no_row(core, run):
    assert (await push(core, run, 0))[1].status is PushStatus.ACCEPTED
    (work,) = await run.lease(1)
    (outcome,) = await core.push_groups([run.group(work, prompt_index=work.prompt_index + 1, rollouts=members(run, 4))])
    assert outcome.reason is DropReason.INVALID
    assert await shares(core) == {}


async def test_a_bound_of_one_drops_nothing(tmp_path, config):
    core = await Coordinator.open(config.model_copy(update={"max_lost_share": 1.0}), ManualClock())
    try:
        run = await begun(core, tmp_path)
        for _ in range(60):
            assert (await push(core, run, 4))[1].status is PushStatus.ACCEPTED
    finally:
        await core.close()
