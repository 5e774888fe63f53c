"""Rows that give no group: counted when they come back, never before all others, closed in the end."""

import json
from collections import Counter

import numpy as np
import pytest

from heterorl.common.types.common import SiteId
from heterorl.common.types.rollout import MAX_ASSIGNMENTS, DropReason, PushStatus, ReturnReason
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.coordinator.core import Coordinator
from heterorl.coordinator.groups import ledger
from heterorl.coordinator.groups.work_assignments import MAX_IN_ROW, MAX_RETURNS, is_hopeless
from tests.support.clock import ManualClock
from tests.support.run import INCARNATION, SITE, credits_of

FAILED = ReturnReason.REWARD_FAILED
OTHER = SiteId("us-1")


@pytest.fixture
def config(tmp_path):
    return CoordinatorConfig(data_dir=tmp_path / "data", groups_per_version=8, max_outstanding_groups=1000, seed=7)


async def ask(core, count=1, *, site=SITE):
    grant = await core.lease_work(site=site, incarnation=INCARNATION, max_groups=count, policy_version=0)
    return grant.assignments


async def give_back(core, ids, *, reason=FAILED, site=SITE):
    await core.abandon_work(site=site, incarnation=INCARNATION, assignments=list(ids), reason=reason)


async def closed(core):
    status = await core.get_status()
    assert status.ledger.is_balanced
    assert await core.database.run(ledger.recount) == status.ledger
    return status.ledger.closed


async def rounds(core, bad, *, turns, count=8, site=SITE, reason=FAILED):
    """Ask so many times; give back what is bad, and never answer the rest, which stays out."""
    seen = []
    for _ in range(turns):
        work = await ask(core, count, site=site)
        seen += [each.id for each in work]
        await give_back(core, [each.id for each in work if bad(each)], reason=reason, site=site)
    return seen


async def test_row_that_gives_no_group_is_closed_after_three_returns(core, run, caplog):
    seen = await rounds(core, lambda work: work.id == 2, turns=8)

    assert seen.count(2) == MAX_RETURNS
    assert await closed(core) == {FAILED: 1}
    assert await rounds(core, lambda work: False, turns=8) != []
    (words,) = [record.getMessage() for record in caplog.records if "closed" in record.getMessage()]
    assert "assignment 2 is closed" in words
    assert f"site={SITE}, reason=reward_failed" in words


async def test_what_came_back_stands_behind_new_ones(core, run):
    bad = [work.id for work in await ask(core, 8)]
    await give_back(core, bad)

    assert [work.id for work in await ask(core, 8)] == list(range(8, 16))
    assert [work.id for work in await ask(core, 3)] == bad[:3], "a version's worth went before"


async def test_returns_without_a_reason_count_nothing_and_are_handed_out_first(core, run):
    for _ in range(3 * MAX_RETURNS):
        (work,) = await ask(core)
        assert work.id == 0
        await give_back(core, [0], reason=None)

    assert await closed(core) == {}


