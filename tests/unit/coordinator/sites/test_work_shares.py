"""How much work one site may hold when nobody configured it."""

import dataclasses

import pytest

from heterorl.common.types.rollout import GroupId, PushStatus
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.coordinator.core import Coordinator
from heterorl.coordinator.store import tallies
from heterorl.coordinator.store.sqlite import connect
from tests.support.clock import ManualClock
from tests.support.run import INCARNATION, Run


@pytest.fixture
def connection(tmp_path):
    connection = connect(tmp_path / "store.sqlite")
    yield connection
    connection.close()


def allowances(connection, sites, *, limit=32, now=0.0, works_ahead=False):
    return [
        tallies.allowance(connection, site, limit=limit, at_least=8, works_ahead=works_ahead, now=now) for site in sites
    ]


def hold(connection, site, *assignments):
    for assignment in assignments:
        connection.execute("INSERT INTO work VALUES (?, 0, 0, ?, 'i', 1, '[]', '', '{}', 0)", (assignment, site))


def deliver(connection, site, count):
    """Groups that were taken."""
    for _ in range(count):
        connection.execute(
            "INSERT INTO groups (site, incarnation, sequence, digest, state, assignment, oldest_version, num_bytes,"
            " arrived) SELECT ?, 'i', count(*), '', 'pending', 0, 0, 9, 0 FROM groups",
            (site,),
        )


def test_site_alone_may_hold_everything_whatever_it_owes(connection):
    tallies.note_asked(connection, "a", 0.0)
    tallies.note_expired(connection, "a", 100)

    assert allowances(connection, ["a"]) == [32]


def test_sites_that_want_work_share_it_and_those_that_left_do_not_count(connection):
    for name in "abc":
        tallies.note_asked(connection, name, 0.0)
    assert allowances(connection, "abc") == [11, 11, 11]

    later = tallies.ASKED_S + 1
    tallies.note_asked(connection, "a", later)
    assert allowances(connection, "a", now=later) == [32]
    # One that generates does not ask, but it holds.
    hold(connection, "b", 1, 2)
    assert allowances(connection, "a", now=later) == [16]
    connection.execute("DELETE FROM work WHERE assignment = 1")
    assert allowances(connection, "a", now=later) == [16]
    # What is away takes nobody's share.
    connection.execute("UPDATE temp.out_work SET is_away = 1")
    assert allowances(connection, "a", now=later) == [32]


def test_site_that_answers_nothing_comes_down_to_one_and_the_others_get_the_rest(connection):
    for name in "ab":
        tallies.note_asked(connection, name, 0.0)
    tallies.note_expired(connection, "a", 4)
    assert allowances(connection, "ab") == [12, 16]
    tallies.note_expired(connection, "a", 40)
    assert allowances(connection, "ab") == [1, 32]

    # Every group delivered wins one back: 1, 2, 4, ... a round.
    rounds = []
    for _ in range(5):
        (allowed,) = allowances(connection, "a")
        rounds.append(allowed)
        deliver(connection, "a", allowed)
    assert rounds == [1, 1, 2, 4, 8]
    deliver(connection, "a", 16)
    assert allowances(connection, "ab") == [16, 16]


def test_many_sites_get_one_each(connection):
    for number in range(100):
        tallies.note_asked(connection, str(number), 0.0)

    assert allowances(connection, ["7"], limit=32) == [1]


