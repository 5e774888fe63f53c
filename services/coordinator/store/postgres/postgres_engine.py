"""The PostgreSQL engine: one session that holds the store's lock and writes.

A session takes the store's advisory lock before it writes, and then a new epoch. Each transaction reads and locks that
epoch, so only one epoch commits at any time, even if the lock was lost. A lost connection ends the process: its last
transaction is unknown, and another coordinator may have the lock. A pooler that shares sessions would keep the lock.

A failed connect has no error code, only the server's text. A text that does not prove a refusal counts as transient.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import psycopg
from psycopg import errors
from psycopg.abc import Buffer
from psycopg.adapt import Dumper
from psycopg.types.numeric import NumericBinaryLoader

from heterorl.common.errors import CorruptStore, DiskFull, HeterorlError, OperatorError, StoreHeld, StoreLost
from heterorl.coordinator.store.database import IN_POSTGRES, PAIRS, PAIRS_IN_POSTGRES, Cursor, Fault
from heterorl.coordinator.store.postgres import postgres_tables
from heterorl.coordinator.store.postgres.postgres_tables import WHOLE, WRITER
from heterorl.coordinator.store.schema import ANOTHER_PROGRAM, SCHEMA_VERSION

_OPERATION_ERRORS = (errors.IntegrityError, errors.ProgrammingError, errors.DataError, errors.NotSupportedError)
_DAMAGE = (
    errors.InternalError_, errors.DataCorrupted, errors.IndexCorrupted, errors.IoError, errors.UndefinedFile,
    errors.DuplicateFile,
)  # fmt: skip
"""XX000 to XX002, and class 58 about the database's own files. Not psycopg's InternalError, which includes class 25: a
server that is read-only while its disk is full keeps its data."""
_REFUSALS = (
    " does not exist", "authentication failed", "no password supplied", "pg_hba.conf", "permission denied",
    "not permitted to log in", "certificate", "does not support ssl", "invalid integer value", " value: ",
)  # fmt: skip
"""Parts of permanent refusals of a server or libpq."""


def error_of_connecting(error: psycopg.Error) -> HeterorlError:
    """Error of a failed connect, without the url, which libpq may repeat."""
    if isinstance(error, psycopg.ProgrammingError):
        return OperatorError("store.url cannot be read by libpq", action="compare it with `[store]` in operate.md")
    words = brief(error)
    if any(part in words.lower() for part in _REFUSALS):
        action = "check store.url, the server and the password (PGPASSFILE, mode 0600, or PGPASSWORD)"
        return OperatorError(f"PostgreSQL refuses the session: {words}", action=action)
    return StoreLost(f"PostgreSQL cannot be reached: {words}")


def error_of_opening(error: psycopg.Error, *, is_broken: bool) -> HeterorlError:
    """The error of a session that could not take the store."""
    if isinstance(error, errors.DiskFull):
        return DiskFull("PostgreSQL's data directory")
    if isinstance(error, errors.LockNotAvailable):
        action = "end that session (pg_locks names it), or wait: heterorl tries again"
        return StoreLost("another session keeps the store's tables locked", action=action)
    if not is_broken and isinstance(error, _OPERATION_ERRORS):
        action = "the user of store.url must own the database or schema, and no foreign tables may be in it"
        return OperatorError(f"PostgreSQL refuses the store's tables: {brief(error)}", action=action)
    if not is_broken and isinstance(error, _DAMAGE):
        return CorruptStore(f"the store in PostgreSQL cannot be opened: {brief(error)}")
    return StoreLost(f"PostgreSQL gave the store up: {brief(error)}")


def fault_of_statement(error: Exception, *, is_broken: bool) -> Fault:
    """Classify an error of a coordinator that has the store."""
    if is_broken:
        return Fault.LOST
    if isinstance(error, errors.DiskFull):
        return Fault.FULL
    if isinstance(error, _OPERATION_ERRORS):
        return Fault.OPERATION
    return Fault.FATAL if isinstance(error, _DAMAGE) else Fault.LOST


def brief(error: psycopg.Error) -> str:
    """The error's text in one line."""
    return " ".join(str(error).split())[:300]


