"""Reads a data directory offline, without changes, locks or repairs.

A closed store is one file and is read in place. After a kill it has a log that only a writer may fold in, so such a
store is copied to a temporary directory first.
"""

from __future__ import annotations

import fcntl
import shutil
import sqlite3
import struct
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

from heterorl.common.errors import CorruptStore, OperatorError
from heterorl.common.process.files import NO_ROOM
from heterorl.common.types.common import Digest
from heterorl.common.types.policy import PayloadRef
from heterorl.coordinator.store.database import get_meta
from heterorl.coordinator.store.engine_choice import OWNER
from heterorl.coordinator.store.schema import ANOTHER_PROGRAM, SCHEMA_VERSION
from heterorl.coordinator.versions.chain import PAYLOAD_ROW, payload_of

ResultT = TypeVar("ResultT")
STORE_FILE = "coordinator.sqlite"
BACKUPS = "backups"
"""Directory of backups in data_dir."""
_BACKUP = "make a backup (`heterorl backup`) and name it"
_SHARED_LOCK_BYTE = 0x40000002
_SHARED_LOCK_BYTES = 510
"""The bytes of a database file that SQLite locks; see "File Locking" of its file format."""
_FLOCK = "hhqqi"
"""struct flock of Linux: type, whence, start, length, holder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredVersion:
    """A row of the store, not checked yet."""

    version: int
    epoch: int
    manifest: bytes
    manifest_digest: str
    state_root: str
    is_abandoned: bool
    signature: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """All versions of a run in one variant, from an open store.
    A variant other than "" may lack versions."""

    run_id: str
    connection: sqlite3.Connection
    offered: tuple[PayloadRef, ...]
    """Payloads that the store offers; others were deleted."""
    blobs: Path
    variant: str = ""

    def versions(self) -> Iterator[StoredVersion]:
        """Read the rows one at a time, by number.
        A manifest may have a megabyte."""
        rows = self.connection.execute(
            "SELECT m.version, v.epoch, m.manifest, m.manifest_digest, m.state_root, v.is_abandoned,"
            f" coalesce(s.signature, x'') FROM {'variant_versions' if self.variant else 'versions'} m"
            " JOIN versions v ON v.version = m.version"
            " LEFT JOIN signatures s ON s.variant = ?1 AND s.version = m.version"
            f" {'WHERE m.variant = ?1' if self.variant else ''} ORDER BY m.version",
            (self.variant,),
        )
        for row in rows:
            yield StoredVersion(**dict(zip(StoredVersion.__slots__, row, strict=True)))

    def payload(self, digest: Digest) -> Path:
        return self.blobs / digest[:2] / digest


@contextmanager
def read_histories(directory: Path) -> Iterator[tuple[History, ...]]:
    """Open a data directory's histories: the trained weights first, then each variant.
    Raises as `open_store`; OperatorError: the payloads are in a bucket."""
    with open_store(directory) as connection:
        require_files(connection, directory)
        # A coordinator's start skips the history of a large store.
        if connection.execute("PRAGMA quick_check(1)").fetchone()[0] != "ok":
            raise CorruptStore(f"{directory / STORE_FILE} fails SQLite's check")
        rows = connection.execute("SELECT DISTINCT variant FROM variant_versions ORDER BY variant").fetchall()
        yield tuple(_read(connection, directory, variant) for variant in ("", *(str(row[0]) for row in rows)))


def require_files(connection: sqlite3.Connection, directory: Path) -> None:
    """Raises OperatorError: the payloads are in a bucket."""
    if get_meta(connection, OWNER) is not None:
        raise OperatorError(f"the payloads of {directory} are in a bucket", action=_BACKUP)


@contextmanager
def open_store(directory: Path) -> Iterator[sqlite3.Connection]:
    """A read-only connection to the store of a data directory.
    Raises OperatorError: there is no store, it is in use, or its copy finds no room; CorruptStore: it is unreadable, or
    of another schema."""
    path = directory / STORE_FILE
    if not path.is_file() and (directory / "postgres").is_file():
        raise OperatorError(f"the store of {directory} is in PostgreSQL", action=_BACKUP)
    if not path.is_file():
        raise OperatorError(f"{directory} has no {STORE_FILE}", action="name the data_dir of a coordinator")
    if is_in_use(directory):
        raise OperatorError(f"{path} is in use", action=_BACKUP)
    try:
        with _opened(path) as connection:
            version = connection.execute("PRAGMA user_version").fetchone()[0]
            if version != SCHEMA_VERSION:
                problem = f"{path} has schema {version}, this program needs {SCHEMA_VERSION}"
                raise CorruptStore(problem, action=ANOTHER_PROGRAM)
            yield connection
    except sqlite3.Error as error:
        raise CorruptStore(f"{path}: {error}") from error


def is_in_use(directory: Path) -> bool:
    """Whether another process's coordinator runs on a data directory's store."""
    with (directory / STORE_FILE).open("rb") as file:
        asked = struct.pack(_FLOCK, fcntl.F_RDLCK, 0, _SHARED_LOCK_BYTE, _SHARED_LOCK_BYTES, 0)
        answer = fcntl.fcntl(file, fcntl.F_GETLK, asked)
    return bool(struct.unpack(_FLOCK, answer)[0] != fcntl.F_UNLCK)


@contextmanager
def _opened(path: Path) -> Iterator[sqlite3.Connection]:
    log = path.with_name(path.name + "-wal")
    if not log.exists() or log.stat().st_size == 0:
        # `immutable`: SQLite neither locks the file nor looks for a log.
        place = f"file:{quote(str(path.resolve()))}?mode=ro&immutable=1"
        with closing(sqlite3.connect(place, uri=True)) as connection:
            yield connection
        return
    with tempfile.TemporaryDirectory(prefix="heterorl-verify-") as directory:
        try:
            for file in (path, log):
                shutil.copyfile(file, Path(directory) / file.name)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            num_bytes = path.stat().st_size + log.stat().st_size
            problem = f"{Path(directory).parent} has no room for a copy of {path}, {num_bytes} bytes with its log"
            raise OperatorError(problem, action="set TMPDIR to a directory that has it") from error
        with closing(sqlite3.connect(Path(directory) / path.name)) as connection:
            yield connection


def _read(connection: sqlite3.Connection, directory: Path, variant: str) -> History:
    run_id = get_meta(connection, "run_id") or ""
    payloads = connection.execute(f"SELECT {PAYLOAD_ROW} FROM payloads WHERE variant = ?", (variant,))
    offered = tuple(payload_of(row) for row in payloads)
    return History(run_id=run_id, connection=connection, offered=offered, blobs=directory / "blobs", variant=variant)
