"""The store's thread: what shares a commit, what fails alone, what ends the process."""

import asyncio
import errno
import os
import sqlite3
import tempfile
import threading
from pathlib import Path

import pytest

from heterorl.common.errors import CorruptStore, Draining, InvalidRequest, StoreFull
from heterorl.common.process import files
from heterorl.coordinator.offline.history import read_histories
from heterorl.coordinator.store import sqlite as sqlite_engine
from heterorl.coordinator.store.database import get_meta, set_meta
from tests.support.limits import WAIT_S
from tests.support.stores import open_database

pytestmark = pytest.mark.sqlite


@pytest.fixture
async def database(tmp_path):
    database = await open_database(tmp_path / "new" / "store.sqlite")
    yield database
    await database.close()


async def test_store_is_in_its_durable_mode(database):
    def modes(connection):
        return [connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("journal_mode", "synchronous")]

    # 2 is FULL: NORMAL loses acknowledged commits at a power cut.
    assert await database.run(modes) == ["wal", 2]


async def test_operations_that_wait_together_share_one_commit(database):
    statements = []
    await database.run(lambda connection: connection.set_trace_callback(statements.append))

    await asyncio.gather(*(database.run(lambda c, n=n: set_meta(c, f"key {n}", "1")) for n in range(100)))

    # The first may commit alone while the others gather.
    assert 1 <= statements.count("COMMIT") <= 3
    assert await database.run(lambda c: c.execute("SELECT count(*) FROM meta").fetchone()[0]) == 100


@pytest.mark.parametrize(
    ("mistake", "error"),
    [
        (lambda c: c.execute("SELECT ?", ()), sqlite3.ProgrammingError),
        (lambda c: [c.execute("INSERT INTO meta VALUES ('twice', 1)") for _ in range(2)], sqlite3.IntegrityError),
        (lambda c: c.execute("SELECT ?", (2**70,)), OverflowError),
        (lambda c: c.execute("SELECT ?", (object(),)), sqlite3.ProgrammingError),
    ],
    ids=["bindings", "constraint", "overflow", "type"],
)
async def test_mistake_of_one_operation_undoes_it_and_the_store_lives_on(database, mistake, error):
    results = await asyncio.gather(
        database.run(lambda c: set_meta(c, "before", "1")),
        database.run(mistake),
        database.run(lambda c: set_meta(c, "after", "1")),
        return_exceptions=True,
    )

    assert isinstance(results[1], error)
    assert await database.run(lambda c: [get_meta(c, key) for key in ("before", "twice", "after")]) == ["1", None, "1"]
    assert not database.on_fatal.done()


async def test_nothing_commits_after_the_store_failed_not_even_what_was_queued(database, tmp_path):
    all_are_queued = threading.Event()

    def broken(connection):
        all_are_queued.wait()
        connection.execute("SELECT * FROM no_such_table")

    failing = database.submit(broken)
    queued = [database.submit(lambda c, n=n: set_meta(c, f"late {n}", "1")) for n in range(300)]
    all_are_queued.set()
    results = await asyncio.gather(failing, *queued, return_exceptions=True)

    assert all(isinstance(result, CorruptStore) for result in results)
    assert database.on_fatal.done()
    with pytest.raises(CorruptStore, match="restarted"):
        await database.run(lambda c: None)
    await database.close()
    again = await open_database(tmp_path / "new" / "store.sqlite")
    assert await again.run(lambda c: c.execute("SELECT count(*) FROM meta").fetchone()[0]) == 0
    await again.close()


async def test_failed_rollback_is_fatal_and_answers_everybody(database):
    def close_behind(connection):
        # A store that SQLite has given up on: even its rollback fails.
        connection.close()
        raise sqlite3.OperationalError("disk I/O error")

    with pytest.raises(CorruptStore):
        await database.run(close_behind)
    assert database.on_fatal.done()


