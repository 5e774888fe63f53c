"""How much work one site may hold when nobody configured it."""

import dataclasses

import pytest

from heterorl.common.types.rollout import GroupId, PushStatus
from heterorl.coordinator.config import CoordinatorConfig
from heterorl.coordinator.core import Coordinator
from heterorl.coordinator.sites.shares import ASKED_S, Shares
from tests.support.clock import ManualClock
from tests.support.run import INCARNATION, Run


def allowances(shares, sites, *, limit=32, now=0.0, holders=()):
    return [shares.allowance(site, holders=holders, limit=limit, now=now) for site in sites]


def test_site_alone_may_hold_everything_whatever_it_owes():
    shares = Shares()
    for _ in range(100):
        shares.note_expired("a")

    assert allowances(shares, ["a"]) == [32]


def test_sites_that_want_work_share_it_and_those_that_left_do_not_count():
    shares = Shares()
    for name in "abc":
        shares.note_asked(name, 0.0)
    assert allowances(shares, "abc") == [11, 11, 11]

    shares.note_asked("a", ASKED_S + 1)
    assert allowances(shares, "a", now=ASKED_S + 1) == [32]
    # One that generates does not ask, but it holds.
    assert allowances(shares, "a", now=ASKED_S + 1, holders={"b"}) == [16]


def test_site_that_answers_nothing_comes_down_to_one_and_the_others_get_the_rest():
    shares = Shares()
    for name in "ab":
        shares.note_asked(name, 0.0)
    for _ in range(4):
        shares.note_expired("a")
    assert allowances(shares, "ab") == [12, 16]
    for _ in range(40):
        shares.note_expired("a")
    assert allowances(shares, "ab") == [1, 32]

    # Every group delivered wins one back: 1, 2, 4, ... a round.
    rounds = []
    for _ in range(5):
        (allowed,) = allowances(shares, "a")
        rounds.append(allowed)
        for _ in range(allowed):
            shares.note_answered("a")
    assert rounds == [1, 1, 2, 4, 8]
    for _ in range(16):
        shares.note_answered("a")
    assert allowances(shares, "ab") == [16, 16]


def test_many_sites_get_one_each():
    shares = Shares()
    for number in range(100):
        shares.note_asked(str(number), 0.0)

    assert allowances(shares, ["7"], limit=32) == [1]


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
