"""The durable outbox: groups on disk between generation and acknowledgement.

A group is on disk before its assignment is forgotten, and stays until a final outcome. Reads are bounded by the caller.
Sequences are dense within an incarnation, which belongs to one outbox file and one site name. A group whose bytes
changed on disk is delivered as an empty one, which the coordinator refuses and counts. One process owns an outbox.
Blocking; call from threads.

A damaged file, or one of another format or site, moves to the directory set-aside and a new one begins. An operator can
recover its groups.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import re
import secrets
import shutil
import sqlite3
import threading
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import xxhash

from heterorl.common.errors import ConfigError, CorruptStore, DiskFull, HeterorlError, MalformedPayload
from heterorl.common.process import metrics
from heterorl.common.process.files import has_no_room, make_directory, sync_directory, try_lock, usable
from heterorl.common.types.common import Digest, SiteId
from heterorl.common.types.rollout import Group, GroupId, SealedGroup
from heterorl.common.wire.sealed_groups import read_sealed, seal
from heterorl.sampler.outbox.turn_store import TurnStore

_LOG = logging.getLogger(__name__)
MAX_SEQUENCE = 2**48
"""Largest sequence that a coordinator may state; no run comes so far."""
NO_ASSIGNMENT = (1 << 63) - 1
"""The assignment of an empty group: no run comes so far, so none is given back with it."""
NAME = "outbox.sqlite"
SET_ASIDE = "set-aside"
NO_ROOM_BYTES = 1 << 20
"""With less free space, SQLite's I/O errors count as a full disk."""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS groups (
    sequence INTEGER PRIMARY KEY, release REAL NOT NULL, num_bytes INTEGER NOT NULL, payload BLOB NOT NULL,
    checksum BLOB NOT NULL, assignment INTEGER);
-- Each question for work reads all assignments: without the index also the payloads, which lie in front of them.
CREATE INDEX IF NOT EXISTS groups_by_assignment ON groups (assignment);
CREATE TABLE IF NOT EXISTS set_aside (
    sequence INTEGER PRIMARY KEY, reason TEXT NOT NULL, payload BLOB NOT NULL, checksum BLOB);
CREATE TABLE IF NOT EXISTS turns (
    assignment INTEGER NOT NULL, member INTEGER NOT NULL, number INTEGER NOT NULL, seed TEXT NOT NULL,
    begun REAL NOT NULL, resumed INTEGER NOT NULL, payload BLOB NOT NULL, checksum BLOB NOT NULL,
    PRIMARY KEY (assignment, member, number));
