"""Incarnations of a site: known group ids, kept and shown incarnations.

An incarnation is one sampler's outbox. A watermark and the few sequences beyond it tell which of its groups are known,
so an id takes effect once. An incarnation that pushed stays for its watermark, and older ones are shown as one sum.
Only the newest KEPT of the others stay. The watermark of an older one without work passes over what it did not push.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from heterorl.common.types.rollout import GroupId
from heterorl.coordinator.store.database import NAMES, PAIRS, Connection, get_meta, set_meta

MAX_GAP = 100_000
"""Most sequences beyond the first missing one, which bounds the rows of duplicates."""
RISE_ROWS = 256
"""Sequences read at once when the watermark rises: behind a gap each group reads some."""


def watermark_of(connection: Connection, group_id: GroupId) -> int:
    """Highest sequence of the group's incarnation up to which none is missing."""
    row = connection.execute(
        "SELECT watermark FROM sites WHERE site = ? AND incarnation = ?", (group_id.site, group_id.incarnation)
    ).fetchone()
    return int(row[0])


def dense_watermark(connection: Connection, site: str, incarnation: str) -> int | None:
    """The watermark of an incarnation without known sequences beyond it, else None."""
    row = connection.execute(
        "SELECT watermark FROM sites WHERE site = ? AND incarnation = ? AND NOT EXISTS"
        " (SELECT 1 FROM beyond_watermark WHERE site = ? AND incarnation = ?)",
        (site, incarnation, site, incarnation),
    ).fetchone()
    return None if row is None else int(row[0])


def is_known(connection: Connection, group_id: GroupId) -> bool:
    """Whether the id took effect before."""
    if 0 < group_id.sequence <= watermark_of(connection, group_id):
        return True
    row = connection.execute(
        "SELECT 1 FROM beyond_watermark WHERE site = ? AND incarnation = ? AND sequence = ?",
        (group_id.site, group_id.incarnation, group_id.sequence),
    )
    return row.fetchone() is not None


def remember(connection: Connection, group_id: GroupId) -> None:
    """Add a sequence; the watermark rises over dense ones."""
    connection.execute(
        "INSERT INTO beyond_watermark VALUES (?, ?, ?)", (group_id.site, group_id.incarnation, group_id.sequence)
    )
    start = watermark_of(connection, group_id)
    _rise(connection, group_id.site, group_id.incarnation, start=start, reached=start)


