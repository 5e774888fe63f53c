"""The log of audit: every way to change it afterwards is seen, offline."""

import asyncio
import dataclasses
import sqlite3
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from heterorl.cli.main import app
from heterorl.common.identity.credentials import Revocations
from heterorl.coordinator.coordinator_app import _gauges
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.coordinator.core import Coordinator
from heterorl.coordinator.sites import audit, sites
from heterorl.coordinator.sites.audit import AuditKind
from tests.support.clock import ManualClock
from tests.support.stores import open_database


@pytest.fixture
async def database(tmp_path):
    database = await open_database(tmp_path / "coordinator.sqlite")
    yield database
    await database.close()


async def fill(database, count=4):
    for number in range(count):
        await database.run(
            lambda connection, number=number: audit.append(
                connection, AuditKind.RELEASE, subject=f"site-{number}", detail="why", now=1000.0 + number
            )
        )
    return await database.run(audit.read)


async def test_untouched_log_is_sound_and_keeps_what_was_said(database):
    rows = await fill(database)

    assert audit.find_faults(rows) == []
    assert audit.find_faults(rows, expected=rows[1].digest) == []
    assert [row.subject for row in rows] == ["site-0", "site-1", "site-2", "site-3"]
    assert rows[2].at_us == 1_002_000_000


@pytest.mark.parametrize("field", ["sequence", "at_us", "kind", "subject", "detail", "previous", "digest"])
async def test_change_of_any_field_is_seen(database, field):
    rows = await fill(database)
    old = getattr(rows[1], field)
    rows[1] = dataclasses.replace(rows[1], **{field: old + 1 if isinstance(old, int) else f"{old}x"})

    assert audit.find_faults(rows)


async def test_row_written_anew_with_its_digest_breaks_the_next_link(database):
    rows = await fill(database)
    forged = dataclasses.replace(rows[1], detail="nothing happened")
    rows[1] = dataclasses.replace(forged, digest=audit.row_digest(forged))

    assert audit.find_faults(rows) == ["row 3 does not name the digest of the row before it"]


async def test_gap_in_a_chain_that_was_made_anew_is_seen(database):
    rows, previous = await fill(database), ""
    forged = []
    for row in (rows[0], *rows[2:]):
        row = dataclasses.replace(row, previous=previous)
        forged.append(dataclasses.replace(row, digest=audit.row_digest(row)))
        previous = forged[-1].digest

    assert audit.find_faults(forged) == ["row 3 stands where row 2 belongs"]


async def test_missing_swapped_and_cut_off_rows_are_seen(database):
    rows = await fill(database)

    assert audit.find_faults(rows[:1] + rows[2:])
    assert audit.find_faults([rows[0], rows[2], rows[1], rows[3]])
    assert audit.find_faults(rows[1:])
    # A cut end is a sound log of its own: only a digest noted elsewhere tells.
    assert audit.find_faults(rows[:2]) == []
    assert "cut off" in audit.find_faults(rows[:2], expected=rows[3].digest)[0]


async def test_boundaries_between_fields_are_part_of_the_digest(database):
    (row,) = await fill(database, 1)

    moved = dataclasses.replace(row, subject=row.subject + "w", detail=row.detail[1:])
    assert audit.row_digest(moved) != row.digest


async def test_store_refuses_to_change_or_delete_rows(database):
    await fill(database)

    for statement in ("DELETE FROM audit WHERE sequence = 1", "UPDATE audit SET detail = '' WHERE sequence = 1"):
        with pytest.raises(Exception, match="only appended to") as refused:
            await database.run(lambda connection, statement=statement: connection.execute(statement))
        # The name is the same in every engine.
        assert refused.type.__name__.startswith("Integrity")
    assert audit.find_faults(await database.run(audit.read)) == []


