"""A connection of psycopg's under the statements that operations write: `?` for values, numbers as SQLite has them.

Guarantees: each text is translated once; an integer is a BIGINT or refused, a truth value fits a number's place and a
truth's, a sum is an integer, as in SQLite. Nothing here begins or ends a transaction.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from typing import Any

import psycopg
from psycopg.abc import Buffer
from psycopg.adapt import Dumper
from psycopg.types.numeric import NumericBinaryLoader

from heterorl.coordinator.store.connection import Cursor
from heterorl.coordinator.store.dialect import IN_POSTGRES

PREPARED_STATEMENTS = 512
"""More than there are texts that operations repeat."""
_TALLY = re.compile(r"\btemp\.")
_LIST = re.compile(r"\bjson_each\(\?\)")
_INT8 = psycopg.adapters.types["int8"].oid


class PostgresConnection:
    """What operations write to."""

    def __init__(self, raw: psycopg.Connection[Any]) -> None:
        self._raw = raw
        self.has_written = False
        """Whether any statement since it was set to False may have changed something."""
        raw.prepared_max = PREPARED_STATEMENTS
        raw.adapters.register_dumper(int, _BigintDumper)
        raw.adapters.register_dumper(bool, _TruthDumper)
        raw.adapters.register_loader("numeric", _SumLoader)

    def execute(self, statement: str, parameters: Sequence[Any] = (), /) -> Cursor:
        """Run one statement."""
        cursor = psycopg.RawCursor(self._raw)
        text = translated(statement)
        # Nothing of ours changes a row by a function; a WITH, which may, counts as a change.
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
    """A statement of an operation in PostgreSQL's words. No text of ours has a question mark that is not a value."""
    text = IN_POSTGRES.get(statement, statement)
    # Counts beside the store are tables like others there, see `tallies`.
    text = _TALLY.sub("", text)
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
    # Of no type: what it stands for decides, a number or a truth.
    def dump(self, obj: bool) -> Buffer | None:
        return b"1" if obj else b"0"


class _SumLoader(NumericBinaryLoader):
    def load(self, data: Buffer) -> Any:
        return int(super().load(data))
