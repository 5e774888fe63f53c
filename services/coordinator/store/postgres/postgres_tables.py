"""The tables in PostgreSQL: created, counted, and copied from or to SQLite.

They are the tables of `store/schema.py` in PostgreSQL's types, plus a row that names the writer. Texts compare by
bytes, as in SQLite. Group content is stored uncompressed, since it is compressed already. A coordinator that takes a
store of this schema changes only rows, so it waits for no reader, not even pg_dump.

Triggers keep the counts of `store/tallies.py` in unlogged tables, since they cannot name temporary ones; each new
coordinator refills them. A backup of either store is a SQLite file, so one format serves all tools:

    read    from one snapshot of the database (REPEATABLE READ), while the coordinator writes on
    write   in the caller's transaction; identities continue after the numbers that were given out
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, LiteralString, cast

import psycopg
from psycopg import sql

from heterorl.common.errors import CorruptStore
from heterorl.common.types.evaluation import HELD_OUT
from heterorl.coordinator.store.schema import ANOTHER_PROGRAM, AUDIT_TRIGGERS, INDEXES, SCHEMA, SCHEMA_VERSION
from heterorl.coordinator.store.tallies import FILL, TABLES

_GROUPS = """
CREATE OR REPLACE FUNCTION tally_group() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    -- A group that was taken wins back one of the assignments that its site left unanswered.
    UPDATE sharer SET owed = owed - 1 WHERE site = NEW.site AND owed > 0;
    RETURN NULL;
END $$;
CREATE OR REPLACE TRIGGER group_counts AFTER INSERT ON groups FOR EACH ROW WHEN (NEW.state = 'pending')
    EXECUTE FUNCTION tally_group();
"""
_WORK = """
CREATE OR REPLACE FUNCTION tally_work() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    IF TG_OP <> 'INSERT' AND OLD.is_leased = 1 THEN
        DELETE FROM out_work WHERE assignment = OLD.assignment;
    END IF;
    IF TG_OP <> 'DELETE' AND NEW.is_leased = 1 THEN
        INSERT INTO out_work (assignment, site, incarnation, request_id)
            VALUES (NEW.assignment, NEW.site, NEW.incarnation, NEW.request_id);
    END IF;
    RETURN NULL;
END $$;
CREATE OR REPLACE TRIGGER work_counts AFTER INSERT OR DELETE OR UPDATE OF is_leased, site, incarnation ON work
    FOR EACH ROW EXECUTE FUNCTION tally_work();
"""
_OUT = f"""
CREATE OR REPLACE FUNCTION tally_out() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    IF TG_OP = 'INSERT' THEN
        INSERT INTO holder (site, incarnation, held) VALUES (NEW.site, NEW.incarnation, 1)
            ON CONFLICT (site, incarnation) DO UPDATE SET held = holder.held + 1;
        INSERT INTO sharer (site) VALUES (NEW.site) ON CONFLICT DO NOTHING;
        UPDATE sharer SET held = held + 1, counted = counted + 1
            WHERE site = NEW.site AND NEW.assignment < {HELD_OUT};
        UPDATE tally SET count = count + 1 WHERE name = 'out' AND NEW.assignment < {HELD_OUT};
    ELSIF TG_OP = 'DELETE' THEN
        UPDATE holder SET held = held - 1, away = away - OLD.is_away
            WHERE site = OLD.site AND incarnation = OLD.incarnation;
        DELETE FROM holder WHERE site = OLD.site AND incarnation = OLD.incarnation AND held = 0;
        UPDATE sharer SET held = held - 1, counted = counted - 1 + OLD.is_away
            WHERE site = OLD.site AND OLD.assignment < {HELD_OUT};
        UPDATE tally SET count = count - 1
            WHERE name = CASE OLD.is_away WHEN 0 THEN 'out' ELSE 'away' END AND OLD.assignment < {HELD_OUT};
    ELSIF OLD.is_away = 0 AND NEW.is_away = 1 THEN
        UPDATE sharer SET counted = counted - 1 WHERE site = NEW.site AND NEW.assignment < {HELD_OUT};
        UPDATE holder SET away = away + 1 WHERE site = NEW.site AND incarnation = NEW.incarnation;
        UPDATE tally SET count = count - 1 WHERE name = 'out' AND NEW.assignment < {HELD_OUT};
        UPDATE tally SET count = count + 1 WHERE name = 'away' AND NEW.assignment < {HELD_OUT};
    END IF;
    RETURN NULL;
END $$;
CREATE OR REPLACE TRIGGER out_counts AFTER INSERT OR DELETE OR UPDATE OF is_away ON out_work
    FOR EACH ROW EXECUTE FUNCTION tally_out();
