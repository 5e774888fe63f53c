"""A site may register ever new incarnations: what is kept of them, and what a status costs, is bounded."""

import dataclasses
import sqlite3

import pytest

from heterorl.common.types.common import SiteId
from heterorl.common.types.rollout import DropReason, GroupId, PushStatus
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.coordinator.core import Coordinator
from heterorl.coordinator.sites.incarnations import EARLIER, KEPT, SHOWN, shown
from heterorl.coordinator.sites.sites import MAX_SEEN
from tests.support.clock import ManualClock
from tests.support.run import INCARNATION, SITE, Run


@pytest.fixture
async def run(tmp_path):
    core = await Coordinator.open(CoordinatorConfig(data_dir=tmp_path / "data", groups_per_version=64), ManualClock())
    run = Run(core, tmp_path)
    await run.begin()
    await run.publish()
    yield run
    await core.close()


async def _push(run, incarnation):
    """One group of an incarnation, which is registered for it."""
    await run.register(incarnation=incarnation)
    grant = await run.api.lease_work(site=SITE, incarnation=incarnation, max_groups=1, policy_version=0)
    group = dataclasses.replace(
        run.group(grant.assignments[0]), id=GroupId(site=SITE, incarnation=incarnation, sequence=1)
    )
    (outcome,) = await run.api.push_groups([group])
    return group, outcome


async def _rows(run):
    return await run.api.database.run(lambda connection: connection.execute("SELECT count(*) FROM sites").fetchone()[0])


async def test_incarnations_that_never_pushed_are_forgotten_but_the_newest_few(run):
    for number in range(100):
        await run.register(incarnation=f"i{number}")

    assert await _rows(run) == KEPT
    shown = [entry.incarnation for entry in (await run.api.get_status()).sites]
    assert sorted(shown) == sorted(f"i{number}" for number in range(100 - KEPT, 100))
    assert len(run.api.context.sites._seen[SITE]) == KEPT


async def test_incarnation_that_holds_work_or_pushed_a_group_stays(run):
    group, outcome = await _push(run, "pushed")
    await run.register(incarnation="works")
    await run.api.lease_work(site=SITE, incarnation="works", max_groups=1, policy_version=0)
    for number in range(50):
        await run.register(incarnation=f"i{number}")

    assert await _rows(run) == KEPT + 2
    assert outcome.status is PushStatus.ACCEPTED
    # Its watermark is what tells a repetition from a new group.
    assert (await run.api.push_groups([group]))[0].status is PushStatus.DUPLICATE
    await run.api.abandon_work(site=SITE, incarnation="works", assignments=[1])
    await run.register(incarnation="last")
    assert await _rows(run) == KEPT + 1


async def test_gaps_of_old_incarnations_are_passed_over_and_no_id_takes_effect_twice(run):
    """Each left rows for its gaps, without end."""

    def group(number, sequence):
        bad = {"generation_s": float("nan")}
        return run.group(work, id=GroupId(site=SITE, incarnation=f"i{number}", sequence=sequence), **bad)

    await run.register()
    (work,) = await run.lease()
    pushed = []
    for number in range(3 * KEPT):
        await run.register(incarnation=f"i{number}")
        pushed.append([group(number, sequence) for sequence in (1, 3, 5)])
        await run.api.push_groups(pushed[-1])

    (rows,) = await run.api.database.run(lambda c: c.execute("SELECT count(*) FROM beyond_watermark").fetchone())
    assert rows == 2 * KEPT
    outcomes = [outcome for groups in pushed for outcome in await run.api.push_groups(groups)]
    assert {outcome.status for outcome in outcomes} == {PushStatus.DUPLICATE}
    acked = (await run.api.get_status()).ledger.acked
    (late,) = await run.api.push_groups([group(0, 2)])
    assert (late.status, late.reason) == (PushStatus.DROPPED, DropReason.CONFLICT)
    assert (await run.api.get_status()).ledger.acked == acked


async def test_forgotten_incarnation_registers_again_and_goes_on(run):
    await run.register(incarnation="old")
    for number in range(KEPT):
        await run.register(incarnation=f"i{number}")

    _, outcome = await _push(run, "old")

    assert outcome.status is PushStatus.ACCEPTED


async def test_many_that_pushed_are_shown_as_one_with_all_their_groups(run):
    for number in range(SHOWN + 4):
        await _push(run, f"i{number}")
    await run.register(site=SiteId("us-1"), incarnation=INCARNATION)
    run.api.context.sites._seen.clear()

    sites = (await run.api.get_status()).sites

    own = [entry for entry in sites if entry.site == SITE]
    assert len(own) == KEPT + 1
    assert own[0].incarnation == EARLIER
    assert own[0].last_seen_s < 0
    assert sum(entry.groups_accepted for entry in own) == SHOWN + 4
    assert [entry.incarnation for entry in sites if entry.site == "us-1"] == [INCARNATION]


@pytest.mark.sqlite
async def test_many_that_pushed_and_push_again_are_neither_remembered_nor_shown(run):
    """Of each a sign of life would be kept, and named in one statement: SQLite takes so many values and no more."""
    await run.api.database.run(lambda connection: connection.setlimit(sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER, 30))
    count = 3 * MAX_SEEN
    pushed = [(await _push(run, f"i{number}"))[0] for number in range(count)]
    await run.api.push_groups(pushed)
    await run.register(site=SiteId("us-1"), incarnation=INCARNATION)

    sites = (await run.api.get_status()).sites

    assert {site: len(own) for site, own in run.api.context.sites._seen.items()} == {SITE: MAX_SEEN, "us-1": 1}
    own = [entry for entry in sites if entry.site == SITE]
    assert len(own) <= 1 + KEPT + MAX_SEEN
    assert sum(entry.groups_accepted for entry in own) == count
    assert [entry.last_seen_s for entry in sites if entry.site == "us-1"] == [0]


async def test_incarnation_that_is_seen_most_recently_is_remembered(run):
    await run.register(incarnation="lives")
    sites, clock = run.api.context.sites, run.api.context.clock
    for number in range(3 * MAX_SEEN):
        clock.advance(1.0)
        sites.see(SITE, f"i{number}", clock.monotonic())
        sites.see(SITE, "lives", clock.monotonic())

    assert sites.seen_at((SITE, "lives")) == clock.monotonic()
    assert len(sites._seen[SITE]) == MAX_SEEN


@pytest.mark.sqlite
async def test_many_that_hold_work_are_named_whatever_sqlite_takes_at_once(run):
    def hold(connection):
        connection.setlimit(sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER, 30)
        connection.executemany(
            "INSERT INTO sites (site, incarnation, engine, dtype) VALUES (?, ?, '', '')",
            [(SITE, f"i{number}") for number in range(100)],
        )
        return shown(connection, {SITE: {f"i{number}" for number in range(100)}})

    assert len(await run.api.database.run(hold)) == 101
