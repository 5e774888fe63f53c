"""The database: one connection, one thread, group commit.

An operation answers after its bytes are on disk.

Operations run one after another, each completely or not at all; those that wait together share one fsync. On a full
disk they run again one by one, so that those that need no room succeed; the others fail with StoreFull. Any other I/O
error is fatal, because a failed fsync cannot be repeated; so is a lost database server.

An operator's order is stored with its answer in its own transaction, so a repeat has no second effect.

Operations write SQLite's SQL with `?` for values. IN_POSTGRES translates statements where the dialects differ.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from typing import Any, Protocol, Self, TypeVar

from heterorl.common.errors import CorruptStore, Draining, InvalidRequest, StoreFull, StoreLost
from heterorl.common.process import metrics


class Cursor(Protocol):
    """The answer to a statement, as in PEP 249; rows are tuples."""

    @property
    def rowcount(self) -> int: ...

    def fetchone(self) -> Any: ...

    def fetchall(self) -> list[Any]: ...

    def close(self) -> None: ...

    def __iter__(self) -> Iterator[Any]: ...


class Connection(Protocol):
    """The store as an operation sees it, inside its transaction."""

    def execute(self, statement: str, parameters: Sequence[Any] = ..., /) -> Cursor: ...

    def executemany(self, statement: str, rows: Iterable[Sequence[Any]], /) -> Cursor: ...


class Fault(Enum):
    """The meaning of an engine's error."""

    OPERATION = "operation"
    """The operation is wrong: it is undone, and the store goes on."""
    FULL = "full"
    LOST = "lost"
    """The database is gone: the process ends, and its next start finds all that was acknowledged."""
    FATAL = "fatal"
    """The outcome of earlier operations is unknown: the process ends."""


class DatabaseEngine(Protocol):
    """One connection that writes. Belongs to the store's thread."""

    errors: tuple[type[Exception], ...]
    disk: str
    """The disk that Fault.FULL is about."""

    @property
    def connection(self) -> Connection:
        """The connection for operations."""

    def begin(self) -> None:
        """Begin a transaction in which only this process may write."""

    def commit(self) -> None:
        """Make the transaction durable."""

    def rollback(self) -> None:
        """Undo the transaction, if there is one."""

    def save(self) -> None:
        """End the operation before inside the transaction, and begin another."""

    def undo(self) -> None:
        """Undo the operation only."""

    def fault(self, error: Exception) -> Fault:
        """Classify one of `errors`."""

    def close(self) -> None:
        """Close the connection."""


NUMBERS = "(SELECT CAST(value AS BIGINT) FROM json_each(?))"
"""The numbers of a list in JSON."""
NAMES = "(SELECT CAST(value AS TEXT) FROM json_each(?))"
"""The texts of a list in JSON."""
PAIRS = "(SELECT json_extract(value, '$[0]') AS one, json_extract(value, '$[1]') AS other FROM json_each(?))"
"""The pairs of texts of a list in JSON, as a table."""
PAIRS_IN_POSTGRES = "(SELECT value ->> 0 AS one, value ->> 1 AS other FROM jsonb_array_elements(CAST(? AS jsonb)))"
SET_META = "INSERT INTO meta VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value"
IN_POSTGRES = {
    SET_META: (
        # The column holds texts, and two settings that are bytes.
        "INSERT INTO meta VALUES (?, convert_to(CAST(? AS TEXT), 'UTF8'))"
        " ON CONFLICT (key) DO UPDATE SET value = excluded.value"
    )
}


_LOG = logging.getLogger(__name__)
ResultT = TypeVar("ResultT")
Operation = Callable[[Connection], Any]

MAX_BATCH = 256
ENDED = (CorruptStore, StoreLost, Draining)
"""Final errors: the store failed, its database has gone, or it is closed."""

_Entry = tuple[Operation, asyncio.Future[Any], bool]
"""An operation, its answer, and whether it runs outside transactions."""