_LOG = logging.getLogger(__name__)
MIN_SERVER = 150000
CONNECT_S = 5
HELD_S = 5.0
"""Seconds that a start waits for the lock. The server notices a dead session within CHECK_MS."""
CHECK_MS = 2000
LOCK_S = 3
"""Seconds that a start waits for a table lock before it retries; only a migration needs one that readers hold."""
_DEAD_S = 5
_LINK: dict[str, Any] = {
    "autocommit": True,
    "connect_timeout": CONNECT_S,
    "client_encoding": "utf8",
    "application_name": "heterorl coordinator",
    "target_session_attrs": "read-write",
    # A lost server is noticed in seconds, also by a waiting session.
    "keepalives_idle": 2,
    "keepalives_interval": 1,
    "keepalives_count": 3,
    "tcp_user_timeout": _DEAD_S * 1000,
}
_SESSION = f"""
SET tcp_keepalives_idle = 2; SET tcp_keepalives_interval = 1; SET tcp_keepalives_count = 3;
SET tcp_user_timeout = {_DEAD_S * 1000};
SELECT set_config(name, '0', false) FROM pg_settings WHERE name IN ('statement_timeout', 'lock_timeout',
    'idle_in_transaction_session_timeout', 'idle_session_timeout', 'transaction_timeout');
SET default_transaction_isolation = 'read committed';
SET standard_conforming_strings = on; SET timezone = 'UTC'; SET jit = off;
"""
"""The server notices a lost host in seconds, and frees the lock; no other limit ends the session.
PostgreSQL has `transaction_timeout` from version 17 on."""
_CHECK = f"SET client_connection_check_interval = {CHECK_MS}"
"""A running statement also notices a lost process, except a COMMIT that waits for a synchronous replica."""
_KEY = "hashtextextended('heterorl ' || current_schema(), 0)"
_HOLDER = f"""
SELECT pid, CASE WHEN client_port = -1 THEN 'its own host' ELSE host(client_addr) END,
    CASE WHEN wait_event_type <> 'Client' THEN wait_event END
FROM pg_locks LEFT JOIN pg_stat_activity USING (pid)
WHERE locktype = 'advisory' AND objsubid = 1 AND granted
    AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
    AND classid::bigint << 32 | objid::bigint = {_KEY}
"""
"""pg_locks shows an advisory lock by the two halves of its key. A session at the server's socket has port -1."""


class _Fenced(psycopg.OperationalError):
    """Another coordinator has written since."""


PREPARED_STATEMENTS = 512
"""More than there are texts that operations repeat."""
_TALLY = re.compile(r"\btemp\.")
_LIST = re.compile(r"\bjson_each\(\?\)")
_INT8 = psycopg.adapters.types["int8"].oid


class PostgresConnection:
    """The connection for operations."""

    def __init__(self, raw: psycopg.Connection[Any]) -> None:
        self._raw = raw
        self.has_written = False
        """Whether any statement since it was set to False may have changed something."""
        raw.prepared_max = PREPARED_STATEMENTS
        raw.adapters.register_dumper(int, _BigintDumper)
        raw.adapters.register_dumper(bool, _TruthDumper)
        raw.adapters.register_loader("numeric", _SumLoader)

    def execute(self, statement: str, parameters: Sequence[Any] = (), /) -> Cursor:
        cursor = psycopg.RawCursor(self._raw)
        text = translated(statement)
        # No statement of ours changes rows by a function; a WITH counts as a change.
        self.has_written = self.has_written or not text.startswith("SELECT ")
        cursor.execute(text.encode(), parameters, binary=True)
        return cursor

    def executemany(self, statement: str, rows: Iterable[Sequence[Any]], /) -> Cursor:
        """Run one statement for each row of values, in one round trip."""
        cursor = psycopg.RawCursor(self._raw)
        self.has_written = True
        cursor.executemany(translated(statement).encode(), rows)
        return cursor


