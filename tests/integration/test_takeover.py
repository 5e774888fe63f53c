"""Taking a store in PostgreSQL next to its readers, and refusing one of another schema; on a real server."""

import asyncio
import contextlib

import pytest

from heterorl.common.errors import CorruptStore
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.coordinator.core import Coordinator
from heterorl.coordinator.store import schema as of_files
from tests.support.clock import ManualClock
from tests.support.run import Run

psycopg = pytest.importorskip("psycopg")

from heterorl.coordinator.store.postgres import postgres_engine as engines  # noqa: E402 - needs psycopg
from heterorl.coordinator.store.postgres.postgres_engine import open_store  # noqa: E402
from heterorl.coordinator.store.postgres.postgres_tables import WHOLE, WRITER, write_from  # noqa: E402
from heterorl.coordinator.store.sqlite import connect  # noqa: E402


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


COUNTED = ("tally", "out_work", "holder")


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
    assert dict(before["tally"])["out"] == 2
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


@pytest.mark.parametrize("number", [of_files.SCHEMA_VERSION - 1, of_files.SCHEMA_VERSION + 1])
def test_store_of_another_schema_is_refused_and_left_alone(url, number):
    open_store(url).close()
    with psycopg.connect(url) as raw:
        raw.execute("UPDATE store SET schema_version = %s", (number,))
    before = rows(url, "store")

    with pytest.raises(CorruptStore, match=f"has schema {number}, this program needs .*export the model"):
        open_store(url)
    assert rows(url, "store") == before


def test_rows_that_were_copied_in_are_counted_on(url, tmp_path):
    with contextlib.closing(connect(tmp_path / "file")) as file, psycopg.connect(url) as raw:
        file.execute("INSERT INTO work VALUES (1, 0, 0, 'a', 'i', 1, '[]', '', '{}', 0)")
        raw.execute((WRITER + WHOLE).encode())
        write_from(file, raw)
        engines.name_store(raw)
    engine = open_store(url)
    assert dict(rows(url, "tally")["tally"])["out"] == 1
    engine.connection.execute("INSERT INTO work VALUES (2, 0, 0, 'a', 'i', 1, '[]', '', '{}', 0)")
    assert dict(rows(url, "tally")["tally"])["out"] == 2
    engine.close()
