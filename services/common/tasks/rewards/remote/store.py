"""What judges said, by digest, in an SQLite file that all processes of a machine share; and their common pace.

A cache: it may be deleted at any time. Guarantees: an entry is what was judged for exactly that question; a file that
is damaged, locked or full costs a question, never an answer.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

_SCHEMA = """
CREATE TABLE IF NOT EXISTS judged (digest BLOB PRIMARY KEY, score REAL NOT NULL, number INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS judged_number ON judged (number);
CREATE TABLE IF NOT EXISTS places (server TEXT PRIMARY KEY, next REAL NOT NULL, taken REAL NOT NULL);
"""
_TRIMMED_SHARE = 16


class JudgeStore:
    """One file; one connection of one process."""

    def __init__(self, path: str, *, max_entries: int) -> None:
        """Open or make it.

        Raises:
            ValueError: it cannot be made, or is no SQLite database.
        """
        self._max_entries = max_entries
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            # Each statement is a transaction of its own; another process's lasts milliseconds.
            self._connection = sqlite3.connect(path, timeout=1.0, isolation_level=None)
            self._connection.executescript("PRAGMA journal_mode = WAL; PRAGMA synchronous = OFF;" + _SCHEMA)
        except (OSError, sqlite3.Error) as error:
            raise ValueError(f"no judge's cache can be kept in {path}: {error}") from None

    def get(self, digest: bytes) -> float | None:
        """The score of a question that was asked before."""
        row = None
        with suppress(sqlite3.Error):
            row = self._connection.execute("SELECT score FROM judged WHERE digest = ?", (digest,)).fetchone()
        # SQLite keeps what it is given, of whatever type.
        return float(row[0]) if row is not None and isinstance(row[0], int | float) else None

    def put(self, digest: bytes, score: float) -> None:
        """Keep a score; the oldest give way."""
        with suppress(sqlite3.Error):
            number = self._connection.execute("SELECT coalesce(max(number), 0) + 1 FROM judged").fetchone()[0]
            self._connection.execute("INSERT OR REPLACE INTO judged VALUES (?, ?, ?)", (digest, score, number))
            if number % max(1, self._max_entries // _TRIMMED_SHARE) == 0:
                self._connection.execute("DELETE FROM judged WHERE number <= ?", (number - self._max_entries,))

    def take_place(self, server: str, *, interval_s: float, longest_s: float) -> float | None:
        """Take the next place in the row of those who ask a server.

        Args:
            server: its name.
            interval_s: seconds between two places.
            longest_s: most that the caller waits; for longer, no place is taken.

        Returns:
            seconds until it is there; None where that is too long. 0 where the file cannot be used.
        """
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                # One clock for all processes of the machine.
                now = time.monotonic()
                # The clock begins anew with the machine: what was taken later than now was taken before that, and what
                # was taken earlier lies no further ahead than its caller waited.
                row = self._connection.execute(
                    "SELECT next FROM places WHERE server = ? AND taken <= ?", (server, now)
                ).fetchone()
                place = now if row is None else max(now, row[0])
                if place - now > longest_s:
                    return None
                self._connection.execute(
                    "INSERT OR REPLACE INTO places VALUES (?, ?, ?)", (server, place + interval_s, now)
                )
                return place - now
            finally:
                self._connection.execute("COMMIT")
        except sqlite3.Error:
            return 0.0


def question_digest(parts: Sequence[object]) -> bytes:
    """Name of a question: all that its score depends on."""
    return hashlib.sha256(json.dumps(parts).encode()).digest()
