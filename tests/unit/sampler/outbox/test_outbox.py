"""The spool keeps what was generated until it is acknowledged."""

import contextlib
import dataclasses
import errno
import os
import sqlite3
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from heterorl.common.errors import ConfigError, CorruptStore, DiskFull, MalformedPayload
from heterorl.common.process import files
from heterorl.common.types.rollout import Span
from heterorl.common.wire.sealed_groups import open_group, seal
from heterorl.sampler.outbox.outbox import Outbox, typed
from tests.support.outboxes import spooled_groups
from tests.support.run import rollout


def test_outbox_keeps_groups_identity_and_sequence_across_a_restart(tmp_path):
    outbox = Outbox(tmp_path / "spool")
    spooled = spooled_groups(outbox, 3, tmp_path)
    outbox.put(spooled, release=[0.0, 5.0, 9.0])
    outbox.delete([1])
    incarnation = outbox.incarnation
    outbox.close()

    again = Outbox(tmp_path / "spool")

    assert (again.incarnation, again.next_sequence) == (incarnation, 4)
    due, later = again.due(6.0, limit=10, max_bytes=1 << 30)
    assert due == [seal(spooled[1])]
    assert later == 9.0
    again.release_by(0.0)
    assert len(again.due(0.0, limit=10, max_bytes=1 << 30)[0]) == 2
    assert again.level().num_groups == 2
    assert again.level().num_bytes == sum(len(seal(group).data) for group in spooled[1:])
    again.close()


def test_outbox_never_uses_a_sequence_that_the_coordinator_knows(tmp_path):
    outbox = Outbox(tmp_path)
    outbox.skip_to(10)
    outbox.skip_to(5)

    assert outbox.next_sequence == 10
    outbox.close()
    again = Outbox(tmp_path)
    assert again.next_sequence == 10
    again.close()


def test_a_new_directory_is_its_users_alone(tmp_path):
    Outbox(tmp_path / "new" / "site").close()

    assert (tmp_path / "new" / "site").stat().st_mode & 0o777 == 0o700


def test_outbox_has_one_owner(tmp_path):
    outbox = Outbox(tmp_path)
    with pytest.raises(ConfigError, match="another sampler"):
        Outbox(tmp_path)
    outbox.close()
    Outbox(tmp_path).close()


def test_outbox_refuses_holes_and_leaves_itself_whole(tmp_path):
    outbox = Outbox(tmp_path / "spool")
    (group,) = spooled_groups(outbox, 1, tmp_path)
    with pytest.raises(AssertionError, match="dense"):
        outbox.put([dataclasses.replace(group, id=dataclasses.replace(group.id, sequence=7))], release=[0.0])

    assert outbox.level().num_groups == 0
    assert outbox.next_sequence == 1
    outbox.close()


def test_damaged_file_is_set_aside_and_a_new_one_begins(tmp_path, caplog):
    (tmp_path / "outbox.sqlite").write_bytes(b"this is no database at all " * 100)

    outbox = Outbox(tmp_path)
    outbox.put(spooled_groups(outbox, 1, tmp_path), release=[0.0])
    outbox.close()

    (kept,) = (tmp_path / "set-aside").iterdir()
    assert kept.read_bytes().startswith(b"this is no database")
    assert "THE OUTBOX IS DAMAGED" in caplog.text
    assert str(kept) in caplog.text


def test_page_that_contradicts_others_is_found_at_the_start(tmp_path, caplog):
    outbox = Outbox(tmp_path)
    long = spooled_groups(outbox, 1, tmp_path, prompt_token_ids=np.arange(20_000, dtype=np.int32))
    outbox.put(long, release=[0.0])
    outbox.close()
    data = bytearray((tmp_path / "outbox.sqlite").read_bytes())
    data[4096:8192] = b"\xff" * 4096
    (tmp_path / "outbox.sqlite").write_bytes(data)

    Outbox(tmp_path).close()

    assert "THE OUTBOX IS DAMAGED" in caplog.text
    assert len(list((tmp_path / "set-aside").iterdir())) == 1


@pytest.mark.parametrize("code", [sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL])
def test_file_that_cannot_be_opened_for_want_of_something_stays_where_it_is(tmp_path, monkeypatch, code):
    """Out of descriptors, of rights or of space is no damage."""
    Outbox(tmp_path).close()

    def refuse(*_args, **_options):
        error = sqlite3.OperationalError("unable to open database file")
        error.sqlite_errorcode = code
        raise error

    monkeypatch.setattr(sqlite3, "connect", refuse)
    with pytest.raises((ConfigError, CorruptStore, DiskFull), match=r"check|free space"):
        Outbox(tmp_path)

    assert (tmp_path / "outbox.sqlite").exists()
    assert not (tmp_path / "set-aside").exists()