class _Failed(Exception):
    """The store failed before this batch."""


_ENDED_EARLIER = "it ended earlier; the process must be restarted"


class Database:
    """Runs operations on the store's thread."""

    def __init__(self, engine: DatabaseEngine, loop: asyncio.AbstractEventLoop, *, on_full: Callable[[], None]) -> None:
        self._engine = engine
        self._loop = loop
        self._operations: queue.SimpleQueue[_Entry | None] = queue.SimpleQueue()
        self.on_fatal: asyncio.Future[None] = loop.create_future()
        self._on_full = on_full
        self._end: type[CorruptStore | StoreLost] | None = None
        self._is_closed = False
        self._busy_since: float | None = None
        self._thread = threading.Thread(target=self._work, name="database", daemon=True)
        self._start()

    def _start(self) -> None:
        self._thread.start()

    @classmethod
    async def over(cls, opened: Callable[[], DatabaseEngine], *, on_full: Callable[[], None]) -> Self:
        """Open a store and check it.
        `on_full` is called on the event loop when the disk is full. Raises CorruptStore: it fails its check or has
        another schema; StoreLost: the database is down; DiskFull."""
        return cls(await asyncio.to_thread(opened), asyncio.get_running_loop(), on_full=on_full)

    async def run(self, operation: Callable[[Connection], ResultT]) -> ResultT:
        """Run one operation in a transaction; returns after the commit.
        Raises StoreFull: undone, the disk is full; CorruptStore, StoreLost: the process must end; Draining: closed."""
        return await self.submit(operation)

    def submit(self, operation: Callable[[Connection], ResultT], *, is_alone: bool = False) -> asyncio.Future[ResultT]:
        """Queue one operation; it runs even if its caller is cancelled."""
        if self._end is not None:
            raise self._end(_ENDED_EARLIER)
        if self._is_closed:
            raise Draining("the coordinator is stopping", retry_after_s=1.0)
        future: asyncio.Future[ResultT] = self._loop.create_future()
        self._operations.put((operation, future, is_alone))
        return future

    async def run_alone(self, operation: Callable[[Connection], ResultT]) -> ResultT:
        """Run one read-only operation between two transactions.
        Raises CorruptStore, StoreLost, Draining: as `run`."""
        return await self.submit(operation, is_alone=True)

    def fail(self, problem: str, end: type[CorruptStore | StoreLost] = CorruptStore) -> None:
        """End the store: the outcome of earlier operations is unknown.
        Callable from any thread."""
        self._end = self._end or end
        _LOG.critical("the store %s, the coordinator ends: %s", "has gone" if end is StoreLost else "failed", problem)
        self._tell(self.on_fatal, None, None)

    def silent_s(self) -> float:
        """Seconds that the current batch has run.
        A copy of the whole store does not count."""
        since = self._busy_since
        return 0.0 if since is None else time.perf_counter() - since

    async def close(self) -> None:
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
            for is_alone, entries in itertools.groupby(batch, key=lambda entry: entry[2]):
                for part in ([entry] for entry in entries) if is_alone else [list(entries)]:
                    self._busy_since = None if is_alone else time.perf_counter()
                    self._commit(part)
                    self._busy_since = None
        self._engine.close()

    def _commit(self, batch: list[_Entry]) -> None:
        results: list[tuple[Any, BaseException | None]] = []
        engine = self._engine
        # Real time, not the run's clock: this measures the disk.
        started = time.perf_counter()
        try:
            if self._end is not None:
                raise _Failed(_ENDED_EARLIER)
            operation, future, is_alone = batch[0]
            if is_alone:
                self._tell(future, *_run_alone(engine.connection, operation))
                return
            engine.begin()
            for operation, *_ in batch:
                results.append(_run_one(engine, operation))
            engine.commit()
            metrics.COMMIT_SECONDS.observe(time.perf_counter() - started)
            metrics.COMMIT_OPERATIONS.inc(len(batch))
        except Exception as error:
            if not isinstance(error, (_Failed, *engine.errors)):
                raise
            fault, problem = self._undo(error)
            if fault is Fault.FULL and len(batch) > 1:
                for entry in batch:
                    self._commit([entry])
                return
            if fault is Fault.FULL:
                self._call(self._on_full)
            # One for each caller, since raising adds a traceback.
            results = [(None, self._failure(problem, fault)) for _ in batch]
        for (_, future, _), (result, exception) in zip(batch, results, strict=True):
            self._tell(future, result, exception)

    def _undo(self, error: Exception) -> tuple[Fault, str]:
        """Undo the transaction; returns the fault and its text.
        Unless the disk is full, the store has ended."""
        fault = Fault.FATAL if isinstance(error, _Failed) else self._engine.fault(error)
        try:
            self._engine.rollback()
        except self._engine.errors as second:
            # A lost database need not roll back.
            if fault is not Fault.LOST:
                error, fault = second, self._engine.fault(second)
                fault = fault if fault is Fault.LOST else Fault.FATAL
        if fault is not Fault.FULL and self._end is None:
            self.fail(str(error), StoreLost if fault is Fault.LOST else CorruptStore)
        return fault, str(error)

    def _failure(self, problem: str, fault: Fault) -> Exception:
        if fault is Fault.FULL:
            return StoreFull(f"{self._engine.disk} is full", retry_after_s=5.0)
        assert self._end is not None, "any other fault has ended the store"
        return self._end(f"the store {'has gone' if self._end is StoreLost else 'failed'}: {problem}")

    def _tell(self, future: asyncio.Future[Any], result: Any, exception: BaseException | None) -> None:
        self._call(_resolve, future, result, exception)

    def _call(self, function: Callable[..., None], *arguments: Any) -> None:
        # A closed loop has no waiters, but the store must still be closed.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *arguments)