@functools.lru_cache(maxsize=4096)
def translated(statement: str) -> str:
    """An operation's statement in PostgreSQL's dialect.
    Our statements use question marks only for values."""
    text = IN_POSTGRES.get(statement, statement)
    # The temporary tables of `tallies` are ordinary tables there.
    text = _TALLY.sub("", text)
    text = text.replace(PAIRS, PAIRS_IN_POSTGRES)
    text = _LIST.sub("jsonb_array_elements_text(CAST(? AS jsonb)) AS each (value)", text)
    first, *rest = text.split("?")
    return first + "".join(f"${number}{part}" for number, part in enumerate(rest, 1))


class _BigintDumper(Dumper):
    oid = _INT8

    def dump(self, obj: int) -> Buffer | None:
        if not -(2**63) <= obj < 2**63:
            raise OverflowError("an integer of more than 64 bits")
        return b"%d" % obj


class _TruthDumper(Dumper):
    # Untyped: the context decides whether it is a number or a truth.
    def dump(self, obj: bool) -> Buffer | None:
        return b"1" if obj else b"0"


class _SumLoader(NumericBinaryLoader):
    def load(self, data: Buffer) -> Any:
        return int(super().load(data))


class PostgresEngine:
    """A session that holds the store's lock."""

    errors: tuple[type[Exception], ...] = (psycopg.Error,)
    disk = "PostgreSQL's disk"

    def __init__(self, raw: psycopg.Connection[Any]) -> None:
        """Take over the session with the lock: make tables, begin an epoch.
        Raises CorruptStore: another schema; StoreLost: the session ended, or a table is locked; OperatorError."""
        self._raw = raw
        self.connection = PostgresConnection(raw)
        with _opening(raw):
            self.store_id, self.epoch = _begin_epoch(raw)

    def begin(self) -> None:
        """Begin a transaction, during which no other session begins an epoch."""
        cursor = self._raw.execute("BEGIN; SELECT epoch FROM store FOR SHARE; SAVEPOINT one")
        self.connection.has_written = False
        cursor.nextset()
        row = cursor.fetchone()
        if row is None or row[0] != self.epoch:
            raise _Fenced("another coordinator has taken the store")

    def commit(self) -> None:
        self._raw.execute("COMMIT")

    def rollback(self) -> None:
        if self._raw.info.transaction_status is not psycopg.pq.TransactionStatus.IDLE:
            self._raw.execute("ROLLBACK")

    def save(self) -> None:
        """Begin an operation.
        The savepoint of a read-only one stays, which spares a round trip."""
        if self.connection.has_written:
            self._raw.execute("RELEASE one; SAVEPOINT one")
            self.connection.has_written = False

    def undo(self) -> None:
        self._raw.execute("ROLLBACK TO one")
        self.connection.has_written = False

    def fault(self, error: Exception) -> Fault:
        return fault_of_statement(error, is_broken=self._raw.broken)

    def close(self) -> None:
        self._raw.close()


def connect(url: str) -> psycopg.Connection[Any]:
    """Begin a session.
    It has no foreign time limits, and notices a dead peer in seconds. Raises StoreLost: the server is unreachable or
    full; OperatorError: it refuses, or is unsuitable."""
    try:
        raw = psycopg.connect(url, **_LINK)
    except psycopg.Error as error:
        # Without its cause: libpq's text may repeat the url.
        raise error_of_connecting(error) from None
    with _opening(raw):
        raw.execute(_SESSION)
        _check_server(raw)
        # Some systems support only 0.
        with contextlib.suppress(psycopg.DataError):
            raw.execute(_CHECK)
    return raw


@contextlib.contextmanager
def _opening(raw: psycopg.Connection[Any]) -> Iterator[None]:
    try:
        yield
    except psycopg.Error as error:
        is_broken = raw.broken
        raw.close()
        raise error_of_opening(error, is_broken=is_broken) from error
    except HeterorlError:
        raw.close()
        raise