CREATE OR REPLACE FUNCTION tally_wanting() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    UPDATE tally SET count = count + CASE WHEN NEW.counted > 0 OR NEW.asked IS NOT NULL THEN 1 ELSE -1 END
        WHERE name = 'wanting';
    RETURN NULL;
END $$;
CREATE OR REPLACE TRIGGER sharer_counts AFTER UPDATE OF counted, asked ON sharer FOR EACH ROW
    WHEN ((OLD.counted > 0 OR OLD.asked IS NOT NULL) <> (NEW.counted > 0 OR NEW.asked IS NOT NULL))
    EXECUTE FUNCTION tally_wanting();
"""
_NONE = """
ALTER TABLE out_work DISABLE TRIGGER out_counts;
DELETE FROM tally; DELETE FROM out_work; DELETE FROM holder; DELETE FROM sharer;
ALTER TABLE out_work ENABLE TRIGGER out_counts;
"""
_FILLED = {"tally": 10, "holder": 50, "sharer": 50}
"""Tables whose rows change often, and how much of a page new rows fill, in percent."""
PAUSE_COUNTS = "ALTER TABLE groups DISABLE TRIGGER group_counts; ALTER TABLE work DISABLE TRIGGER work_counts;"
"""Stops counting while rows are copied in."""
RESUME_COUNTS = "ALTER TABLE groups ENABLE TRIGGER group_counts; ALTER TABLE work ENABLE TRIGGER work_counts;"


_WORDS = (
    # The temporary tables of `tallies` are ordinary tables here.
    (r"\bCREATE TEMP TABLE\b", "CREATE UNLOGGED TABLE IF NOT EXISTS"),
    (r"\bCREATE INDEX temp\.", "CREATE INDEX IF NOT EXISTS "),
    (r"\b(temp|main)\.", ""),
    (r"\bINTEGER PRIMARY KEY AUTOINCREMENT\b", "BIGINT GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY"),
    (r"\)\s*WITHOUT ROWID\b", ")"),
    (r"\bINTEGER\b", "BIGINT"),
    (r"\bREAL\b", "DOUBLE PRECISION"),
    (r"\bBLOB\b", "BYTEA"),
    (r"\bTEXT\b", 'TEXT COLLATE "C"'),
)
WRITER = """
CREATE TABLE IF NOT EXISTS store (
    id TEXT NOT NULL, schema_version BIGINT NOT NULL, epoch BIGINT NOT NULL, taken TIMESTAMPTZ NOT NULL,
    is_only BOOLEAN PRIMARY KEY DEFAULT true CHECK (is_only));
"""
"""One row: the store's name, its schema, and the epoch, which counts the coordinators that took it."""
_APPENDED_ONLY = """
CREATE OR REPLACE FUNCTION audit_is_kept() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    RAISE EXCEPTION USING ERRCODE = 'integrity_constraint_violation',
        MESSAGE = 'the log of audit is only appended to';
END $$;
CREATE OR REPLACE TRIGGER audit_keeps_rows BEFORE DELETE OR UPDATE ON audit
    FOR EACH ROW EXECUTE FUNCTION audit_is_kept();
CREATE OR REPLACE TRIGGER audit_keeps_all BEFORE TRUNCATE ON audit EXECUTE FUNCTION audit_is_kept();
"""
_STORED_AS_IS = """
ALTER TABLE groups ALTER payload SET STORAGE EXTERNAL;
ALTER TABLE sample_payloads ALTER content SET STORAGE EXTERNAL, ALTER note SET STORAGE EXTERNAL;
"""


def in_postgres(script: str) -> str:
    """A SQLite script in PostgreSQL's dialect."""
    script = script.replace(AUDIT_TRIGGERS, "")
    for pattern, word in _WORDS:
        script = re.sub(pattern, word, script)
    return script


def _tallies() -> str:
    script = in_postgres(TABLES)
    for name, percent in _FILLED.items():
        script = re.sub(rf"(EXISTS {name} [^;]*)", rf"\1 WITH (fillfactor = {percent})", script)
    return script + _GROUPS + _WORK + _OUT


WHOLE = in_postgres(SCHEMA + INDEXES) + _APPENDED_ONLY + _STORED_AS_IS + _tallies()
"""Everything in a new store except its row of WRITER."""
COUNT_ANEW = _NONE + in_postgres(FILL)
"""Counts the leased assignments; once for each coordinator that takes the store."""


_TYPES = {"INTEGER": "int8", "REAL": "float8", "TEXT": "text", "BLOB": "bytea"}
_BYTES = ("contract", "statement")
"""Settings that are bytes; the others are texts, in the same column of bytes."""