"""
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)

_FORMAT = 2
"""Format of groups in the file."""


class Outbox:
    """SQLite file of a site; without `site`, its owner stays."""

    def __init__(self, directory: Path, *, site: str = "") -> None:
        with usable("state_dir", directory):
            make_directory(directory, mode=0o700)
            self._lock_file = lock_outbox(directory / "lock")
        self._mutex = threading.Lock()
        self._path = directory / NAME
        self._spooled: dict[int, float] = {}
        # In memory: a loop asks at every completion, also during a write.
        self._level = Level(num_groups=0, num_bytes=0)
        self.next_sequence = 1
        """Sequence of the next group."""
        self._site = ""
        self.incarnation = ""
        try:
            self._connection = open_outbox_file(directory)
            try:
                self._own(site)
                self.turns = TurnStore(self._transaction)
            except BaseException:
                self._connection.close()
                raise
        except BaseException:
            self._lock_file.close()
            raise

    def lowest_sequence(self) -> int:
        with self._reading():
            # The next sequence is read first: groups put later are not below it.
            following = self.next_sequence
            (lowest,) = self._connection.execute("SELECT min(sequence) FROM groups").fetchone()
        return following if lowest is None else min(following, int(lowest))

    def assignments(self) -> tuple[int, ...] | None:
        """Assignments of its groups and turns; None if unknown."""
        with self._reading():
            rows = self._connection.execute(
                "SELECT assignment FROM groups UNION ALL SELECT DISTINCT assignment FROM turns"
            ).fetchall()
        known = tuple(assignment for (assignment,) in rows if assignment is not None)
        return known if len(known) == len(rows) else None

    def skip_to(self, sequence: int) -> None:
        """Use no sequence below `sequence`, which the coordinator knows.

        Raises MalformedPayload: no run comes so far; the outbox is unchanged.
        """
        if sequence > MAX_SEQUENCE:
            raise MalformedPayload(f"the coordinator knows of sequence {sequence}", action="distrust the coordinator")
        if sequence > self.next_sequence:
            self._write("UPDATE meta SET value = ? WHERE key = 'next_sequence'", [(str(sequence),)])
            self.next_sequence = sequence

    def put(self, groups: Sequence[Group], *, release: Sequence[float]) -> None:
        """Store groups and delete their turns; durable when it returns.

        Sequences continue from `next_sequence`. Raises DiskFull: the outbox is unchanged.
        """
        first = self.next_sequence
        assert [group.id.sequence for group in groups] == list(range(first, first + len(groups))), "sequences are dense"
        rows = []
        for group, at in zip(groups, release, strict=True):
            # Sealed here: a group that waited for the disk got a new number.
            data = seal(group).data
            rows.append(
                (group.id.sequence, at, len(data), data, checksum_of(group.id.sequence, data), group.assignment)
            )
        self._site = self._site or (groups[0].id.site if groups else "")
        with self._transaction():
            if self._site:
                self._connection.execute("INSERT OR IGNORE INTO meta VALUES ('site', ?)", (self._site,))
            self._connection.executemany("INSERT INTO groups VALUES (?, ?, ?, ?, ?, ?)", rows)
            self.turns.drop(self._connection, [group.assignment for group in groups])
            self._connection.execute("UPDATE meta SET value = ? WHERE key = 'next_sequence'", (str(first + len(rows)),))
        self.next_sequence = first + len(rows)
        self._change_level(len(rows), sum(row[2] for row in rows))

    def due(self, now: float, *, limit: int, max_bytes: int) -> tuple[list[SealedGroup], float | None]:
        """Groups due at `now`, oldest first, and when the next is due.

        At most `limit` groups and `max_bytes`, but always one group if any is due. Raises DiskFull: a damaged one
        cannot be set aside.
        """
        chosen: list[tuple[int, bytes, bytes]] = []
        num_bytes = 0
        with self._reading():
            rows = self._connection.execute(
                "SELECT num_bytes, sequence, payload, checksum FROM groups WHERE release <= ? ORDER BY sequence"
                " LIMIT ?",
                (now, limit),
            )
            for size, *row in rows:
                num_bytes += size
                if chosen and num_bytes > max_bytes:
                    break
                chosen.append((row[0], row[1], row[2]))
            rows.close()
            later = self._connection.execute("SELECT min(release) FROM groups WHERE release > ?", (now,)).fetchone()
        return [self._read(*row) for row in chosen], later[0]

    def release_by(self, instant: float) -> None:
        """Make groups that are due later due at `instant`.
        Rows that are due stay as they are: writing one rewrites its group."""
        self._write("UPDATE groups SET release = ? WHERE release > ?", [(instant, instant)])

    def note_spooled(self, sequences: Sequence[int], now: float) -> None:
        """Remember when groups were stored, until deletion or the process's end."""
        self._spooled.update(dict.fromkeys(sequences, now))

    def delete(self, sequences: Sequence[int], *, now: float | None = None) -> list[float]:
        """Delete settled groups; returns their seconds in the outbox, where known."""
        with self._transaction():
            statement = "DELETE FROM groups WHERE sequence = ? RETURNING num_bytes"
            sizes = [
                size
                for sequence in sequences
                for (size,) in self._connection.execute(statement, (sequence,)).fetchall()
            ]
        self._change_level(-len(sizes), -sum(sizes))
        starts = [self._spooled.pop(sequence) for sequence in sequences if sequence in self._spooled]
        return [] if now is None else [max(0.0, now - start) for start in starts]

    def put_aside(self, sequence: int, problem: str) -> bool:
        """Keep a group's bytes and deliver an empty one; False: disk full."""
        with self._reading():
            statement = "SELECT payload, checksum FROM groups WHERE sequence = ?"
            payload, checksum = self._connection.execute(statement, (sequence,)).fetchone()
        with contextlib.suppress(DiskFull):
            self._set_row_aside(sequence, payload, checksum, problem, is_refused=True)
            return True
        return False

    def level(self) -> Level:
        return self._level

    def close(self) -> None:
        with self._mutex:
            self._connection.close()
        self._lock_file.close()

    def _own(self, site: str) -> None:
        """Make the file this site's.
        Raises ConfigError: it holds groups of another site.

        The coordinator counts sequences by name and incarnation, so another name begins another incarnation.
        """
        owner = self._stored("site")
        self._count()
        if site and owner and owner != site:
            if self.level().num_groups:
                problem = f"{self._path} holds {self.level().num_groups} groups of site {owner}"
                action = f'start a sampler with site = "{owner}" to deliver them, or move the file away'
                raise ConfigError("site", problem, action=action)
            self._connection.close()
            set_aside(self._path, "renamed")
            self._connection = open_outbox_file(self._path.parent)
            self._count()
        self.incarnation = self._meta("incarnation", uuid.uuid4().hex[:16])
        self.next_sequence = int(self._meta("next_sequence", "1"))
        self._site = site or owner
        if self._site:
            self._meta("site", self._site)

    def _read(self, sequence: int, payload: bytes, checksum: bytes) -> SealedGroup:
        found = group_of(sequence, payload, checksum)
        if isinstance(found, SealedGroup):
            return found
        self._set_row_aside(sequence, payload, checksum, found)
        return self._empty(sequence)

    def _set_row_aside(
        self, sequence: int, payload: bytes, checksum: bytes, problem: str, *, is_refused: bool = False
    ) -> None:
        data = self._empty(sequence).data
        with self._transaction():
            (before,) = self._connection.execute(
                "SELECT num_bytes FROM groups WHERE sequence = ?", (sequence,)
            ).fetchone()
            self._connection.execute(
                "INSERT OR REPLACE INTO set_aside VALUES (?, ?, ?, ?)", (sequence, problem[:500], payload, checksum)
            )
            self._connection.execute(
                "UPDATE groups SET num_bytes = ?, payload = ?, checksum = ? WHERE sequence = ?",
                (len(data), data, checksum_of(sequence, data), sequence),
            )
        self._change_level(0, len(data) - before)
        metrics.OUTBOX_SET_ASIDE.labels("refused" if is_refused else "row").inc()
        what, advice = ("REFUSED", "see what the reward returns") if is_refused else ("DAMAGED", "check this disk")
        _LOG.error(
            "GROUP %d OF THE OUTBOX IS %s (%s): it is not delivered, an empty one takes its place; its bytes are "
            "in table set_aside of %s; %s",
            sequence, what, problem, self._path, advice,
        )  # fmt: skip

    def _empty(self, sequence: int) -> SealedGroup:
        return seal(empty_group(GroupId(site=SiteId(self._site), incarnation=self.incarnation, sequence=sequence)))

    def _count(self) -> None:
        with self._reading():
            row = self._connection.execute("SELECT count(*), coalesce(sum(num_bytes), 0) FROM groups").fetchone()
        self._level = Level(num_groups=row[0], num_bytes=row[1])

    def _change_level(self, num_groups: int, num_bytes: int) -> None:
        with self._mutex:
            before = self._level
            self._level = Level(num_groups=before.num_groups + num_groups, num_bytes=before.num_bytes + num_bytes)

    def _stored(self, key: str) -> str:
        with self._reading():
            row = self._connection.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return "" if row is None else str(row[0])

    def _meta(self, key: str, default: str) -> str:
        found = self._stored(key)
        if not found:
            self._write("INSERT INTO meta VALUES (?, ?)", [(key, default)])
        return found or default

    def _write(self, statement: str, rows: Sequence[tuple[object, ...]]) -> None:
        with self._transaction():
            self._connection.executemany(statement, rows)

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        with self._mutex:
            try:
                yield
            except (sqlite3.IntegrityError, sqlite3.ProgrammingError):
                # Programming errors.
                raise
            except sqlite3.Error as error:
                raise typed(error, self._path) from error

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """An atomic transaction; a full disk leaves the file as it was."""
        with self._reading():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                # A full disk has rolled back already; any other error has not.
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """Number and bytes of stored groups."""

    num_groups: int
    num_bytes: int