def pass_over(connection: Connection, site: str, incarnation: str, *, lowest: int) -> int:
    """Raise the watermark to `lowest` - 1, as the site states.
    Returns the number of missing groups below."""
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
    """For registered holders, whether half of MAX_GAP is used.
    The site should then register again."""
    # PostgreSQL's lists cannot hold a NUL, and no name has one.
    asked = [holder for holder in holders if "\0" not in "".join(holder)]
    rows = connection.execute(
        "SELECT site, incarnation, (SELECT max(sequence) FROM beyond_watermark b"
        " WHERE b.site = s.site AND b.incarnation = s.incarnation) - watermark"
        f" FROM {PAIRS} AS asked CROSS JOIN sites s WHERE site = asked.one AND incarnation = asked.other",
        (json.dumps(asked),),
    )
    return {(site, incarnation): (gap or 0) > MAX_GAP // 2 for site, incarnation, gap in rows}


def _rise(connection: Connection, site: str, incarnation: str, *, start: int, reached: int) -> None:
    """Raise the watermark to `reached`, and over dense sequences behind it."""
    key = (site, incarnation)
    num_dense = RISE_ROWS
    while num_dense == RISE_ROWS:
        rows = connection.execute(
            "SELECT sequence FROM beyond_watermark WHERE site = ? AND incarnation = ? AND sequence > ?"
            " ORDER BY sequence LIMIT ?",
            (*key, reached, RISE_ROWS),
        ).fetchall()
        num_dense = sum(sequence == expected for expected, (sequence,) in enumerate(rows, reached + 1))
        reached += num_dense
    if reached > start:
        connection.execute(
            "DELETE FROM beyond_watermark WHERE site = ? AND incarnation = ? AND sequence <= ?", (*key, reached)
        )
        connection.execute("UPDATE sites SET watermark = ? WHERE site = ? AND incarnation = ?", (reached, *key))


KEPT = 8
"""Newest incarnations of a site, which are always kept and shown one by one."""
SHOWN = 16
"""Most incarnations of a site for which all are shown one by one."""
EARLIER = "earlier"
_COLUMNS = "site, incarnation, accepted, dropped, variant, work_ahead_s"


@dataclass(frozen=True, slots=True)
class Row:
    """An incarnation, or the sum of a site's earlier ones."""

    site: str
    incarnation: str
    accepted: int
    dropped: int
    variant: str
    ahead_s: float = 0.0


def note(connection: Connection, site: str, incarnation: str) -> list[str]:
    """Make a registered incarnation its site's newest; returns incarnations deleted for it."""
    key = f"incarnations/{site}"
    known = json.loads(get_meta(connection, key) or "[]")
    newest = [incarnation, *(each for each in known if each != incarnation)]
    working = {row[0] for row in connection.execute("SELECT incarnation FROM temp.holder WHERE site = ?", (site,))}
    kept, forgotten = newest[:KEPT], []
    for each in newest[KEPT:]:
        if each in working:
            kept.append(each)
        elif not _has_pushed(connection, site, each):
            connection.execute("DELETE FROM sites WHERE site = ? AND incarnation = ?", (site, each))
            forgotten.append(each)
        else:
            # Else a site could fill the store with gaps of ever new incarnations.
            (highest,) = connection.execute(
                "SELECT coalesce(max(sequence), 0) FROM beyond_watermark WHERE site = ? AND incarnation = ?",
                (site, each),
            ).fetchone()
            pass_over(connection, site, each, lowest=highest + 1)
    set_meta(connection, key, json.dumps(kept))
    return forgotten


def is_replaced(connection: Connection, site: str, incarnation: str) -> bool:
    """Whether another incarnation of the site registered after this one."""
    newest = json.loads(get_meta(connection, f"incarnations/{site}") or "[]")
    return bool(newest) and newest[0] != incarnation


def _has_pushed(connection: Connection, site: str, incarnation: str) -> bool:
    row = connection.execute(
        "SELECT accepted + dropped FROM sites WHERE site = ? AND incarnation = ?", (site, incarnation)
    ).fetchone()
    return row is not None and row[0] > 0


def shown(connection: Connection, active: Mapping[str, Collection[str]]) -> list[Row]:
    """Rows of all sites.
    They are the newest incarnations, those in `active` (by site), and a sum of each site's others."""
    rows: list[Row] = []
    totals = connection.execute(
        "SELECT site, count(*), sum(accepted), sum(dropped) FROM sites GROUP BY site"
    ).fetchall()
    few: defaultdict[str, list[Row]] = defaultdict(list)
    for row in connection.execute(
        # One statement for all sites, of which there may be a thousand.
        f"SELECT {_COLUMNS} FROM sites WHERE site IN (SELECT site FROM sites GROUP BY site HAVING count(*) <= ?)"
        " ORDER BY site, incarnation",
        (SHOWN,),
    ):
        few[row[0]].append(Row(*row))
    for site, count, accepted, dropped in totals:
        if count <= SHOWN:
            rows += few[site]
            continue
        newest = json.loads(get_meta(connection, f"incarnations/{site}") or "[]")
        names = sorted({*newest, *active.get(site, ())})
        # One value: SQLite bounds the number of values.
        found = connection.execute(
            f"SELECT {_COLUMNS} FROM sites WHERE site = ? AND incarnation IN {NAMES} ORDER BY incarnation",
            (site, json.dumps(names)),
        )
        own = [Row(*row) for row in found]
        rest = accepted - sum(row.accepted for row in own), dropped - sum(row.dropped for row in own)
        rows += [Row(site, EARLIER, *rest, ""), *own]
    return rows