def test_directory_that_cannot_be_made_is_the_operators(tmp_path):
    (tmp_path / "file").touch()

    with pytest.raises(ConfigError, match="state_dir: .*file/eu cannot be used: File exists"):
        Outbox(tmp_path / "file" / "eu")


def test_spool_that_cannot_be_durable_is_refused(tmp_path, monkeypatch):
    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda _, **options: connect(":memory:", **options))

    with pytest.raises(CorruptStore, match=r"durable mode refused .*put state_dir on a local file system"):
        Outbox(tmp_path)


def _flip(directory, change, *, sequence=1):
    database = sqlite3.connect(directory / "outbox.sqlite")
    (data,) = database.execute("SELECT payload FROM groups WHERE sequence = ?", (sequence,)).fetchone()
    database.execute("UPDATE groups SET payload = ? WHERE sequence = ?", (change(bytearray(data)), sequence))
    database.commit()
    database.close()


def _flip_logprob(data):
    data[bytes(data).index(np.float32(-0.25).tobytes()) + 3] ^= 1
    return bytes(data)


def _flip_framing(data):
    data[1] ^= 0x7F
    return bytes(data)


@pytest.mark.parametrize("change", [_flip_logprob, _flip_framing, lambda data: bytes(data[:-1]), lambda data: b""])
def test_group_that_changed_on_disk_is_replaced_by_an_empty_one_of_its_id(tmp_path, caplog, change):
    outbox = Outbox(tmp_path, site="s")
    made = spooled_groups(outbox, 2, tmp_path)
    outbox.put(made, release=[0.0, 0.0])
    outbox.close()
    _flip(tmp_path, change)

    again = Outbox(tmp_path, site="s")
    for _ in range(2):
        (empty, whole), _ = again.due(0.0, limit=9, max_bytes=1 << 30)
        assert (empty.id, open_group(empty).rollouts) == (made[0].id, ())
        assert whole == seal(made[1])

    # Said once, kept for a person, and gone with the outcome of the empty one.
    assert caplog.text.count("GROUP 1 OF THE OUTBOX IS DAMAGED") == 1
    (kept,) = again._connection.execute("SELECT payload FROM set_aside WHERE sequence = 1").fetchone()
    assert kept == change(bytearray(seal(made[0]).data))
    again.delete([1, 2])
    assert again.level().num_groups == 0
    again.close()


def test_group_that_changed_on_a_full_disk_waits_until_its_bytes_can_be_kept(tmp_path, caplog):
    outbox = Outbox(tmp_path, site="s")
    made = spooled_groups(outbox, 2, tmp_path, prompt_token_ids=np.arange(20_000, dtype=np.int32))
    outbox.put(made[:1], release=[0.0])
    outbox._connection.execute("UPDATE groups SET checksum = x'00'")
    # Takes the pages that the update left.
    outbox.put(made[1:], release=[0.0])
    (pages,) = outbox._connection.execute("PRAGMA page_count").fetchone()
    outbox._connection.execute(f"PRAGMA max_page_count={pages}")

    with pytest.raises(DiskFull):
        outbox.due(0.0, limit=9, max_bytes=1 << 30)

    assert "DAMAGED" not in caplog.text
    outbox._connection.execute("PRAGMA max_page_count=100000")
    (empty, whole), _ = outbox.due(0.0, limit=9, max_bytes=1 << 30)
    assert (open_group(empty).rollouts, whole) == ((), seal(made[1]))
    assert outbox._connection.execute("SELECT count(*) FROM set_aside").fetchone() == (1,)
    outbox.close()


def test_row_under_another_sequence_is_noticed(tmp_path):
    outbox = Outbox(tmp_path)
    outbox.put(spooled_groups(outbox, 1, tmp_path), release=[0.0])
    outbox._connection.execute("UPDATE groups SET sequence = 7")

    ((group,), _) = outbox.due(0.0, limit=9, max_bytes=1 << 30)
    assert (group.id.sequence, open_group(group).rollouts) == (7, ())
    outbox.close()


