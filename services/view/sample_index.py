"""Index of a source's samples, on disk while the page is served.

One thread writes; any thread reads and never waits for the writer.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import math
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import zstandard

from heterorl.common.errors import OperatorError
from heterorl.common.types.common import value_of_row
from heterorl.common.types.rollout import FinishReason, RewardPart, Span
from heterorl.common.types.sample import Sample, SampleRollout, SampleSummary
from heterorl.view.sample_query import COUNTED, Query, count_hits, folded, look_up

_SEPARATOR = "\x1e"
"""Separates texts, so that no hit spans two."""
_LEVEL = 1
_SCHEMA = """
CREATE TABLE samples (
    id INTEGER PRIMARY KEY, version INTEGER NOT NULL, site TEXT NOT NULL, kind TEXT NOT NULL, fate TEXT NOT NULL,
    reward_min REAL, reward_max REAL, num_truncated INTEGER NOT NULL, num_lost INTEGER NOT NULL,
    has_texts INTEGER NOT NULL, is_read INTEGER NOT NULL);
CREATE INDEX unread ON samples (id) WHERE is_read = 0;
CREATE TABLE lines (id INTEGER PRIMARY KEY, line TEXT NOT NULL);
CREATE TABLE texts (id INTEGER PRIMARY KEY, num_bytes INTEGER NOT NULL, data BLOB NOT NULL);
CREATE VIRTUAL TABLE parts USING fts5(folded, tokenize='trigram case_sensitive 1');
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceProgress:
    """Progress of a source; `total` is its stated samples, 0 if unknown."""

    total: int = 0
    is_done: bool = False
    """Whether the index has all samples of the last poll."""
    is_live: bool = False
    """Whether more may come later."""
    remark: str = ""
    """A fact about a source that works, as text for the page, or empty."""
    problem: str = ""
    """Why no samples come, as text for the page, or empty."""


class Source(Protocol):
    """Fills an index from its own thread until it is closed."""

    @property
    def name(self) -> str:
        """Address or file that the user named."""

    @property
    def progress(self) -> SourceProgress: ...

    def start(self) -> None: ...

    def fetch(self, sample_id: int) -> Sample | None:
        """Get a sample whose texts the index lacks; None if dropped.
        Raises the source's error."""

    def close(self) -> None:
        """Stop; returns when the thread has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One page of a query, largest id first.

    `count` is the number of all hits, a lower bound if `is_more`.
    """

    summaries: tuple[SampleSummary, ...]
    has_newer: bool
    has_older: bool
    count: int
    is_more: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexState:
    """Counts of the index: samples, read ones, ones dropped for room."""

    num_samples: int
    num_read: int
    newest: int
    sites: tuple[str, ...]
    rewards: tuple[float, float]
    """Smallest and largest."""
    num_forgotten: int


class IndexFailed(OperatorError):
    """The index on this machine's disk failed."""

    def __init__(self, error: Exception) -> None:
        super().__init__(f"the index on this machine: {error}", action="free space in the temporary directory")


