"""The durable spool of groups between generation and acknowledgement.

Guarantees: a group is on disk before its assignment is forgotten, and stays until a terminal outcome; what is read at
once is bounded by the caller, however much is spooled; sequences are dense within an incarnation, which lives and dies
with the spool; one process owns a spool. Blocking; call from threads.
"""

from __future__ import annotations

import contextlib
import fcntl
import sqlite3
import threading
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from services.common.directory import make_directory, sync_directory
from services.common.errors import ConfigError, CorruptStore, DiskFull
from services.common.types import Group
from services.common.wire import group_from_bytes, group_to_bytes

_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS groups (
    sequence INTEGER PRIMARY KEY, release REAL NOT NULL, num_bytes INTEGER NOT NULL, payload BLOB NOT NULL);
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """How full the outbox is."""

    num_groups: int
    num_bytes: int


class Outbox:
    """SQLite spool in one directory."""

    def __init__(self, directory: Path) -> None:
        make_directory(directory)
        self._lock_file = _lock(directory / "lock")
        self._mutex = threading.Lock()
        try:
            self._connection = _connect(directory / "outbox.sqlite")
        except BaseException:
            self._lock_file.close()
            raise
        self._directory = directory
        self._spooled: dict[int, float] = {}
        self.incarnation = self._meta("incarnation", uuid.uuid4().hex[:16])
        self._next = int(self._meta("next_sequence", "1"))

    @property
    def next_sequence(self) -> int:
        """Sequence of the next group."""
        return self._next

    def lowest_sequence(self) -> int:
        """Lowest sequence that may still be pushed: all below it are settled or were never used."""
        with self._mutex:
            # The next one is read first: what is put meanwhile is not below it.
            following = self._next
            (lowest,) = self._connection.execute("SELECT min(sequence) FROM groups").fetchone()
        return following if lowest is None else min(following, int(lowest))

    def skip_to(self, sequence: int) -> None:
        """Never use a sequence below `sequence` (the coordinator knows of them)."""
        if sequence > self._next:
            self._write("UPDATE meta SET value = ? WHERE key = 'next_sequence'", [(str(sequence),)])
            self._next = sequence

    def put(self, groups: Sequence[Group], *, release: Sequence[float]) -> None:
        """Spool groups whose sequences continue from `next_sequence`; durable when it returns.

        Raises:
            DiskFull: nothing was spooled.
        """
        first = self._next
        assert [group.id.sequence for group in groups] == list(range(first, first + len(groups))), "sequences are dense"
        rows = []
        for group, at in zip(groups, release, strict=True):
            data = group_to_bytes(group)
            rows.append((group.id.sequence, at, len(data), data))
        with self._transaction():
            self._connection.executemany("INSERT INTO groups VALUES (?, ?, ?, ?)", rows)
            self._connection.execute("UPDATE meta SET value = ? WHERE key = 'next_sequence'", (str(first + len(rows)),))
        self._next = first + len(rows)

    def due(self, now: float, *, limit: int, max_bytes: int) -> tuple[list[Group], float | None]:
        """Groups to push now, oldest first, and the instant at which the next one is due.

        Args:
            now: wall time.
            limit: most groups.
            max_bytes: most bytes; one group is always returned if any is due.
        """
        chosen: list[bytes] = []
        num_bytes = 0
        with self._mutex:
            rows = self._connection.execute(
                "SELECT num_bytes, payload FROM groups WHERE release <= ? ORDER BY sequence LIMIT ?", (now, limit)
            )
            for size, payload in rows:
                num_bytes += size
                if chosen and num_bytes > max_bytes:
                    break
                chosen.append(payload)
            rows.close()
            later = self._connection.execute("SELECT min(release) FROM groups WHERE release > ?", (now,)).fetchone()
        return [group_from_bytes(payload) for payload in chosen], later[0]

    def release_all(self) -> None:
        """Hold nothing back any longer."""
        self._write("UPDATE groups SET release = ?", [(0.0,)])

    def note_spooled(self, sequences: Sequence[int], now: float) -> None:
        """Remember, until they are deleted, when groups were spooled; a restart forgets it."""
        self._spooled.update(dict.fromkeys(sequences, now))

    def delete(self, sequences: Sequence[int], *, now: float | None = None) -> list[float]:
        """Forget groups with a terminal outcome; returns how long those stayed whose start is known, seconds."""
        self._write("DELETE FROM groups WHERE sequence = ?", [(sequence,) for sequence in sequences])
        starts = [self._spooled.pop(sequence) for sequence in sequences if sequence in self._spooled]
        return [] if now is None else [max(0.0, now - start) for start in starts]

    def level(self) -> Level:
        """How full the outbox is."""
        with self._mutex:
            row = self._connection.execute("SELECT count(*), coalesce(sum(num_bytes), 0) FROM groups").fetchone()
        return Level(num_groups=row[0], num_bytes=row[1])

    def close(self) -> None:
        """Close the spool and let go of it."""
        with self._mutex:
            self._connection.close()
        self._lock_file.close()

    def _meta(self, key: str, default: str) -> str:
        self._write("INSERT OR IGNORE INTO meta VALUES (?, ?)", [(key, default)])
        row = self._connection.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return str(row[0])

    def _write(self, statement: str, rows: Sequence[tuple[object, ...]]) -> None:
        with self._transaction():
            self._connection.executemany(statement, rows)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        """All or nothing; a full disk leaves the spool as it was."""
        with self._mutex:
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._connection.execute("COMMIT")
            except BaseException as error:
                # A full disk has rolled back already; after anything else the next transaction could not begin.
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                if isinstance(error, sqlite3.OperationalError) and error.sqlite_errorcode == sqlite3.SQLITE_FULL:
                    raise DiskFull(str(self._directory)) from error
                raise


def _connect(path: Path) -> sqlite3.Connection:
    action = "move it away; its groups are lost, a new one begins"
    try:
        connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    except sqlite3.DatabaseError as error:
        raise CorruptStore(f"{path}: {error}", action="check state_dir and its permissions") from error
    try:
        mode = connection.execute("PRAGMA journal_mode=WAL").fetchone()[0]
        connection.execute("PRAGMA synchronous=FULL")
        level = connection.execute("PRAGMA synchronous").fetchone()[0]
        if (mode, level) != ("wal", 2):
            raise CorruptStore(f"{path}: durable mode refused (journal {mode}, synchronous {level})")
        connection.executescript(_SCHEMA)
    except sqlite3.DatabaseError as error:
        connection.close()
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
            raise DiskFull(str(path.parent)) from error
        raise CorruptStore(f"{path}: {error}", action=action) from error
    except CorruptStore:
        connection.close()
        raise
    # SQLite makes its log's name durable, not that of the database itself.
    sync_directory(path.parent)
    sync_directory(path.parent.parent)
    return connection


def _lock(path: Path) -> BinaryIO:
    file = path.open("wb")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        action = "stop the other process or give each sampler its own state_dir"
        raise ConfigError("state_dir", f"another sampler uses {path.parent}", action=action) from error
    return file