def checksum_of(sequence: int, data: bytes) -> bytes:
    """xxh3-64 of a row and its sequence, 8 bytes."""
    return xxhash.xxh3_64_digest(data, seed=sequence)


def group_of(sequence: int, payload: bytes, checksum: bytes) -> SealedGroup | str:
    """The group of a row, or the problem with it."""
    if checksum != checksum_of(sequence, payload):
        return "its bytes changed on disk"
    try:
        group = read_sealed(payload)
    except MalformedPayload as error:
        return str(error)
    return group if group.id.sequence == sequence else "it is another group"


def empty_group(group_id: GroupId) -> Group:
    """A group without rollouts: the coordinator refuses it, which settles its sequence."""
    return Group(
        id=group_id, assignment=NO_ASSIGNMENT, prompt_index=0, prompt_token_ids=np.zeros(0, np.int32), rollouts=(),
        oldest_version=0, state_root=Digest(""), generation_s=0.0,
    )  # fmt: skip


class _DamagedFile(Exception):
    """The file is no database, contradicts itself, or has another format."""


def lock_outbox(path: Path) -> BinaryIO:
    """Lock an outbox for this process; raises ConfigError if it is taken."""
    file = path.open("wb")
    if not try_lock(file):
        file.close()
        action = "stop the other process or give each sampler its own state_dir"
        raise ConfigError("state_dir", f"another sampler uses {path.parent}", action=action)
    return file


