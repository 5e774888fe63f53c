"""SQLite with one connection, one thread and group commit: an operation answers only after its bytes are on disk.

Guarantees: operations run one after another, each wholly or not at all; those that wait together share one fsync;
a full disk fails them with StoreFull and leaves the store as it was; any other I/O error is fatal at once, because
an fsync that failed cannot be repeated. Operations that met a full disk together run again one by one, so that what
needs no room is done. Never opens a second connection: SQLite before 3.51.3 can corrupt its log when two connections
write and checkpoint at the same time.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import logging
import os
import queue
import sqlite3
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

from heterorl.common.errors import CorruptStore, DiskFull, Draining, StoreFull
from heterorl.common.process import metrics
from heterorl.common.process.files import make_directory
from heterorl.coordinator.store import tallies
from heterorl.coordinator.store.schema import EARLIER, EVALUATIONS, INDEXES, PROMPTS, SCHEMA, SCHEMA_VERSION
from heterorl.coordinator.store.soundness import check_file

_LOG = logging.getLogger(__name__)
ResultT = TypeVar("ResultT")
Operation = Callable[[sqlite3.Connection], Any]

MAX_BATCH = 256
_OPERATION_ERRORS = (sqlite3.IntegrityError, sqlite3.ProgrammingError, sqlite3.DataError, sqlite3.InterfaceError)
"""Errors of one operation; every other error of SQLite is the store's."""


@dataclass(frozen=True, slots=True)
class _Alone:
    """An operation that belongs to no transaction."""

    operation: Operation

    def __call__(self, connection: sqlite3.Connection) -> Any:
        return self.operation(connection)


def _ignore() -> None:
    pass


class Database:
    """Runs operations on the store's thread."""

    def __init__(
        self, connection: sqlite3.Connection, loop: asyncio.AbstractEventLoop, *, on_full: Callable[[], None]
    ) -> None:
        self._connection = connection
        self._loop = loop
        self._operations: queue.SimpleQueue[tuple[Operation, asyncio.Future[Any]] | None] = queue.SimpleQueue()
        self.on_fatal: asyncio.Future[None] = loop.create_future()
        self._on_full = on_full
        self._is_failed = False
        self._is_closed = False
        self._thread = threading.Thread(target=self._work, name="database", daemon=True)
        self._start()

    def _start(self) -> None:
        self._thread.start()

    @classmethod
    async def open(cls, path: Path, *, on_full: Callable[[], None] = _ignore) -> Self:
        """Open or create the store and check it; `on_full` is called on the event loop when the disk refuses.

        Raises:
            CorruptStore: the file fails SQLite's check, or was written by another schema.
            DiskFull: the store cannot be opened for want of space.
        """
        return cls(await asyncio.to_thread(_connect, path), asyncio.get_running_loop(), on_full=on_full)

    async def run(self, operation: Callable[[sqlite3.Connection], ResultT]) -> ResultT:
        """Run one operation in a transaction; returns after the commit.

        Raises:
            StoreFull: the disk is full; nothing of the operation remains.
            CorruptStore: the store failed earlier or now; the process must end.
            Draining: the store is closed.
        """
        return await self.submit(operation)

    def submit(self, operation: Callable[[sqlite3.Connection], ResultT]) -> asyncio.Future[ResultT]:
        """Queue one operation, which runs whether or not anybody still waits for the future."""
        if self._is_failed:
            raise CorruptStore("the store failed; the process must be restarted")
        if self._is_closed:
            raise Draining("the coordinator is stopping", retry_after_s=1.0)
        future: asyncio.Future[ResultT] = self._loop.create_future()
        self._operations.put((operation, future))
        return future

    async def run_alone(self, operation: Callable[[sqlite3.Connection], ResultT]) -> ResultT:
        """Run one operation between two transactions, for what SQLite does in none; it must change nothing.

        Raises:
            CorruptStore, Draining: as `run`.
        """
        return await self.submit(_Alone(operation))

    def fail(self, problem: str) -> None:
        """Run no operation any more: what the disk did with earlier ones is unknown. Callable from any thread."""
        self._is_failed = True
        _LOG.critical("the store failed: %s", problem)
        self._tell(self.on_fatal, None, None)

    async def close(self) -> None:
        """Finish what is queued, fold the log into the file, close."""
        if not self._is_closed:
            self._is_closed = True
            self._operations.put(None)
        await asyncio.to_thread(self._thread.join)

    def _work(self) -> None:
        is_open = True
        while is_open:
            first = self._operations.get()
            batch = [] if first is None else [first]
            is_open = first is not None
            while is_open and len(batch) < MAX_BATCH and not self._operations.empty():
                entry = self._operations.get()
                if entry is None:
                    is_open = False
                else:
                    batch.append(entry)
            for is_alone, entries in itertools.groupby(batch, key=lambda entry: isinstance(entry[0], _Alone)):
                for part in ([entry] for entry in entries) if is_alone else [list(entries)]:
                    self._commit(part)
        self._connection.close()

    def _commit(self, batch: list[tuple[Operation, asyncio.Future[Any]]]) -> None:
        results: list[tuple[Any, BaseException | None]] = []
        connection = self._connection
        # Real time, whatever clock the run has: it is the disk that is measured.
        started = time.perf_counter()
        try:
            if self._is_failed:
                raise sqlite3.OperationalError("it failed earlier")
            if isinstance(batch[0][0], _Alone):
                self._tell(batch[0][1], *_run_alone(connection, batch[0][0]))
                return
            connection.execute("BEGIN IMMEDIATE")
            for operation, _ in batch:
                results.append(_run_one(connection, operation))
            connection.execute("COMMIT")
            metrics.COMMIT_SECONDS.observe(time.perf_counter() - started)
            metrics.COMMIT_OPERATIONS.inc(len(batch))
        except sqlite3.Error as error:
            is_full, problem = self._undo(error)
            if is_full and len(batch) > 1:
                for entry in batch:
                    self._commit([entry])
                return
            if is_full:
                self._call(self._on_full)
            # One for each caller: whoever raises it adds its own traceback.
            results = [(None, _failure(problem, is_full=is_full)) for _ in batch]
        for (_, future), (result, exception) in zip(batch, results, strict=True):
            self._tell(future, result, exception)

    def _undo(self, error: sqlite3.Error) -> tuple[bool, str]:
        """Undo the transaction; returns whether the disk is full, else the store has failed, and why."""
        is_full = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
        try:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
        except sqlite3.Error as second:
            error, is_full = second, False
        if not is_full:
            self.fail(str(error))
        return is_full, str(error)

    def _tell(self, future: asyncio.Future[Any], result: Any, exception: BaseException | None) -> None:
        self._call(_resolve, future, result, exception)

    def _call(self, function: Callable[..., None], *arguments: Any) -> None:
        # A loop that closed meanwhile has nobody left who waits; the store must still be folded and closed.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *arguments)


