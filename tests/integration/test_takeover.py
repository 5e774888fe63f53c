"""Taking a store in PostgreSQL: beside whoever reads it, and from an earlier schema to this one; on a real server."""

import asyncio
import contextlib
import sqlite3

import pytest

from heterorl.common.errors import CorruptStore, StoreLost
from heterorl.coordinator.config import CoordinatorConfig
from heterorl.coordinator.core import Coordinator
from heterorl.coordinator.store import schema as of_files
from tests.support.clock import ManualClock
from tests.support.earlier_store import SINCE_6
from tests.support.run import Run

psycopg = pytest.importorskip("psycopg")

from heterorl.coordinator.store.postgres import engine as engines  # noqa: E402 - needs psycopg
from heterorl.coordinator.store.postgres.engine import open_store  # noqa: E402
from heterorl.coordinator.store.postgres.schema import MIGRATIONS, WRITER, Migrations  # noqa: E402
from heterorl.coordinator.store.postgres.standby import Standby  # noqa: E402
from heterorl.coordinator.store.postgres.transfer import write_from  # noqa: E402
from heterorl.coordinator.store.sqlite.engine import connect  # noqa: E402

NEXT = MIGRATIONS.version + 1


@contextlib.contextmanager
def reader(url):
    """A session that reads all tables, and keeps what pg_dump keeps until it ends."""
    with psycopg.connect(url) as raw:
        raw.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        names = raw.execute("SELECT tablename FROM pg_tables WHERE schemaname = current_schema()").fetchall()
        assert len(names) > 20
        for (name,) in names:
            raw.execute(f"LOCK TABLE {name} IN ACCESS SHARE MODE")
        yield raw


def rows(url, *tables):
    with psycopg.connect(url) as raw:
        return {table: raw.execute(f"SELECT * FROM {table} ORDER BY 1").fetchall() for table in tables}


COUNTED = ("tally", "waiting", "out_work", "holder")


async def test_reader_of_all_tables_does_not_keep_the_next_coordinator_waiting(url, tmp_path):
    config = CoordinatorConfig(data_dir=tmp_path / "data", store={"url": url})
    core = await Coordinator.open(config, ManualClock())
    run = Run(core, tmp_path)
    await run.begin()
    await run.publish()
    await run.register()
    await run.push(3)
    await run.lease(2)
    before = rows(url, *COUNTED)
    assert dict(before["tally"])["pending"] == 3
    assert len(before["out_work"]) == 2
    await core.close()

    with reader(url):
        # It waits for no lock that a reader keeps: where it needs one, it is refused while the reader is there.
        engine = await asyncio.to_thread(open_store, url)
        engine.close()
    after = rows(url, *COUNTED)
    known = [table for table in COUNTED if table not in ("out_work", "holder")]
    assert [after[table] for table in known] == [before[table] for table in known]
    # Since when, this process counts.
    assert [row[:4] for row in after["out_work"]] == [row[:4] for row in before["out_work"]]
    assert [row[:4] for row in after["holder"]] == [row[:4] for row in before["holder"]]


def made_up(step, version=NEXT, **others):
    return Migrations(version=version, whole=MIGRATIONS.whole, steps={**MIGRATIONS.steps, **others, version - 1: step})


COLOUR = "ALTER TABLE meta ADD COLUMN colour TEXT NOT NULL DEFAULT 'blue';"


async def test_migration_waits_for_a_reader_says_so_and_is_made_when_it_ends(url, monkeypatch, caplog):
    open_store(url).close()
    monkeypatch.setattr(engines, "MIGRATIONS", made_up(COLOUR))
    monkeypatch.setattr(engines, "LOCK_S", 0.1)
    standby = Standby(url, lambda _: None)
    with reader(url):
        waiting = asyncio.create_task(asyncio.to_thread(standby.wait))
        while "keeps the store's tables locked" not in caplog.text:  # noqa: ASYNC110 - a thread writes it
            await asyncio.sleep(0.02)
        assert not waiting.done()
        assert rows(url, "store")["store"][0][1] == MIGRATIONS.version
    engine = await waiting
    assert engine.connection.execute("SELECT schema_version FROM store").fetchone() == (NEXT,)
    engine.close()