@pytest.mark.parametrize(
    ("limit", "at_least", "wanting", "owed", "debtors", "works_ahead", "expected"),
    [
        (128, 32, 1, 0, 0, False, (128, 0)),  # alone: everything
        (128, 32, 1, 0, 0, True, (96, 0)),  # alone and ahead: a quarter is a newcomer's
        (128, 32, 1, 99, 1, True, (96, 99)),  # nobody waits for what it owes
        (32, 32, 1, 0, 0, True, (32, 0)),  # one version's worth in any case
        (40, 32, 1, 0, 0, True, (32, 0)),
        (2, 32, 1, 0, 0, True, (2, 0)),
        (128, 32, 2, 0, 0, True, (64, 0)),  # together: equal shares, ahead or not
        (128, 32, 2, 0, 0, False, (64, 0)),
        (10, 2, 3, 0, 0, False, (4, 0)),  # rounded up
        (128, 32, 2, 64, 1, False, (1, 64)),  # owes all
        (128, 32, 2, 500, 1, False, (1, 64)),  # no debt is larger than the share
        (128, 32, 3, 0, 1, False, (64, 0)),  # one of three is a debtor: the others share what it does not use
        (128, 32, 1000, 0, 0, False, (1, 0)),
    ],
)
def test_share_is_decided(limit, at_least, wanting, owed, debtors, works_ahead, expected):
    found = tallies.decide_share(
        limit=limit, at_least=at_least, wanting=wanting, owed=owed, debtors=debtors, works_ahead=works_ahead
    )
    assert found == expected


async def world(tmp_path, **changes):
    clock = ManualClock()
    config = CoordinatorConfig(**{"data_dir": tmp_path / "data", "groups_per_version": 8, **changes})
    core = await Coordinator.open(config, clock)
    run = Run(core, tmp_path)
    await run.begin()
    await run.publish()
    for site in ("hog", "eu-1"):
        await run.register(site=site)
    return core, run, clock


async def ask(core, site, count):
    return (await core.lease_work(site=site, incarnation=INCARNATION, max_groups=count, policy_version=0)).assignments


async def test_one_site_cannot_hoard_the_work(tmp_path):
    core, run, clock = await world(tmp_path)
    hoarded, delivered = [], []
    for _ in range(12):
        hoarded.append(len(await ask(core, "hog", 4096)))
        groups = []
        for work in await ask(core, "eu-1", 4096):
            group_id = GroupId(site="eu-1", incarnation=INCARNATION, sequence=sum(delivered) + len(groups) + 1)
            groups.append(dataclasses.replace(run.group(work), id=group_id))
        outcomes = await core.push_groups(groups) if groups else []
        assert [outcome.status for outcome in outcomes] == [PushStatus.ACCEPTED] * len(groups)
        delivered.append(len(groups))
        await core.abandon_groups(epoch=run.epoch, ids=[group.id for group in groups], reason="makes room")
        clock.advance(40.0)
    await core.close()

    # Alone it took everything. When that ran out it owed as much as it may hold, and the other site gets the rest.
    assert hoarded == [32, 0, 0, 1, 0, 0, 1, 0, 0, 1, 0, 0]
    assert delivered == [0, 0, 0] + [31] * 9


async def test_reason_names_the_share_and_the_option_overrides_it(tmp_path):
    core, _, _ = await world(tmp_path)
    await ask(core, "eu-1", 1)
    grant = await core.lease_work(site="hog", incarnation=INCARNATION, max_groups=100, policy_version=0)
    assert len(grant.assignments) == 16
    grant = await core.lease_work(site="hog", incarnation=INCARNATION, max_groups=1, policy_version=0)
    assert grant.reason == "quota: the site holds 16 assignments, its share is 16"
    await core.close()

    core, _, _ = await world(tmp_path / "other", site_work_groups=20)
    await ask(core, "eu-1", 1)
    assert len(await ask(core, "hog", 100)) == 20
    await core.close()


@pytest.mark.parametrize("policy_version", [0, 9])
async def test_site_that_cannot_be_given_work_takes_nobodys_share(tmp_path, policy_version):
    core, run, _ = await world(tmp_path, max_staleness_versions=1)
    for _ in range(3):
        await run.publish()
    grant = await core.lease_work(site="hog", incarnation=INCARNATION, max_groups=9, policy_version=policy_version)
    assert grant.assignments == ()
    grant = await core.lease_work(site="eu-1", incarnation=INCARNATION, max_groups=9, policy_version=3)
    assert len(grant.assignments) == 9
    assert len(
        (await core.lease_work(site="eu-1", incarnation=INCARNATION, max_groups=9, policy_version=3)).assignments
    )
    await core.close()
