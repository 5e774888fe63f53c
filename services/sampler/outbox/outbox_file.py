"""The SQLite file of an outbox: opened or set aside, never deleted.

A damaged file, or one of another format or site, moves to the directory set-aside and a new one begins. An operator can
recover its groups.
"""

from __future__ import annotations

import datetime
import logging
import re
import secrets
import shutil
import sqlite3
from pathlib import Path
from typing import BinaryIO

from heterorl.common.errors import ConfigError, CorruptStore, DiskFull, HeterorlError
from heterorl.common.process import metrics
from heterorl.common.process.files import make_directory, sync_directory, try_lock

_LOG = logging.getLogger(__name__)
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
    if code in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN) and shutil.disk_usage(path.parent).free < NO_ROOM_BYTES:
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
