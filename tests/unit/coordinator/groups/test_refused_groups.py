"""Refused groups: a site that sends them without end fills no disk, and every one stays counted."""

import dataclasses

import pytest

from heterorl.common.types.rollout import DropReason, PushStatus
from heterorl.coordinator.groups import ledger
from tests.support.run import INCARNATION

KEPT = 5


@pytest.fixture(autouse=True)
def _few_kept(monkeypatch):
    monkeypatch.setattr(ledger, "REFUSED_KEPT", KEPT)


async def push_invalid(run, site, count):
    """Push groups of assignments that were never given."""
    (work,) = await run.lease()
    groups = []
    for sequence in range(1, count + 1):
        group = run.group(dataclasses.replace(work, id=900 + sequence))
        name = dataclasses.replace(group.id, site=site, sequence=sequence)
        groups.append(dataclasses.replace(group, id=name))
    outcomes = await run.api.push_groups(groups)
    assert {outcome.reason for outcome in outcomes} == {DropReason.INVALID}
    return groups


async def test_rows_of_refused_groups_are_few_and_all_are_counted(core, run):
    for site in ("loud", "quiet"):
        await run.register(site)
    await push_invalid(run, "quiet", 3)
    await push_invalid(run, "loud", 20)
    accepted = await run.push(2)

    rows = await core.database.run(
        lambda c: dict(c.execute("SELECT site, count(*) FROM groups GROUP BY site").fetchall())
    )
    assert rows == {"quiet": 3, "loud": KEPT, "eu-1": len(accepted)}
    counts = await core.database.run(ledger.counts)
    assert (counts.acked, counts.dropped) == (25, {DropReason.INVALID: 23})
    assert counts.is_balanced
    assert counts == await core.database.run(ledger.recount)


async def test_repeats_of_refused_groups_have_no_effect(core, run):
    await run.register("loud")
    groups = await push_invalid(run, "loud", 20)
    before = await core.database.run(ledger.counts)

    first, last = await core.push_groups([groups[0], groups[-1]])

    assert (first.status, first.reason) == (PushStatus.DROPPED, DropReason.CONFLICT)
    assert "this group was refused long ago" in first.message
    assert last.status is PushStatus.DUPLICATE
    assert before == await core.database.run(ledger.counts)
    status = await core.get_status()
    assert [(site.groups_dropped, site.incarnation) for site in status.sites if site.site == "loud"] == [
        (20, INCARNATION)
    ]