def _failure(problem: str, *, is_full: bool) -> Exception:
    if is_full:
        return StoreFull("the coordinator's disk is full", retry_after_s=5.0)
    return CorruptStore(f"the store failed: {problem}")


def _run_alone(connection: sqlite3.Connection, operation: Operation) -> tuple[Any, BaseException | None]:
    try:
        return operation(connection), None
    except Exception as error:  # noqa: BLE001 - handed to the caller of run_alone()
        return None, error


def _run_one(connection: sqlite3.Connection, operation: Operation) -> tuple[Any, BaseException | None]:
    connection.execute("SAVEPOINT one")
    try:
        result = operation(connection)
    except Exception as error:  # handed to the caller of run(), whose operation raised it
        if isinstance(error, sqlite3.Error) and not isinstance(error, _OPERATION_ERRORS):
            raise
        connection.execute("ROLLBACK TO one")
        connection.execute("RELEASE one")
        return None, error
    connection.execute("RELEASE one")
    return result, None


def _resolve(future: asyncio.Future[Any], result: Any, exception: BaseException | None) -> None:
    if future.done():
        return
    if exception is not None:
        future.set_exception(exception)
    else:
        future.set_result(result)


def _connect(path: Path) -> sqlite3.Connection:
    try:
        make_directory(path.parent, mode=0o700)
        if not path.exists() and path.name != ":memory:":
            # Before SQLite makes it: its log takes the file's mode. Groups and audit are nobody else's to read.
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    except (OSError, sqlite3.Error) as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull(str(path.parent)) from error
        raise CorruptStore(f"{path} cannot be opened: {error}", action="check data_dir and its permissions") from error
    try:
        connection.execute("PRAGMA locking_mode=EXCLUSIVE")
        mode = connection.execute("PRAGMA journal_mode=WAL").fetchone()[0]
        connection.execute("PRAGMA synchronous=FULL")
        # Else a large operation opens a file in the middle, which fails when the process is out of descriptors.
        connection.execute("PRAGMA temp_store=MEMORY")
        level = connection.execute("PRAGMA synchronous").fetchone()[0]
        if (mode, level) != ("wal", 2):
            raise CorruptStore(f"{path}: durable mode refused (journal {mode}, synchronous {level})")
        check_file(connection, path)
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version == 0:
            connection.executescript(f"BEGIN; {SCHEMA} PRAGMA user_version={SCHEMA_VERSION}; COMMIT;")
        elif version in EARLIER:
            _LOG.info("%s is brought from schema %d to %d", path, version, SCHEMA_VERSION)
            connection.executescript(f"BEGIN; {EARLIER[version]} PRAGMA user_version={SCHEMA_VERSION}; COMMIT;")
        elif version != SCHEMA_VERSION:
            raise CorruptStore(f"{path} has schema {version}, this program needs {SCHEMA_VERSION}")
        connection.executescript(EVALUATIONS + PROMPTS)
        _make_indexes(connection)
        tallies.begin(connection)
    except sqlite3.OperationalError as error:
        connection.close()
        if error.sqlite_errorcode in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            raise CorruptStore(f"{path} is in use", action="stop the other coordinator") from error
        if error.sqlite_errorcode == sqlite3.SQLITE_FULL:
            raise DiskFull(str(path.parent)) from error
        raise CorruptStore(f"{path}: {error}") from error
    except sqlite3.DatabaseError as error:
        connection.close()
        raise CorruptStore(f"{path}: {error}") from error
    except CorruptStore:
        connection.close()
        raise
    return connection


def _make_indexes(connection: sqlite3.Connection) -> None:
    try:
        connection.executescript(INDEXES)
    except sqlite3.OperationalError as error:
        # They can wait for room; what they are for is slower until then.
        if error.sqlite_errorcode != sqlite3.SQLITE_FULL:
            raise
        _LOG.warning("the disk is full: indexes are made at the next start")


def get_meta(connection: sqlite3.Connection, key: str) -> str | None:
    """Read one durable setting."""
    row = connection.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
    return None if row is None else str(row[0])


def set_meta(connection: sqlite3.Connection, key: str, value: str) -> None:
    """Write one durable setting."""
    connection.execute(
        "INSERT INTO meta VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value", (key, value)
    )
