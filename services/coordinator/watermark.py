"""Which groups of a site are known: a watermark, and the few sequences beyond it; as store operations.

Guarantees: an id takes effect once, by watermark, never by time; memory is bounded by the gap that callers allow.
"""

from __future__ import annotations

import sqlite3

from services.common.types import GroupId


def read(connection: sqlite3.Connection, group_id: GroupId) -> int:
    """Highest sequence below which nothing is missing, of the group's incarnation."""
    row = connection.execute(
        "SELECT watermark FROM sites WHERE site = ? AND incarnation = ?", (group_id.site, group_id.incarnation)
    ).fetchone()
    return int(row[0])


def is_known(connection: sqlite3.Connection, group_id: GroupId) -> bool:
    """Whether the id took effect before."""
    if 0 < group_id.sequence <= read(connection, group_id):
        return True
    row = connection.execute(
        "SELECT 1 FROM beyond_watermark WHERE site = ? AND incarnation = ? AND sequence = ?",
        (group_id.site, group_id.incarnation, group_id.sequence),
    )
    return row.fetchone() is not None


def remember(connection: sqlite3.Connection, group_id: GroupId) -> None:
    """Set: add a sequence; the watermark rises over what is dense, the rest waits beside it."""
    site = (group_id.site, group_id.incarnation)
    connection.execute("INSERT INTO beyond_watermark VALUES (?, ?, ?)", (*site, group_id.sequence))
    watermark = start = read(connection, group_id)
    for (sequence,) in connection.execute(
        "SELECT sequence FROM beyond_watermark WHERE site = ? AND incarnation = ? ORDER BY sequence", site
    ):
        if sequence != watermark + 1:
            break
        watermark = sequence
    if watermark > start:
        connection.execute(
            "DELETE FROM beyond_watermark WHERE site = ? AND incarnation = ? AND sequence <= ?", (*site, watermark)
        )
        connection.execute("UPDATE sites SET watermark = ? WHERE site = ? AND incarnation = ?", (watermark, *site))