async def test_operation_runs_although_its_caller_went_away(database):
    task = asyncio.create_task(database.run(lambda c: set_meta(c, "key", "kept")))
    await asyncio.sleep(0)
    task.cancel()

    assert await database.run(lambda c: get_meta(c, "key")) == "kept"


async def test_closed_store_finishes_what_is_queued_and_refuses_the_rest(database):
    queued = [database.submit(lambda c: 7) for _ in range(600)]
    closing = asyncio.create_task(database.close())
    await asyncio.sleep(0)

    with pytest.raises(Draining):
        await database.run(lambda c: None)
    await closing
    assert await asyncio.gather(*queued) == [7] * 600
    await database.close()


async def test_typed_error_reaches_only_its_caller(database):
    def refused(connection):
        set_meta(connection, "key", "1")
        raise InvalidRequest("no")

    with pytest.raises(InvalidRequest):
        await database.run(refused)
    assert await database.run(lambda c: get_meta(c, "key")) is None


async def test_store_that_cannot_be_opened_says_where(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CorruptStore, match="cannot be opened"):
        await open_database(tmp_path / "file" / "store.sqlite")
    (tmp_path / "store.sqlite").mkdir()
    with pytest.raises(CorruptStore, match="cannot be opened"):
        await open_database(tmp_path / "store.sqlite")
    (tmp_path / "other.sqlite-wal").mkdir()
    with pytest.raises(CorruptStore, match="check data_dir, its disk"):
        await open_database(tmp_path / "other.sqlite")


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user takes root")
@pytest.mark.process
@pytest.mark.parametrize("of_root", [".", "store.sqlite", "store.sqlite-wal"])
def test_intact_store_of_another_user_is_not_called_damaged(of_root):
    # tmp_path lies below directories that root alone may enter.
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        sqlite_engine.connect(directory / "store.sqlite").close()
        if of_root.endswith("-wal"):
            (directory / of_root).touch(0o600)
        for path in (directory, *directory.iterdir()):
            os.chown(path, *(0, 0) if path == directory / of_root else (65534, 65534))
        directory.chmod(0o755)
        (directory / "store.sqlite").chmod(0o644)
        process = os.fork()
        if process == 0:
            os.setuid(65534)
            try:
                sqlite_engine.connect(directory / "store.sqlite")
            except CorruptStore as error:
                os._exit(0 if "check data_dir, its disk, mount and permissions" in str(error) else 2)
            os._exit(3)
        _, status = os.waitpid(process, 0)

    assert os.waitstatus_to_exitcode(status) == 0


async def test_store_that_cannot_be_durable_is_refused():
    with pytest.raises(CorruptStore, match="durable mode"):
        await open_database(Path(":memory:"))


