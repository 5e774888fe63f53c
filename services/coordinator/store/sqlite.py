"""SQLite with one connection: the default store.

Never open a second connection: SQLite before 3.51.3 can corrupt its log when two connections write and checkpoint at
the same time.
"""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

from heterorl.common.errors import CorruptStore, DiskFull, HeterorlError
from heterorl.common.process.files import NO_ROOM, has_no_room, make_directory
from heterorl.coordinator.store import tallies
from heterorl.coordinator.store.database import Fault
from heterorl.coordinator.store.schema import ANOTHER_PROGRAM, SCHEMA, SCHEMA_VERSION

_OPERATION_ERRORS = (sqlite3.IntegrityError, sqlite3.ProgrammingError, sqlite3.DataError, sqlite3.InterfaceError)
"""Errors of one operation; all others are the store's."""
_OF_THE_DISK = (
    sqlite3.SQLITE_READONLY, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH,
)  # fmt: skip
"""Codes of an intact store that its disk, mount or owner keeps from this process."""


class SqliteEngine:
    """A SQLite file, locked for this process."""

    errors: tuple[type[Exception], ...] = (sqlite3.Error,)
    disk = "the coordinator's disk"

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self.connection = connection
        self._path = path

    @classmethod
    def open(cls, path: Path) -> SqliteEngine:
        """Open or create the file and check it; raises as `connect`."""
        return cls(connect(path), path)

    def begin(self) -> None:
        self.connection.execute("BEGIN IMMEDIATE")
        self.connection.execute("SAVEPOINT one")

    def commit(self) -> None:
        self.connection.execute("COMMIT")

    def rollback(self) -> None:
        if self.connection.in_transaction:
            self.connection.execute("ROLLBACK")

    def save(self) -> None:
        self.connection.execute("RELEASE one")
        self.connection.execute("SAVEPOINT one")

    def undo(self) -> None:
        self.connection.execute("ROLLBACK TO one")

    def fault(self, error: Exception) -> Fault:
        if isinstance(error, _OPERATION_ERRORS):
            return Fault.OPERATION
        code = getattr(error, "sqlite_errorcode", None)
        # SQLite tells a full quota from no other failed write.
        is_quota = code == sqlite3.SQLITE_IOERR_WRITE and has_no_room(self._path.parent)
        return Fault.FULL if code == sqlite3.SQLITE_FULL or is_quota else Fault.FATAL

    def close(self) -> None:
        self.connection.close()


def connect(path: Path) -> sqlite3.Connection:
    """Open or make a file in durable mode, checked, of this schema.
    Raises CorruptStore, DiskFull."""
    connection: sqlite3.Connection | None = None
    try:
        make_directory(path.parent, mode=0o700)
        if not path.exists() and path.name != ":memory:":
            # Before SQLite makes it, since its log takes the file's mode: only the owner may read.
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        connection.execute("PRAGMA locking_mode=EXCLUSIVE")
        mode = connection.execute("PRAGMA journal_mode=WAL").fetchone()[0]
        connection.execute("PRAGMA synchronous=FULL")
        # A temporary file in the middle of an operation could find no descriptor.
        connection.execute("PRAGMA temp_store=MEMORY")
        level = connection.execute("PRAGMA synchronous").fetchone()[0]
        if (mode, level) != ("wal", 2):
            action = "put data_dir on a local file system"
            raise CorruptStore(f"{path}: durable mode refused (journal {mode}, synchronous {level})", action=action)
        check_file(connection, path)
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version == 0:
            connection.executescript(f"BEGIN; {SCHEMA} PRAGMA user_version={SCHEMA_VERSION}; COMMIT;")
        elif version != SCHEMA_VERSION:
            raise CorruptStore(
                f"{path} has schema {version}, this program needs {SCHEMA_VERSION}", action=ANOTHER_PROGRAM
            )
        tallies.begin(connection)
    except (OSError, sqlite3.Error, CorruptStore) as error:
        if connection is not None:
            connection.close()
        if isinstance(error, CorruptStore):
            raise
        raise _typed(error, path) from error
    return connection


def _typed(error: OSError | sqlite3.Error, path: Path) -> HeterorlError:
    code = (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF
    # SQLite tells a full quota from no other failed write.
    is_quota = code in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN) and has_no_room(path.parent)
    if is_quota or code == sqlite3.SQLITE_FULL or getattr(error, "errno", None) in NO_ROOM:
        return DiskFull(str(path.parent))
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return CorruptStore(f"{path} is in use", action="stop the other coordinator")
    if isinstance(error, OSError) or code in _OF_THE_DISK:
        action = "check data_dir, its disk, mount and permissions"
        return CorruptStore(f"{path} cannot be opened: {error}", action=action)
    return CorruptStore(f"{path}: {error}")


CHECKED_BYTES = 64 << 20
"""A store up to this size is checked completely at every start, in a fraction of a second."""
HISTORY = frozenset({"groups", "versions", "variant_versions", "steps", "signatures", "canaries", "audit"})


def check_file(connection: sqlite3.Connection, path: Path) -> None:
    """Check a small store completely, a large one without its history.
    Raises CorruptStore: it fails the check."""
    pages, size = (int(connection.execute(f"PRAGMA {name}").fetchone()[0]) for name in ("page_count", "page_size"))
    names = ["1"]
    if pages * size > CHECKED_BYTES:
        # A start must not get slower with the length of the run; `heterorl verify` checks all.
        rows = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
        names = [f"'{name}'" for (name,) in rows if name not in HISTORY and not name.startswith("sqlite_")]
    for name in names:
        if connection.execute(f"PRAGMA quick_check({name})").fetchone()[0] != "ok":
            raise CorruptStore(f"{path} fails SQLite's check")