def _run_alone(connection: Connection, operation: Operation) -> tuple[Any, BaseException | None]:
    try:
        return operation(connection), None
    except Exception as error:  # noqa: BLE001 - handed to the caller of run_alone()
        return None, error


def _run_one(engine: DatabaseEngine, operation: Operation) -> tuple[Any, BaseException | None]:
    engine.save()
    try:
        result = operation(engine.connection)
    except Exception as error:  # handed to the caller of run()
        if isinstance(error, engine.errors) and engine.fault(error) is not Fault.OPERATION:
            raise
        engine.undo()
        return None, error
    return result, None


def _resolve(future: asyncio.Future[Any], result: Any, exception: BaseException | None) -> None:
    if future.done():
        return
    if exception is not None:
        future.set_exception(exception)
    else:
        future.set_result(result)


def get_meta(connection: Connection, key: str) -> str | None:
    """Read one durable setting."""
    row = connection.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
    if row is None:
        return None
    return row[0].decode() if isinstance(row[0], bytes) else str(row[0])


def set_meta(connection: Connection, key: str, value: str) -> None:
    """Write one durable setting."""
    connection.execute(SET_META, (key, value))


MAX_KEPT = 64
MAX_REQUEST_ID = 64


def answer_to_order(connection: Connection, kind: str, request_id: str) -> str | None:
    """Stored answer to an order; None for a new or empty id."""
    known: dict[str, str] = dict(json.loads(get_meta(connection, f"answered/{kind}") or "[]"))
    return known.get(request_id) if request_id else None


def remember_order(connection: Connection, kind: str, request_id: str, answer: str) -> None:
    """Store the answer to an order.
    Raises InvalidRequest: the id is too long."""
    if len(request_id) > MAX_REQUEST_ID:
        raise InvalidRequest(f"request_id: {len(request_id)} characters, allowed are {MAX_REQUEST_ID}")
    if request_id:
        key = f"answered/{kind}"
        kept = [*json.loads(get_meta(connection, key) or "[]"), (request_id, answer)][-MAX_KEPT:]
        set_meta(connection, key, json.dumps(kept))