class SampleIndex:
    """Samples of one source by id; the oldest beyond `limit_bytes` are dropped."""

    def __init__(self, directory: Path, *, limit_bytes: int) -> None:
        self._path = directory / "samples.sqlite"
        self._limit_bytes, self._num_bytes, self._num_forgotten = limit_bytes, 0, 0
        # They only grow: a filter without hits does no harm.
        self._sites: set[str] = set()
        self._rewards = (math.inf, -math.inf)
        self._writing = threading.Lock()
        self._readers: list[sqlite3.Connection] = []
        self._writer = self._connect()
        self._writer.execute("PRAGMA journal_mode=WAL")
        self._writer.executescript(_SCHEMA)

    def close(self) -> None:
        """Close all connections; later calls raise sqlite3.ProgrammingError."""
        with self._writing:
            self._writer.close()
            while self._readers:
                self._readers.pop().close()

    def _connect(self) -> sqlite3.Connection:
        # The index ends with the process, so writes are not synced.
        connection = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False, timeout=30)
        connection.executescript("PRAGMA synchronous=OFF; PRAGMA cache_size=-65536; PRAGMA temp_store=MEMORY;")
        return connection

    @contextlib.contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        with _typed():
            try:
                connection = self._readers.pop()
            except IndexError:
                connection = self._connect()
            try:
                # Its statements see one state while the writer goes on.
                connection.execute("BEGIN")
                yield connection
            finally:
                connection.rollback()
                self._readers.append(connection)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._writing, _typed():
            counts = self._num_bytes, self._num_forgotten
            self._writer.execute("BEGIN IMMEDIATE")
            try:
                yield self._writer
                self._writer.execute("COMMIT")
            except BaseException:
                # Counts of rows that are not there would make room without an end.
                self._num_bytes, self._num_forgotten = counts
                # On a full disk SQLite has rolled back.
                if self._writer.in_transaction:
                    self._writer.execute("ROLLBACK")
                raise

    def add_summaries(self, summaries: Sequence[SampleSummary]) -> None:
        """Add summaries; a sample whose texts arrived since is read again."""
        with self._transaction() as connection:
            for summary in summaries:
                row = connection.execute("SELECT has_texts FROM samples WHERE id = ?", (summary.id,)).fetchone()
                if row is None or row[0] != summary.has_texts:
                    self._put(connection, summary, is_read=False)

    def add_samples(self, samples: Sequence[Sample]) -> None:
        with self._transaction() as connection:
            for sample in samples:
                self._drop_texts(connection, sample.summary.id)
                self._put(connection, sample.summary, is_read=True)
                texts = (sample.prompt, *(rollout.completion for rollout in sample.rollouts))
                found = _SEPARATOR.join(map(folded, texts))
                data = zstandard.compress(_packed(sample).encode("ascii"), _LEVEL)
                num_bytes = len(found.encode()) + len(data)
                connection.execute("INSERT INTO texts VALUES (?, ?, ?)", (sample.summary.id, num_bytes, data))
                connection.execute("INSERT INTO parts (rowid, folded) VALUES (?, ?)", (sample.summary.id, found))
                self._num_bytes += num_bytes
            while self._num_bytes > self._limit_bytes:
                (oldest,) = connection.execute("SELECT min(id) FROM texts").fetchone()
                self._drop(connection, oldest)
                self._num_forgotten += 1

    def forget(self, sample_id: int) -> None:
        with self._transaction() as connection:
            self._drop(connection, sample_id)

    def keep(self, sample_id: int) -> None:
        """Count a sample as read though its newest texts are gone."""
        with self._transaction() as connection:
            connection.execute("UPDATE samples SET is_read = 1 WHERE id = ?", (sample_id,))

    def unread(self, limit: int) -> tuple[int, ...]:
        """The newest samples with only a summary."""
        with self._reading() as connection:
            rows = connection.execute("SELECT id FROM samples WHERE is_read = 0 ORDER BY id DESC LIMIT ?", (limit,))
            return tuple(row[0] for row in rows)

    def first_without_texts(self, *, newest: int) -> int | None:
        """The oldest of the `newest` samples without texts, or None."""
        with self._reading() as connection:
            (found,) = connection.execute(
                "SELECT min(id) FROM (SELECT id, has_texts FROM samples ORDER BY id DESC LIMIT ?) WHERE has_texts = 0",
                (newest,),
            ).fetchone()
        return None if found is None else int(found)

    def get(self, sample_id: int) -> Sample | SampleSummary | None:
        """A sample, its summary if it is not read, or None."""
        with self._reading() as connection:
            row = connection.execute(
                "SELECT line, data FROM lines LEFT JOIN texts USING (id) WHERE id = ?", (sample_id,)
            ).fetchone()
        if row is None:
            return None
        summary = value_of_row(SampleSummary, json.loads(row[0]))
        return summary if row[1] is None else _sample(summary, row[1])

    def held(self) -> IndexState:
        with self._reading() as connection:
            # As one SELECT from the table they would read each row.
            count, num_unread, newest = connection.execute(
                "SELECT (SELECT count(*) FROM samples), (SELECT count(*) FROM samples WHERE is_read = 0),"
                " (SELECT max(id) FROM samples)"
            ).fetchone()
        low, high = self._rewards
        return IndexState(
            num_samples=count,
            num_read=count - num_unread,
            newest=newest or 0,
            sites=tuple(sorted(self._sites)),
            rewards=(low, high) if low <= high else (0.0, 0.0),
            num_forgotten=self._num_forgotten,
        )

    def find(self, query: Query, *, limit: int) -> Found:
        with self._reading() as connection:
            ids = look_up(connection, query, limit=limit + 1)
            count = count_hits(connection, query)
            summaries = tuple(self._line(connection, each) for each in sorted(ids[:limit], reverse=True))
        is_followed = len(ids) > limit
        return Found(
            summaries=summaries,
            has_newer=is_followed if query.after else bool(query.before),
            has_older=bool(query.after) or is_followed,
            count=count,
            is_more=bool(query.text) and count >= COUNTED,
        )

    def next_id(self, query: Query) -> int | None:
        """The hit next to a query's place."""
        with self._reading() as connection:
            return next(iter(look_up(connection, query, limit=1)), None)

    @staticmethod
    def _line(connection: sqlite3.Connection, sample_id: int) -> SampleSummary:
        (line,) = connection.execute("SELECT line FROM lines WHERE id = ?", (sample_id,)).fetchone()
        return value_of_row(SampleSummary, json.loads(line))

    def _put(self, connection: sqlite3.Connection, summary: SampleSummary, *, is_read: bool) -> None:
        row = (
            summary.id, summary.version, str(summary.site), summary.kind.value, summary.kept_because,
            summary.reward_min, summary.reward_max, summary.num_truncated, summary.num_lost, summary.has_texts, is_read,
        )  # fmt: skip
        connection.execute(f"INSERT OR REPLACE INTO samples VALUES ({', '.join('?' * len(row))})", row)
        connection.execute("INSERT OR REPLACE INTO lines VALUES (?, ?)", (summary.id, _packed(summary)))
        self._sites |= {str(summary.site)} - {""}
        if summary.reward_min is not None and summary.reward_max is not None:
            low, high = self._rewards
            self._rewards = (min(low, summary.reward_min), max(high, summary.reward_max))

    def _drop(self, connection: sqlite3.Connection, sample_id: int) -> None:
        self._drop_texts(connection, sample_id)
        connection.execute("DELETE FROM samples WHERE id = ?", (sample_id,))
        connection.execute("DELETE FROM lines WHERE id = ?", (sample_id,))

    def _drop_texts(self, connection: sqlite3.Connection, sample_id: int) -> None:
        row = connection.execute("DELETE FROM texts WHERE id = ? RETURNING num_bytes", (sample_id,)).fetchone()
        if row is not None:
            connection.execute("DELETE FROM parts WHERE rowid = ?", (sample_id,))
            self._num_bytes -= row[0]