async def test_damage_of_any_page_is_found_at_the_start_or_harmless(tmp_path):
    path = tmp_path / "store.sqlite"
    database = await open_database(path)
    for number in range(300):
        await database.run(lambda c, number=number: set_meta(c, f"key {number}", "value" * 20))
    await database.close()
    good = path.read_bytes()
    found = 0
    for page in range(len(good) // 4096):
        # The header of the page: its kind, and where its cells begin.
        path.write_bytes(good[: page * 4096] + b"\xa5" * 16 + good[page * 4096 + 16 :])
        try:
            damaged = await open_database(path)
        except CorruptStore:
            found += 1
            continue
        # The damage was in a page that nothing uses.
        assert await damaged.run(lambda c: c.execute("SELECT count(*) FROM meta").fetchone()[0]) == 300
        await damaged.close()
    assert found >= len(good) // 4096 - 1


async def test_store_that_owes_an_answer_says_for_how_long_and_copies_of_all_do_not_count(database):
    begun, go_on = threading.Event(), threading.Event()

    def slow(_connection):
        begun.set()
        go_on.wait(WAIT_S)
        return database.silent_s()

    assert database.silent_s() == 0.0
    for submit, is_silent in ((database.run, True), (database.run_alone, False)):
        begun.clear()
        go_on.clear()
        running = asyncio.create_task(submit(slow))
        await asyncio.to_thread(begun.wait, 30)
        assert (database.silent_s() > 0.0) is is_silent
        go_on.set()
        assert (await running > 0.0) is is_silent
    await database.run(lambda _: None)
    await database.close()
    assert database.silent_s() == 0.0


async def test_closing_commits_what_was_queued_before_it(tmp_path):
    database = await open_database(tmp_path / "store.sqlite")
    gate = threading.Event()
    first = database.submit(lambda _: gate.wait(WAIT_S))
    second = database.submit(lambda connection: set_meta(connection, "key", "kept"))
    closing = asyncio.create_task(database.close())
    await asyncio.sleep(0)
    gate.set()
    await closing

    assert await first
    await second
    again = await open_database(tmp_path / "store.sqlite")
    assert await again.run(lambda connection: get_meta(connection, "key")) == "kept"
    await again.close()


@pytest.mark.parametrize(("table", "stops_the_start"), [("work", True), ("groups", False)])
async def test_start_on_a_large_store_checks_what_is_in_use_and_verify_checks_all(
    tmp_path, monkeypatch, table, stops_the_start
):
    path = tmp_path / "coordinator.sqlite"
    monkeypatch.setattr(sqlite_engine, "CHECKED_BYTES", 4096)
    database = await open_database(path)

    def fill(connection):
        set_meta(connection, "run_id", "run")
        connection.executemany(
            "INSERT INTO work VALUES (?, 0, 0, 'a', 'i', 0, '[]', ?, '{}', 0)",
            [(number, "r" * 64) for number in range(500)],
        )
        connection.executemany(
            "INSERT INTO groups (site, incarnation, sequence, digest, state, assignment, oldest_version, num_bytes,"
            " arrived) VALUES ('a', 'i', ?, ?, 'consumed', 0, 0, 0, 0)",
            [(number, "d" * 64) for number in range(500)],
        )

    await database.run(fill)
    root, size = await database.run(
        lambda connection: connection.execute(
            "SELECT rootpage, page_size FROM sqlite_master, pragma_page_size WHERE name = ?", (table,)
        ).fetchone()
    )
    await database.close()
    with read_histories(tmp_path) as histories:
        assert histories
    with path.open("r+b") as file:
        # The number of cells of the table's first page.
        file.seek((root - 1) * size + 3)
        file.write(b"\xff\xff")

    if stops_the_start:
        with pytest.raises(CorruptStore):
            await open_database(path)
    else:
        await (await open_database(path)).close()
    with pytest.raises(CorruptStore), read_histories(tmp_path):
        pass


@pytest.mark.parametrize(("problem", "error"), [(errno.EDQUOT, StoreFull), (None, CorruptStore)])
async def test_full_quota_fails_one_operation_and_another_failed_write_ends_the_store(
    database, monkeypatch, problem, error
):
    def refuses():
        raised = sqlite3.OperationalError("disk I/O error")
        raised.sqlite_errorcode = sqlite3.SQLITE_IOERR_WRITE
        raise raised

    def probe(**wanted):
        if problem is not None:
            raise OSError(problem, "Disk quota exceeded")
        return tempfile.NamedTemporaryFile(**wanted)

    monkeypatch.setattr(files.tempfile, "TemporaryFile", probe)
    with monkeypatch.context() as patch:
        patch.setattr(database._engine, "commit", refuses)
        with pytest.raises(error):
            await database.run(lambda c: set_meta(c, "a", "1"))

    if error is StoreFull:
        await database.run(lambda c: set_meta(c, "b", "1"))
        assert await database.run(lambda c: (get_meta(c, "a"), get_meta(c, "b"))) == (None, "1")
    else:
        assert database.on_fatal.done()