@dataclass(frozen=True, slots=True)
class _Table:
    name: str
    columns: tuple[str, ...]
    types: tuple[str, ...]
    counted: str
    """The identity column, or empty."""

    def copy(self, form: LiteralString) -> sql.Composed:
        """The COPY statement."""
        names = sql.SQL(", ").join(map(sql.Identifier, self.columns))
        return sql.SQL("COPY {} ({}) " + form + " (FORMAT BINARY)").format(sql.Identifier(self.name), names)


def read_into(raw: psycopg.Connection[Any], path: Path) -> None:
    """Write a snapshot of a database into a new, unsynced file.
    Raises psycopg.Error; sqlite3.Error: the file cannot be written; CorruptStore: another schema."""
    file = sqlite3.connect(path, isolation_level=None)
    try:
        # The caller discards a failed file.
        file.executescript(f"PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF; {SCHEMA}")
        with raw.transaction():
            raw.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
            row = raw.execute("SELECT schema_version FROM store").fetchone()
            if row is None or row[0] != SCHEMA_VERSION:
                raise CorruptStore(
                    f"the store has schema {row and row[0]}, this program needs {SCHEMA_VERSION}",
                    action=ANOTHER_PROGRAM,
                )
            file.execute("BEGIN")
            for table in tables_of(file):
                _read_table(raw, file, table)
            file.execute("COMMIT")
        file.executescript(f"{INDEXES} PRAGMA user_version={SCHEMA_VERSION};")
    finally:
        file.close()


def write_from(file: sqlite3.Connection, raw: psycopg.Connection[Any]) -> None:
    """Copy a file of this schema into empty tables.
    Runs in the caller's transaction. Raises psycopg.Error."""
    raw.execute(PAUSE_COUNTS)
    for table in tables_of(file):
        with raw.cursor() as cursor, cursor.copy(table.copy("FROM STDIN")) as copy:
            copy.set_types(table.types)
            for row in _rows(file, table):
                copy.write_row(row)
        if table.counted:
            given = file.execute("SELECT seq FROM sqlite_sequence WHERE name = ?", (table.name,)).fetchone()
            if given is not None and given[0] > 0:
                raw.execute(
                    "SELECT setval(pg_get_serial_sequence(%s, %s), %s)", (table.name, table.counted, int(given[0]))
                )
    raw.execute(RESUME_COUNTS)


def tables_of(file: sqlite3.Connection) -> Iterator[_Table]:
    """The tables of a file's schema."""
    names = file.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'")
    for name, text in names.fetchall():
        columns = file.execute("SELECT name, type, pk FROM pragma_table_info(?) ORDER BY cid", (name,)).fetchall()
        key = next((column for column, _, place in columns if place), "")
        yield _Table(
            name=name,
            columns=tuple(column for column, *_ in columns),
            types=tuple(_TYPES[kind] for _, kind, _ in columns),
            counted=key if "AUTOINCREMENT" in text else "",
        )


def _read_table(raw: psycopg.Connection[Any], file: sqlite3.Connection, table: _Table) -> None:
    marks = ", ".join("?" * len(table.columns))
    with raw.cursor() as cursor, cursor.copy(table.copy("TO STDOUT")) as copy:
        copy.set_types(table.types)
        rows: Iterable[Sequence[Any]] = copy.rows()
        if table.name == "meta":
            rows = ((key, value if key in _BYTES else value.decode()) for key, value in rows)
        file.executemany(f"INSERT INTO {table.name} ({', '.join(table.columns)}) VALUES ({marks})", rows)
    if table.counted:
        name = raw.execute("SELECT pg_get_serial_sequence(%s, %s)", (table.name, table.counted)).fetchone()
        assert name is not None, "the column is an identity"
        # The sequence may be ahead of the snapshot, which does no harm.
        query = sql.SQL("SELECT last_value FROM {} WHERE is_called").format(sql.SQL(cast("LiteralString", name[0])))
        given = raw.execute(query).fetchone()
        if given is not None:
            file.execute("DELETE FROM sqlite_sequence WHERE name = ?", (table.name,))
            file.execute("INSERT INTO sqlite_sequence (name, seq) VALUES (?, ?)", (table.name, int(given[0])))


def _rows(file: sqlite3.Connection, table: _Table) -> Iterator[Sequence[Any]]:
    rows = file.execute(f"SELECT {', '.join(table.columns)} FROM {table.name}")
    if table.name == "meta":
        return ((key, value.encode() if isinstance(value, str) else value) for key, value in rows)
    return iter(rows)
