"""Which samples of an index a query means: conditions on their rows, and parts of their texts.

A search is by three characters at a time (SQLite's trigrams), so that it takes formulas and languages without blanks as
well; what has all parts is then compared itself. A search that would take longer than its share ends with what it
found, and says where to go on.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from dataclasses import dataclass

from heterorl.common.types.sample import SampleKind
from heterorl.view.packed import clean
from heterorl.view.query import ANY_DROP, Query

SEARCH_S = 0.06
"""A search looks no longer than this."""
COUNTED = 1000
"""Hits of a search are counted so far."""
MOST_PARTS = 16
"""Trigrams that a search asks for; more exclude little."""
_PART = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Hits:
    """Ids next to a query's place, one more than asked where there is one; see heterorl.view.index.Found."""

    ids: list[int]
    count: int
    is_more: bool
    looked_up_to: int | None


def look_up(connection: sqlite3.Connection, query: Query, *, limit: int, is_counted: bool = True) -> Hits:
    """The ids of a query, from its place on; a search reads texts, and no longer than SEARCH_S.

    What is not counted ends with the page; its count says nothing then.
    """
    most = COUNTED if is_counted else limit + 1
    return _search(connection, query, limit=limit, most=most) if query.text else _filter(connection, query, limit=limit)


def folded(text: str) -> str:
    """A text as it is compared: large and small letters are the same, and no NUL, at which SQLite ends a text."""
    return clean(text).replace("\0", "\ufffd").casefold()


def _filter(connection: sqlite3.Connection, query: Query, *, limit: int) -> Hits:
    where, values = _conditions(query)
    place, place_values, order = _place(query, "s.id")
    rows = connection.execute(
        f"SELECT s.id FROM samples s WHERE {where} AND {place} ORDER BY s.id {order} LIMIT ?",
        (*values, *place_values, limit + 1),
    )
    ids = [row[0] for row in rows]
    (count,) = connection.execute(f"SELECT count(*) FROM samples s WHERE {where}", values).fetchone()
    return Hits(ids=ids, count=count, is_more=False, looked_up_to=None)


def _search(connection: sqlite3.Connection, query: Query, *, limit: int, most: int) -> Hits:
    needle = folded(query.text)
    where, values = _conditions(query)
    if len(needle) >= _PART:
        tables = "parts p CROSS JOIN samples s ON s.id = p.rowid CROSS JOIN texts t ON t.id = p.rowid"
        column, where, values = "p.rowid", f"parts MATCH ? AND {where}", [_match(needle), *values]
    else:
        tables, column = "texts t CROSS JOIN samples s ON s.id = t.id", "t.id"
    place, place_values, order = _place(query, column)
    rows = connection.execute(
        f"SELECT {column}, t.folded FROM {tables} WHERE {where} AND {place} ORDER BY {column} {order}",
        (*values, *place_values),
    )
    ids: list[int] = []
    count, deadline = 0, time.monotonic() + SEARCH_S
    with contextlib.closing(rows):
        for sample_id, text in rows:
            if needle in text:
                count += 1
                if len(ids) <= limit:
                    ids.append(sample_id)
                if count >= most:
                    return Hits(ids=ids, count=count, is_more=True, looked_up_to=None)
            if time.monotonic() > deadline:
                end = sample_id if len(ids) <= limit else None
                return Hits(ids=ids, count=count, is_more=True, looked_up_to=end)
    return Hits(ids=ids, count=count, is_more=bool(query.before or query.after), looked_up_to=None)


def _match(needle: str) -> str:
    """The trigrams of a text, each as a quoted word; all must be there."""
    words = list(dict.fromkeys(needle[i : i + _PART] for i in range(len(needle) - _PART + 1)))
    # Spread over the whole where there are many.
    chosen = words if len(words) <= MOST_PARTS else [words[i * len(words) // MOST_PARTS] for i in range(MOST_PARTS)]
    return " AND ".join('"' + word.replace('"', '""') + '"' for word in chosen)


def _conditions(query: Query) -> tuple[str, list[object]]:
    """What a query asks of the row `s` of a sample."""
    terms: list[tuple[str, list[object]]] = []
    if query.site:
        terms.append(("s.site = ?", [query.site]))
    if query.fate == ANY_DROP:
        terms.append(("s.kind IN (?, ?)", [SampleKind.REJECTED.value, SampleKind.DROPPED.value]))
    elif query.fate:
        terms.append(("s.fate = ?", [query.fate]))
    if query.version_from is not None:
        terms.append(("s.version >= ?", [query.version_from]))
    if query.version_to is not None:
        terms.append(("s.version <= ?", [query.version_to]))
    if query.reward_from is not None:
        terms.append(("s.reward_max >= ?", [query.reward_from]))
    if query.reward_to is not None:
        terms.append(("s.reward_min <= ?", [query.reward_to]))
    if query.truncated is not None:
        terms.append(("s.num_truncated > 0" if query.truncated else "s.num_truncated = 0", []))
    if query.lost is not None:
        terms.append(("s.num_lost > 0" if query.lost else "s.num_lost = 0", []))
    return " AND ".join(term for term, _ in terms) or "1", [value for _, values in terms for value in values]


def _place(query: Query, column: str) -> tuple[str, list[object], str]:
    if query.after:
        return f"{column} > ?", [query.after], "ASC"
    return (f"{column} < ?", [query.before], "DESC") if query.before else ("1", [], "DESC")