def test_outbox_of_another_format_is_kept_apart_and_a_new_one_begins(tmp_path, caplog):
    outbox = Outbox(tmp_path)
    outbox.put(spooled_groups(outbox, 2, tmp_path), release=[0.0, 0.0])
    incarnation = outbox.incarnation
    outbox._connection.execute("PRAGMA user_version=0")
    outbox.close()

    again = Outbox(tmp_path, site="s")
    assert again.due(0.0, limit=9, max_bytes=1 << 30) == ([], None)
    assert again.incarnation != incarnation
    again.close()
    (kept,) = (tmp_path / "set-aside").glob("*damaged*.sqlite")
    assert f"the format of another release): it is kept as {kept}" in caplog.text
    with contextlib.closing(sqlite3.connect(kept)) as raw:
        assert raw.execute("SELECT count(*) FROM groups").fetchone() == (2,)


def test_groups_of_another_site_are_kept_and_said(tmp_path):
    outbox = Outbox(tmp_path, site="s")
    outbox.put(spooled_groups(outbox, 3, tmp_path), release=[0.0] * 3)
    incarnation = outbox.incarnation
    outbox.close()

    with pytest.raises(ConfigError, match="holds 3 groups of site s"):
        Outbox(tmp_path, site="t")

    old = Outbox(tmp_path, site="s")
    assert (old.incarnation, len(old.due(0.0, limit=9, max_bytes=1 << 30)[0])) == (incarnation, 3)
    old.close()


def test_empty_outbox_of_another_site_begins_anew(tmp_path):
    outbox = Outbox(tmp_path, site="s")
    outbox.put(spooled_groups(outbox, 3, tmp_path), release=[0.0] * 3)
    outbox.delete([1, 2, 3])
    incarnation = outbox.incarnation
    outbox.close()

    renamed = Outbox(tmp_path, site="t")

    # Sequences are counted for a name and an incarnation: another name begins both anew.
    assert renamed.incarnation != incarnation
    assert renamed.next_sequence == 1
    renamed.close()


def test_sequence_beyond_any_run_is_refused(tmp_path):
    outbox = Outbox(tmp_path)
    with pytest.raises(MalformedPayload, match="distrust"):
        outbox.skip_to(2**63)
    assert outbox.next_sequence == 1
    outbox.close()


def test_nothing_is_held_beyond_what_is_asked(tmp_path):
    outbox = Outbox(tmp_path)
    outbox.put(spooled_groups(outbox, 3, tmp_path), release=[5.0, 2e9, 50.0])
    outbox.release_by(20.0)

    assert [group.id.sequence for group in outbox.due(10.0, limit=9, max_bytes=1 << 30)[0]] == [1]
    assert len(outbox.due(20.0, limit=9, max_bytes=1 << 30)[0]) == 3
    outbox.close()


def test_a_release_leaves_due_groups_as_they_are(tmp_path):
    outbox = Outbox(tmp_path)
    outbox.put(spooled_groups(outbox, 3, tmp_path), release=[5.0, 6.0, 3600.0])
    before = outbox._connection.total_changes

    outbox.release_by(20.0)

    assert outbox._connection.total_changes - before == 1
    outbox.close()


def test_spool_is_durable_before_its_first_group(tmp_path, monkeypatch):
    synced = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(Path(f"/proc/self/fd/{fd}").readlink()), real(fd)))

    outbox = Outbox(tmp_path / "spool")

    # The names of the directory and of the database; SQLite itself syncs what it writes in this mode.
    assert {tmp_path, tmp_path / "spool"} <= set(synced)
    assert outbox._connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert outbox._connection.execute("PRAGMA synchronous").fetchone() == (2,)
    outbox.close()


def test_failed_write_leaves_the_spool_usable(tmp_path):
    outbox = Outbox(tmp_path / "spool")
    made = spooled_groups(outbox, 2, tmp_path)
    outbox._connection.execute("INSERT INTO groups VALUES (2, 0.0, 0, x'', x'', 0)")
    with pytest.raises(sqlite3.IntegrityError):
        outbox.put(made, release=[0.0, 0.0])
    outbox.delete([2])

    outbox.put(made, release=[0.0, 0.0])

    due, _ = outbox.due(1.0, limit=9, max_bytes=1 << 20)
    assert [group.id for group in due] == [group.id for group in made]
    outbox.close()


