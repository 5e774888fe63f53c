"""Rows of a store between PostgreSQL and a file of SQLite's, which has the same tables: backups, and moves to another.

A backup of either store is such a file beside payloads. So there is one format, whatever reads a data directory reads
every backup, and a run may go on in the other store.

    read    from one snapshot of the database (REPEATABLE READ), while the coordinator writes on
    write   in the caller's transaction; what numbers were given out stays given out
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, LiteralString, cast

import psycopg
from psycopg import sql

from heterorl.common.errors import CorruptStore
from heterorl.coordinator.store.postgres import tallies
from heterorl.coordinator.store.postgres.engine import connect
from heterorl.coordinator.store.schema import ANOTHER_PROGRAM, INDEXES, SCHEMA, SCHEMA_VERSION

_TYPES = {"INTEGER": "int8", "REAL": "float8", "TEXT": "text", "BLOB": "bytea"}
_BYTES = ("contract",)
"""Settings that are bytes; the others are texts, which PostgreSQL keeps in the same column of bytes."""


@dataclass(frozen=True, slots=True)
class _Table:
    name: str
    columns: tuple[str, ...]
    types: tuple[str, ...]
    counted: str
    """The column whose numbers are never given out twice; empty where there is none."""

    def copy(self, form: LiteralString) -> sql.Composed:
        """COPY in PostgreSQL's words."""
        names = sql.SQL(", ").join(map(sql.Identifier, self.columns))
        return sql.SQL("COPY {} ({}) " + form + " (FORMAT BINARY)").format(sql.Identifier(self.name), names)


def read_into(url: str, path: Path) -> None:
    """Write the rows of a database, as they are at one moment, into a new file; it is not yet durable.

    Raises:
        psycopg.Error, OperatorError: the database cannot be read.
        sqlite3.Error: the file cannot be written.
        CorruptStore: the store has another schema.
    """
    file = sqlite3.connect(path, isolation_level=None)
    try:
        # What fails is thrown away as a whole.
        file.executescript(f"PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF; {SCHEMA}")
        with connect(url) as raw, raw.transaction():
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
    """Write the rows of a file of this schema into tables that are empty; the caller ends the transaction.

    Raises:
        psycopg.Error: PostgreSQL refuses a row.
    """
    raw.execute(tallies.PAUSE)
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
    raw.execute(tallies.RESUME)


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
        # A sequence shows what was given out, also to transactions that are not in the snapshot: more is no harm.
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
