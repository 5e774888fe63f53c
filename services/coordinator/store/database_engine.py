"""Interface of a database engine: connection, transactions with savepoints, error kinds.

Operations write SQLite's SQL with `?` for values. IN_POSTGRES translates statements where the dialects differ.
`Database` queues operations and shares commits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from typing import Any, Protocol


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