async def test_text_of_others_cannot_break_lines_or_grow_without_bound(database):
    await database.run(
        lambda connection: audit.append(
            connection, AuditKind.CHECK_FAILED, subject="a\nb\x1b[0m", detail="x" * 10_000, now=0.0
        )
    )
    (row,) = await database.run(audit.read)

    assert row.subject == "a?b?[0m"
    assert len(row.detail) == audit.MAX_TEXT


async def test_row_of_an_operation_that_fails_is_not_there(database):
    def operation(connection):
        audit.append(connection, AuditKind.RELEASE, subject="s", detail="d", now=0.0)
        raise ValueError("after all not")

    with pytest.raises(ValueError, match="after all not"):
        await database.run(operation)
    assert await database.run(audit.read) == []


@pytest.mark.sqlite
async def test_command_verifies_and_shows_a_closed_store_and_finds_a_change(tmp_path):
    directory = tmp_path / "data"
    core = await Coordinator.open(CoordinatorConfig(data_dir=directory), ManualClock())
    await core.run.note_revoked(frozenset({1, 2}), {})
    await core.close()
    runner = CliRunner()

    result = runner.invoke(app, ["audit", "verify", str(directory)])
    newest = result.output.strip().rpartition(" ")[2]
    assert (result.exit_code, "SOUND: 2 rows" in result.output) == (0, True)
    assert runner.invoke(app, ["audit", "verify", str(directory), "--expect", newest]).exit_code == 0
    assert runner.invoke(app, ["audit", "verify", str(directory), "--expect", "00"]).exit_code == 2
    shown = runner.invoke(app, ["audit", "show", str(directory), "--subject", "2"]).output
    assert "revocation 2: the certificate is refused" in shown
    assert "revocation 1:" not in shown

    # Whoever can write the file can drop the triggers too.
    with sqlite3.connect(directory / "coordinator.sqlite") as connection:
        connection.execute("DROP TRIGGER audit_keeps_content")
        connection.execute("UPDATE audit SET subject = '3' WHERE sequence = 1")
    connection.close()
    result = runner.invoke(app, ["audit", "verify", str(directory)])
    assert result.exit_code == 2
    assert "row 1 was changed" in result.output


class OneRound(ManualClock):
    """A clock that tells when somebody sleeps by it."""

    def __init__(self):
        super().__init__()
        self.is_sleeping = asyncio.Event()

    async def sleep(self, seconds):
        self.is_sleeping.set()
        await super().sleep(seconds)


async def test_running_coordinator_notes_which_certificates_are_refused(tmp_path):
    clock = OneRound()
    core = await Coordinator.open(CoordinatorConfig(data_dir=tmp_path / "data"), clock)
    revoked = tmp_path / "revoked"
    revoked.write_text("ab  # lost laptop\n")
    serials = Revocations(revoked)

    loop = asyncio.create_task(
        _gauges(
            core,
            SimpleNamespace(revoked_serials=serials.current, authorizer=SimpleNamespace(serials={"site": 0xAB})),
            clock,
        )
    )
    await clock.is_sleeping.wait()
    loop.cancel()

    (row,) = await core.database.run(audit.read)
    assert (row.kind, row.subject) == ("revocation", "ab")
    assert (0xAB in serials, 0xAC in serials) == (True, False)
    assert await core.database.run(sites.revoked_sites) == {"site": 0xAB}
    await core.close()


async def test_list_is_noted_once_however_many_sites_call(tmp_path, monkeypatch):
    core = await Coordinator.open(CoordinatorConfig(data_dir=tmp_path / "data"), ManualClock())
    noted, written = [], []
    monkeypatch.setattr(audit, "note_revoked", lambda _, serials, **_now: noted.append(serials))
    monkeypatch.setattr(sites, "set_meta", lambda _, key, value: written.append(value))
    for by_site in ({}, {"a": 1}, {"a": 1, "b": 2}):
        await core.run.note_revoked(frozenset({7}), by_site)
    await core.run.note_revoked(frozenset({7, 2}), {"a": 1, "b": 2})
    await core.close()

    assert noted == [frozenset({7}), frozenset({7, 2})]
    assert written == ['{"b": 2}']