def test_store_of_an_earlier_schema_is_brought_to_this_one_with_all_it_has(url, monkeypatch):
    first = open_store(url)
    first.begin()
    first.connection.execute("INSERT INTO meta VALUES ('key', 'kept')")
    first.commit()
    first.close()
    monkeypatch.setattr(engines, "MIGRATIONS", made_up("CREATE TABLE made (a BIGINT);"))
    second = open_store(url)
    assert (second.store_id, second.epoch) == (first.store_id, 2)
    second.close()
    # Two at once, in order: the second one needs the first one's table.
    two = made_up("INSERT INTO made VALUES (1);", NEXT + 2, **{})
    steps = {**two.steps, NEXT: COLOUR + "ALTER TABLE made ADD COLUMN b BIGINT NOT NULL DEFAULT 7;"}
    monkeypatch.setattr(engines, "MIGRATIONS", Migrations(version=NEXT + 2, whole=two.whole, steps=steps))
    third = open_store(url)
    third.close()

    assert rows(url, "made", "meta") == {"made": [(1, 7)], "meta": [("key", b"kept", "blue")]}
    assert rows(url, "store")["store"][0][1:3] == (NEXT + 2, 3)
    # The earlier program leaves it alone.
    monkeypatch.setattr(engines, "MIGRATIONS", MIGRATIONS)
    with pytest.raises(CorruptStore, match=f"has schema {NEXT + 2}, this program needs {MIGRATIONS.version}.*newer"):
        open_store(url)
    assert rows(url, "store")["store"][0][1:3] == (NEXT + 2, 3)


def test_migration_that_fails_leaves_the_store_as_it_was(url, monkeypatch):
    open_store(url).close()
    monkeypatch.setattr(engines, "MIGRATIONS", made_up(f"{COLOUR} SELECT pg_terminate_backend(pg_backend_pid());"))
    with pytest.raises(StoreLost):
        open_store(url)

    assert rows(url, "store")["store"][0][1:3] == (MIGRATIONS.version, 1)
    monkeypatch.setattr(engines, "MIGRATIONS", MIGRATIONS)
    open_store(url).close()
    with psycopg.connect(url) as raw:
        assert raw.execute("SELECT * FROM meta").description[-1].name == "value"


def columns(raw):
    return raw.execute(
        "SELECT table_name, column_name, data_type, column_default, is_nullable FROM information_schema.columns"
        " WHERE table_schema = current_schema() ORDER BY 1, 2"
    ).fetchall()


def indexes(raw):
    return raw.execute("SELECT indexname FROM pg_indexes WHERE schemaname = current_schema() ORDER BY 1").fetchall()


@pytest.mark.parametrize("is_early", [True, False], ids=["before-evaluations", "last"])
def test_store_of_schema_5_becomes_what_a_new_one_is(postgres, url, is_early):
    """As programs of schema 5 left it: indexes and counts from each start, evaluations and prompts from some release on."""
    open_store(url).close()
    with psycopg.connect(url) as raw:
        expected = columns(raw), indexes(raw)
        raw.execute(SINCE_6)
        raw.execute("UPDATE store SET schema_version = 5")
        raw.execute("INSERT INTO tally VALUES ('left', 3)")
        if is_early:
            raw.execute("DROP TABLE evaluation_jobs, evaluation_parts, evaluation_results, evaluation_sets, prompts")
            raw.execute("DROP TABLE prompt_totals, tally, waiting, out_work, holder, sharer")
            raw.execute("DROP INDEX steps_by_version")
    open_store(url).close()

    with psycopg.connect(url) as raw:
        assert (columns(raw), indexes(raw)) == expected
    assert rows(url, "store")["store"][0][1:3] == (MIGRATIONS.version, 2)
    assert dict(rows(url, "tally")["tally"]).get("left") is None


def test_rows_that_were_copied_in_are_counted_on(url, tmp_path):
    with contextlib.closing(connect(tmp_path / "file")) as file, psycopg.connect(url) as raw:
        file.execute("INSERT INTO work VALUES (1, 0, 0, 'a', 'i', 1, '[]', '', '{}', 0)")
        raw.execute((WRITER + MIGRATIONS.whole).encode())
        write_from(file, raw)
        engines.name_store(raw)
    engine = open_store(url)
    assert dict(rows(url, "tally")["tally"])["out"] == 1
    engine.connection.execute("INSERT INTO work VALUES (2, 0, 0, 'a', 'i', 1, '[]', '', '{}', 0)")
    assert dict(rows(url, "tally")["tally"])["out"] == 2
    engine.close()


def test_file_of_schema_5_becomes_what_a_new_one_is(tmp_path):
    def shape(path):
        with contextlib.closing(sqlite3.connect(path)) as raw:
            (version,) = raw.execute("PRAGMA user_version").fetchone()
            return version, sorted(raw.execute("SELECT type, name, sql FROM sqlite_master").fetchall(), key=repr)

    for name in ("new", "old"):
        connect(tmp_path / name).close()
    with contextlib.closing(sqlite3.connect(tmp_path / "old")) as raw:
        raw.executescript(SINCE_6)
        raw.executescript("DROP TABLE evaluation_jobs; DROP TABLE prompts; PRAGMA user_version = 5;")
    connect(tmp_path / "old").close()

    assert shape(tmp_path / "old") == shape(tmp_path / "new")
    assert shape(tmp_path / "new")[0] == of_files.SCHEMA_VERSION == MIGRATIONS.version