@contextlib.contextmanager
def _typed() -> Iterator[None]:
    try:
        yield
    except sqlite3.ProgrammingError:
        # The index is closed: the caller is ending.
        raise
    except (sqlite3.Error, OverflowError) as error:
        raise IndexFailed(error) from error


def _packed(value: Sample | SampleSummary) -> str:
    """A value as JSON; arrays as base64, which is shorter than digits."""

    def plain(other: Any) -> Any:
        if isinstance(other, np.ndarray):
            return {"dtype": other.dtype.str, "data": base64.b64encode(other.tobytes()).decode("ascii")}
        return base64.b64encode(other).decode("ascii") if isinstance(other, bytes) else other.value

    return json.dumps(dataclasses.asdict(value), default=plain)


def _sample(summary: SampleSummary, data: bytes) -> Sample:
    def array(fields: dict[str, Any]) -> Any:
        if "dtype" not in fields:
            return fields
        return np.frombuffer(base64.b64decode(fields["data"]), fields["dtype"])

    fields = json.loads(zstandard.decompress(data), object_hook=array)
    rollouts = [
        SampleRollout(**row | {
            "reward_parts": tuple(RewardPart(name=part["name"], value=part["value"]) for part in row["reward_parts"]),
            "finish_reason": FinishReason(row["finish_reason"]), "spans": tuple(Span(**span) for span in row["spans"]),
        })
        for row in fields["rollouts"]
    ]  # fmt: skip
    return Sample(**fields | {"summary": summary, "rollouts": tuple(rollouts)})
