"""What a database is to the store's thread: one connection, transactions with a savepoint for each operation, errors.

`Database` queues operations and shares commits among them; an engine says what the statements of that are, and which
of its errors are an operation's, which mean that there is no room, and that all others end the process: because the
database is elsewhere and has gone, or because what it holds is unknown.
"""

from __future__ import annotations

from enum import Enum
from typing import Protocol

from heterorl.coordinator.store.connection import Connection


class Fault(Enum):
    """What an error of the engine says."""

    OPERATION = "operation"
    """One operation made a mistake; it is undone, and the store lives on."""
    FULL = "full"
    """There is no room; nothing was written."""
    LOST = "lost"
    """The database has gone; a process that starts again finds what was acknowledged, and no more: this one ends."""
    FATAL = "fatal"
    """What became of earlier operations is unknown: the process ends."""


class Engine(Protocol):
    """One connection that writes. Belongs to the store's thread."""

    errors: tuple[type[Exception], ...]
    """What its statements raise."""

    @property
    def connection(self) -> Connection:
        """What operations write to."""
        ...

    def begin(self) -> None:
        """Begin a transaction in which this process, and no other, may write."""
        ...

    def commit(self) -> None:
        """Make the transaction durable."""
        ...

    def rollback(self) -> None:
        """Undo the transaction, if there is one."""
        ...

    def save(self) -> None:
        """Begin an operation inside the transaction."""
        ...

    def keep(self) -> None:
        """End the operation."""
        ...

    def undo(self) -> None:
        """Undo the operation alone."""
        ...

    def fault(self, error: Exception) -> Fault:
        """What one of `errors` says."""
        ...

    def close(self) -> None:
        """Fold what is open, give the connection up."""
        ...
