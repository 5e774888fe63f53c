"""Which groups of a site are known: a watermark, and the few sequences beyond it; as store operations.

Guarantees: an id takes effect once, by watermark, never by time; memory is bounded by the gap that callers allow.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from heterorl.common.types.rollout import GroupId
from heterorl.coordinator.store.connection import Connection
from heterorl.coordinator.store.dialect import NAMES

MAX_GAP = 100_000
"""Sequences that may be known beyond the first missing one; more would make the memory of duplicates unbounded."""


def read(connection: Connection, group_id: GroupId) -> int:
    """Highest sequence below which nothing is missing, of the group's incarnation."""
    row = connection.execute(
        "SELECT watermark FROM sites WHERE site = ? AND incarnation = ?", (group_id.site, group_id.incarnation)
    ).fetchone()
    return int(row[0])


def dense(connection: Connection, site: str, incarnation: str) -> int | None:
    """The watermark of an incarnation of which nothing is known beyond it; None of one with a gap."""
    row = connection.execute(
        "SELECT watermark FROM sites WHERE site = ? AND incarnation = ? AND NOT EXISTS"
        " (SELECT 1 FROM beyond_watermark WHERE site = ? AND incarnation = ?)",
        (site, incarnation, site, incarnation),
    ).fetchone()
    return None if row is None else int(row[0])


def is_known(connection: Connection, group_id: GroupId) -> bool:
    """Whether the id took effect before."""
    if 0 < group_id.sequence <= read(connection, group_id):
        return True
    row = connection.execute(
        "SELECT 1 FROM beyond_watermark WHERE site = ? AND incarnation = ? AND sequence = ?",
        (group_id.site, group_id.incarnation, group_id.sequence),
    )
    return row.fetchone() is not None


def remember(connection: Connection, group_id: GroupId) -> None:
    """Set: add a sequence; the watermark rises over what is dense, the rest waits beside it."""
    connection.execute(
        "INSERT INTO beyond_watermark VALUES (?, ?, ?)", (group_id.site, group_id.incarnation, group_id.sequence)
    )
    start = read(connection, group_id)
    _rise(connection, group_id.site, group_id.incarnation, start=start, reached=start)


def pass_over(connection: Connection, site: str, incarnation: str, *, lowest: int) -> int:
    """Set: what lies below `lowest` will never be pushed again; returns over how many that were missing it rises.

    The site says so of its own incarnation; the watermark only ever rises. A site that lies loses its own groups.
    """
    row = connection.execute(
        "SELECT watermark, (SELECT count(*) FROM beyond_watermark b WHERE b.site = sites.site"
        " AND b.incarnation = sites.incarnation AND sequence < ?) FROM sites WHERE site = ? AND incarnation = ?",
        (lowest, site, incarnation),
    ).fetchone()
    start, known = int(row[0]), int(row[1])
    if lowest - 1 <= start:
        return 0
    _rise(connection, site, incarnation, start=start, reached=lowest - 1)
    return lowest - 1 - start - known


def wide_gaps(connection: Connection, holders: Iterable[tuple[str, str]]) -> dict[tuple[str, str], bool]:
    """Of the registered ones, whether half of the gap is used up, so that it had better say what it can still push."""
    # No name has a NUL, and PostgreSQL's lists cannot have one.
    asked = {holder for holder in holders if "\0" not in "".join(holder)}
    sites, incarnations = ([*{holder[place] for holder in asked}] for place in (0, 1))
    rows = connection.execute(
        "SELECT site, incarnation, (SELECT max(sequence) FROM beyond_watermark b"
        " WHERE b.site = s.site AND b.incarnation = s.incarnation) - watermark FROM sites s"
        f" WHERE site IN {NAMES} AND incarnation IN {NAMES}",
        (json.dumps(sites), json.dumps(incarnations)),
    )
    gaps = {(site, incarnation): gap for site, incarnation, gap in rows}
    return {holder: (gaps[holder] or 0) > MAX_GAP // 2 for holder in asked & gaps.keys()}


def _rise(connection: Connection, site: str, incarnation: str, *, start: int, reached: int) -> None:
    """Raise the watermark from `start` to `reached` and over what is dense behind it."""
    key = (site, incarnation)
    for (sequence,) in connection.execute(
        "SELECT sequence FROM beyond_watermark WHERE site = ? AND incarnation = ? AND sequence > ? ORDER BY sequence",
        (*key, reached),
    ):
        if sequence != reached + 1:
            break
        reached = sequence
    if reached > start:
        connection.execute(
            "DELETE FROM beyond_watermark WHERE site = ? AND incarnation = ? AND sequence <= ?", (*key, reached)
        )
        connection.execute("UPDATE sites SET watermark = ? WHERE site = ? AND incarnation = ?", (reached, *key))
