"""What operations use of a store: statements with `?` for values, in SQL that every engine knows.

Where the engines' dialects differ, an operation names a statement of `store/dialect.py`, which has a text for each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol


class Cursor(Protocol):
    """The answer to a statement."""

    @property
    def rowcount(self) -> int:
        """Rows that an INSERT, UPDATE or DELETE changed."""
        ...

    def fetchone(self) -> Any:
        """The next row as a tuple; None after the last one."""
        ...

    def fetchall(self) -> list[Any]:
        """All rows that are left."""
        ...

    def close(self) -> None:
        """Ask for no more rows."""
        ...

    def __iter__(self) -> Iterator[Any]:
        """The rows that are left."""
        ...


class Connection(Protocol):
    """The store as an operation sees it, inside its transaction."""

    def execute(self, statement: str, parameters: Sequence[Any] = ..., /) -> Cursor:
        """Run one statement."""
        ...

    def executemany(self, statement: str, rows: Iterable[Sequence[Any]], /) -> Cursor:
        """Run one statement for each row of values."""
        ...