def try_lock(raw: psycopg.Connection[Any]) -> bool:
    """Try to take the store's lock for the session's life."""
    row = raw.execute(f"SELECT pg_try_advisory_lock({_KEY})").fetchone()
    return bool(row and row[0])


def lock_soon(raw: psycopg.Connection[Any]) -> bool:
    """Take the store's lock within HELD_S; returns whether it succeeded."""
    deadline = time.monotonic() + HELD_S
    while not try_lock(raw):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)  # noqa: TID251 - on a thread; the server has nothing to wait on
    return True


def open_store(url: str) -> PostgresEngine:
    """Take the store at once.
    Raises StoreLost: the server is unreachable; OperatorError: it refuses; StoreHeld: another session has the store for
    HELD_S; CorruptStore: another schema."""
    return take(connect(url))


def take(raw: psycopg.Connection[Any]) -> PostgresEngine:
    """Take the store by a new session, closed on failure.
    Raises as `open_store`."""
    with _opening(raw):
        if not lock_soon(raw):
            raise StoreHeld(f"another coordinator has the store: {_holder(raw)}")
    return PostgresEngine(raw)


def _holder(raw: psycopg.Connection[Any]) -> str:
    """Describe the lock's holder, and how to end its session."""
    row = raw.execute(_HOLDER).fetchone()
    if row is None:
        # It has ended, or this user may not read pg_locks.
        return "its session cannot be seen"
    pid, address, waits_for = row
    return (
        f"session {pid} of PostgreSQL, from {address or 'a host that this user may not see'}"
        f"{f', waits for {waits_for}' if waits_for else ''};"
        f" if no process is at its other end, end it by SELECT pg_terminate_backend({pid})"
    )


def _check_server(raw: psycopg.Connection[Any]) -> None:
    info = raw.info
    if info.server_version < MIN_SERVER:
        raise OperatorError(f"PostgreSQL {info.server_version // 10000} is too old", action="use version 15 or newer")
    row = raw.execute(
        "SELECT pg_backend_pid(), current_setting('server_encoding'), current_setting('fsync'),"
        " current_setting('synchronous_commit'), current_schema()"
    ).fetchone()
    assert row is not None
    pid, encoding, fsync, synchronous, schema = row
    if pid != info.backend_pid:
        raise OperatorError("store.url leads to a pooler of sessions", action="name the server itself")
    if encoding != "UTF8" or fsync != "on" or schema is None:
        action = "it must have UTF8, fsync on and a schema in its search_path"
        raise OperatorError(f"the database has encoding {encoding}, fsync {fsync} and schema {schema}", action=action)
    if synchronous in ("off", "local"):
        raw.execute("SET synchronous_commit = on")


def _begin_epoch(raw: psycopg.Connection[Any]) -> tuple[str, int]:
    with raw.transaction():
        raw.execute(f"SET LOCAL client_min_messages = warning; SET LOCAL lock_timeout = '{LOCK_S}s'")
        raw.execute(WRITER)
        row = raw.execute("SELECT schema_version FROM store FOR UPDATE").fetchone()
        version = 0 if row is None else int(row[0])
        if version not in (0, SCHEMA_VERSION):
            raise CorruptStore(
                f"the store has schema {version}, this program needs {SCHEMA_VERSION}", action=ANOTHER_PROGRAM
            )
        raw.execute(((WHOLE if version == 0 else "") + postgres_tables.COUNT_ANEW).encode())
        if row is None:
            name_store(raw)
        row = raw.execute(
            "UPDATE store SET schema_version = %s, epoch = epoch + 1, taken = now() RETURNING id, epoch",
            (SCHEMA_VERSION,),
        ).fetchone()
    assert row is not None
    return str(row[0]), int(row[1])


def name_store(raw: psycopg.Connection[Any]) -> str:
    """Name a new store; returns the name."""
    name = uuid.uuid4().hex
    raw.execute("INSERT INTO store VALUES (%s, %s, 0, now()) ON CONFLICT DO NOTHING", (name, SCHEMA_VERSION))
    return name