def open_outbox_file(directory: Path) -> sqlite3.Connection:
    """Open a directory's file; a damaged one is set aside first.

    Raises DiskFull, ConfigError, CorruptStore: it cannot be opened, and its bytes are not the cause.
    """
    path = directory / NAME
    try:
        return _connect(path)
    except _DamagedFile as error:
        kept = set_aside(path, "damaged")
        metrics.OUTBOX_SET_ASIDE.labels("file").inc()
        _LOG.error(
            "THE OUTBOX IS DAMAGED (%s): it is kept as %s and a new one begins; what was not delivered is in it "
            "(`sqlite3 FILE .recover` reads what can be read), its prompts are handed out again",
            error, kept,
        )  # fmt: skip
    try:
        return _connect(path)
    except _DamagedFile as error:
        raise CorruptStore(f"{path}: {error}, and it is a new file", action="check the disk of state_dir") from error


def set_aside(path: Path, reason: str) -> Path:
    """Move a file and its log to set-aside; returns the new path."""
    parent = path.parent / SET_ASIDE
    make_directory(parent)
    instant = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%S")
    words = re.sub(r"[^A-Za-z0-9._-]", "_", reason)[:80]
    # Random too: a stopped clock must not let one file replace another.
    target = parent / f"{path.stem}-{words}-{instant}-{secrets.token_hex(4)}{path.suffix}"
    for suffix in ("", "-wal"):
        before = path.with_name(path.name + suffix)
        if before.exists():
            before.rename(target.with_name(target.name + suffix))
    path.with_name(path.name + "-shm").unlink(missing_ok=True)
    sync_directory(parent)
    sync_directory(path.parent)
    return target


def typed(error: sqlite3.Error, path: Path) -> HeterorlError:
    """The typed error for a failure of SQLite."""
    code = (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF
    if code == sqlite3.SQLITE_FULL:
        return DiskFull(str(path.parent))
    # SQLite tells a full quota from no other failed write.
    if code in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN) and (
        shutil.disk_usage(path.parent).free < NO_ROOM_BYTES or has_no_room(path.parent)
    ):
        return DiskFull(str(path.parent))
    if code in _DAMAGED:
        return CorruptStore(f"{path}: {error}", action="restart: the file is set aside and a new one begins")
    if code in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM):
        return ConfigError("state_dir", f"{path} cannot be written: {error}", action="check its owner and permissions")
    return CorruptStore(f"{path}: {error}", action="check the disk of state_dir, then restart")


def _connect(path: Path) -> sqlite3.Connection:
    connection: sqlite3.Connection | None = None
    try:
        connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        mode = connection.execute("PRAGMA journal_mode=WAL").fetchone()[0]
        connection.execute("PRAGMA synchronous=FULL")
        level = connection.execute("PRAGMA synchronous").fetchone()[0]
        if (mode, level) != ("wal", 2):
            action = "put state_dir on a local file system"
            raise CorruptStore(f"{path}: durable mode refused (journal {mode}, synchronous {level})", action=action)
        # Finds a damaged page before anything is added.
        verdict = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        if verdict != "ok":
            raise _DamagedFile(verdict)
        is_new = not connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if not is_new and connection.execute("PRAGMA user_version").fetchone()[0] != _FORMAT:
            raise _DamagedFile("its groups have the format of another release")
        connection.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version={_FORMAT}; COMMIT;")
    except BaseException as error:
        if connection is not None:
            connection.close()
        if isinstance(error, sqlite3.Error):
            if (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF in _DAMAGED:
                raise _DamagedFile(str(error)) from error
            raise typed(error, path) from error
        raise
    # SQLite syncs the name of its log, not the name of the database.
    sync_directory(path.parent)
    sync_directory(path.parent.parent)
    return connection