def test_full_disk_is_typed_and_leaves_the_spool_as_it_was(tmp_path):
    outbox = Outbox(tmp_path / "spool")
    (first,) = spooled_groups(outbox, 1, tmp_path)
    outbox.put([first], release=[0.0])
    pages = outbox._connection.execute("PRAGMA page_count").fetchone()[0]
    outbox._connection.execute(f"PRAGMA max_page_count={pages}")
    long = spooled_groups(outbox, 1, tmp_path, prompt_token_ids=np.arange(20_000, dtype=np.int32))

    with pytest.raises(DiskFull, match="free space"):
        outbox.put(long, release=[0.0])

    assert (outbox.level().num_groups, outbox.next_sequence) == (1, 2)
    outbox._connection.execute("PRAGMA max_page_count=100000")
    outbox.put(long, release=[0.0])
    assert outbox.level().num_groups == 2
    outbox.close()


@pytest.mark.parametrize(("problem", "kind"), [(errno.EDQUOT, DiskFull), (errno.EROFS, CorruptStore)])
def test_full_quota_is_a_full_disk_and_another_failed_write_is_none(tmp_path, monkeypatch, problem, kind):
    failed = sqlite3.OperationalError("disk I/O error")
    failed.sqlite_errorcode = sqlite3.SQLITE_IOERR_WRITE

    def probe(**_wanted):
        raise OSError(problem, os.strerror(problem))

    monkeypatch.setattr(files.tempfile, "TemporaryFile", probe)

    assert type(typed(failed, tmp_path / "outbox.sqlite")) is kind


def test_what_is_pushed_at_once_is_bounded_by_bytes_and_never_empty(tmp_path):
    outbox = Outbox(tmp_path / "spool")
    made = spooled_groups(outbox, 5, tmp_path)
    outbox.put(made, release=[0.0] * 5)
    size = len(seal(made[1]).data)

    assert [group.id.sequence for group in outbox.due(0.0, limit=9, max_bytes=3 * size)[0]] == [1, 2, 3]
    assert [group.id.sequence for group in outbox.due(0.0, limit=2, max_bytes=9 * size)[0]] == [1, 2]
    assert [group.id.sequence for group in outbox.due(0.0, limit=9, max_bytes=1)[0]] == [1]
    outbox.close()


def test_long_groups_stay_small_on_disk_and_in_memory(tmp_path):
    """T16: groups of 150k-token rollouts; what a push holds does not grow with what is spooled."""
    rng = np.random.default_rng(0)
    length, members, count = 150_000, 3, 5
    rollouts = tuple(
        rollout(
            0,
            token_ids=rng.integers(0, 150_000, length).astype(np.int32),
            sampler_logprobs=-rng.random(length).astype(np.float32),
            spans=(Span(version=0, start=0, end=length),),
        )
        for _ in range(members)
    )
    outbox = Outbox(tmp_path / "spool")
    for _ in range(count):
        outbox.put(spooled_groups(outbox, 1, tmp_path, rollouts=rollouts), release=[0.0])

    # A token id below 2^21 is a varint of at most 3 bytes, a log-prob is 4: 7 bytes a token, and 1 KiB for the rest.
    assert outbox.level().num_bytes <= count * (members * length * 7 + 1024)
    tracemalloc.start()
    due, _ = outbox.due(0.0, limit=16, max_bytes=4 << 20)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(due) == 1, "two would be 6 MB"
    # Two read from disk, one looked into: 7 + 7 + 7 bytes a token, where all five would be 5 * 7 read alone.
    assert peak < members * length * 24
    outbox.close()


def test_outbox_says_how_long_groups_stayed_that_it_saw_arrive(tmp_path):
    outbox = Outbox(tmp_path / "spool")
    outbox.put(spooled_groups(outbox, 3, tmp_path), release=[0.0, 0.0, 0.0])
    outbox.note_spooled([1, 2], 10.0)

    # Group 3 is of an earlier process, as far as this one knows.
    assert sorted(outbox.delete([1, 3], now=14.0)) == [4.0]
    assert outbox.delete([2]) == []
    assert outbox.delete([1, 2], now=20.0) == []
    outbox.close()


def num_read():
    """Bytes that this process has read."""
    return int(Path("/proc/self/io").read_text(encoding="ascii").split()[1])


def test_assignments_are_listed_without_a_read_of_the_groups(tmp_path):
    outbox = Outbox(tmp_path)
    # More than SQLite keeps in memory.
    long = spooled_groups(outbox, 4, tmp_path, prompt_token_ids=np.arange(1 << 20, dtype=np.int32))
    outbox.put(long, release=[0.0] * 4)
    before = num_read()

    assert outbox.assignments() == (0, 1, 2, 3)
    assert num_read() - before < outbox.level().num_bytes // 64
    outbox.close()