async def test_every_bad_row_of_a_run_is_closed_and_the_run_goes_on(core, run):
    """3 bad rows of 50, and an engine that has room for 8 groups: after 49 turns nothing else was handed out."""
    bad_prompts = {4, 17, 33}
    for _ in range(60):
        work = await ask_newest(run)
        bad = [each.id for each in work if each.prompt_index in bad_prompts]
        await give_back(core, bad)
        good = [run.group(each) for each in work if each.id not in bad]
        assert good, "bad rows alone were handed out"
        outcomes = await core.push_groups(good)
        assert {outcome.status for outcome in outcomes} == {PushStatus.ACCEPTED}
        await take(core, run, [outcome.id for outcome in outcomes])

    found = await closed(core)
    # Every pass over the prompts meets each once.
    assert found[FAILED] >= 3 * (60 * 6 // 50 - 2)
    status = await core.get_status()
    assert status.ledger.consumed == status.ledger.acked


async def ask_newest(run):
    return await run.lease(8)


async def take(core, run, ids):
    stream = core.stream_groups(epoch=run.epoch, held=[], credits=credits_of(len(ids)))
    taken = [queued.group.id async for queued in stream]
    await run.publish(consumed=taken)


async def pushed(core, run, *, is_bad, turns, **changes):
    """Answer so many requests for eight; consume what is accepted. Returns what was asked for."""
    seen = []
    for _ in range(turns):
        work = await ask_newest(run)
        seen += work
        groups = [run.group(each, **(changes if is_bad(each) else {})) for each in work]
        outcomes = await core.push_groups(groups)
        await take(core, run, [outcome.id for outcome in outcomes if outcome.status is PushStatus.ACCEPTED])
    return seen


async def test_prompt_whose_group_is_always_invalid_is_closed_and_the_run_goes_on(core, run):
    """It was handed out again before all others: once eight such prompts were met, no version came any more."""
    empty = np.empty(0, np.int32)
    bad = set(range(0, 50, 5))
    seen = await pushed(core, run, turns=20, is_bad=lambda work: work.prompt_index in bad, prompt_token_ids=empty)

    assert max(Counter(work.id for work in seen).values()) == MAX_RETURNS
    assert len({work.prompt_index for work in seen}) == 50
    assert (await closed(core))[ReturnReason.GROUP_INVALID] > 1


async def test_prompt_whose_group_always_comes_too_late_is_closed(config, core, run):
    for _ in range(config.max_staleness_versions + 1):
        await run.publish()
    seen = await pushed(core, run, turns=20, is_bad=lambda work: work.id == 3, version=0)

    assert [work.id for work in seen].count(3) == MAX_RETURNS
    assert await closed(core) == {ReturnReason.GROUP_STALE: 1}


async def test_late_group_of_a_closed_assignment_is_one_too_many(core, run):
    (work,) = await ask(core)
    await core.database.run(lambda connection: connection.execute("UPDATE work SET is_leased = 0"))
    for site in (OTHER, OTHER, "us-2"):
        await joined(run, site)
        while work.id not in [each.id for each in await ask(core, 8, site=site)]:
            pass
        await give_back(core, [work.id], site=site)
    assert await closed(core) == {FAILED: 1}

    (outcome,) = await core.push_groups([run.group(work)])
    assert (outcome.status, outcome.reason) == (PushStatus.DROPPED, DropReason.SURPLUS)


async def joined(run, site):
    await run.register(site)
    return site


# ---- what a hostile site can do


def test_one_site_alone_closes_nothing_while_others_want_work():
    assert is_hopeless({"a": MAX_RETURNS}, is_shared=False)
    assert not is_hopeless({"a": 1000}, is_shared=True)
    assert is_hopeless({"a": MAX_RETURNS - 1, "b": 1}, is_shared=True)
    assert not is_hopeless({"a": 1, "b": 1}, is_shared=True)


async def test_assignments_of_a_shared_run_are_closed_by_two_sites(core, run):
    await joined(run, OTHER)
    await ask(core, 1, site=OTHER)
    seen = await rounds(core, lambda work: True, turns=10, count=1)
    assert max(seen.count(number) for number in seen) >= 1
    assert await closed(core) == {}, "one site alone closed it"

    await rounds(core, lambda work: True, turns=40, count=1, site=OTHER)
    assert await closed(core), "the second site agreed"


async def test_row_that_one_site_returns_for_ever_waits_for_a_bounded_number_of_others(core, run):
    await joined(run, OTHER)
    other = await ask(core, 1, site=OTHER)
    (work,) = await ask(core)
    returned = json.dumps({SITE: 80})
    await core.database.run(
        lambda connection: connection.execute("UPDATE work SET returned = ? WHERE assignment = ?", (returned, work.id))
    )
    await give_back(core, [work.id])

    (open_from,) = await core.database.run(
        lambda connection: connection.execute("SELECT open_from FROM work WHERE assignment = ?", (work.id,)).fetchone()
    )
    # 8 << 80 is no integer of a store.
    assert open_from == len(other) + 1 + (8 << 16)
    assert await closed(core) == {}


@pytest.mark.slow
async def test_site_whose_rewards_all_fail_closes_few_and_does_not_stop(core, run):
    seen = await rounds(core, lambda work: True, turns=300)

    assert (await closed(core)).get(FAILED, 0) <= MAX_IN_ROW // MAX_RETURNS
    # What is not closed comes again, and new ones between.
    assert len(set(seen)) > 100

    # Once one of its groups is taken, its word counts again.
    before = (await closed(core)).get(FAILED, 0)
    for _ in range(20):
        (work,) = await ask(core)
        (outcome,) = await core.push_groups([run.group(work)])
        assert outcome.status is PushStatus.ACCEPTED
        await rounds(core, lambda work: True, turns=10)
    assert before < (await closed(core))[FAILED] <= before + 20 * MAX_IN_ROW // MAX_RETURNS


async def test_nobody_returns_what_another_site_holds(core, run):
    await joined(run, OTHER)
    held = [work.id for work in await ask(core, 4)]
    for _ in range(2 * MAX_RETURNS):
        await give_back(core, held, site=OTHER)

    assert await closed(core) == {}
    assert [work.id for work in await ask(core, 4)] == [4, 5, 6, 7]


@pytest.mark.sqlite
async def test_return_of_numbers_that_the_site_does_not_hold_is_few_statements(core, run):
    statements = []
    await core.database.run(lambda connection: connection.set_trace_callback(statements.append))
    await give_back(core, range(1000, 1000 + MAX_ASSIGNMENTS))
    await core.database.run(lambda connection: connection.set_trace_callback(None))

    assert 0 < len(statements) < 40


# ---- what is kept


async def test_counts_outlive_a_restart(config, core, run, tmp_path):
    await rounds(core, lambda work: work.id == 0, turns=2)
    await core.close()
    again = await Coordinator.open(config, ManualClock())
    await rounds(again, lambda work: work.id == 0, turns=8)

    assert await closed(again) == {FAILED: 1}
    await again.close()
