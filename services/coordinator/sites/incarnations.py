"""Which incarnations of a site are remembered and shown, as store operations: a site may register ever new ones.

An incarnation is a sampler's outbox. One that never pushed a group says nothing that its next registration would not,
so of those only the newest few are kept. One that pushed stays, because its watermark tells its groups from
repetitions; beyond the newest few it is shown in one row with all others of its site.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass

from heterorl.coordinator.store.connection import Connection
from heterorl.coordinator.store.database import get_meta, set_meta
from heterorl.coordinator.store.dialect import NAMES

KEPT = 8
"""Newest incarnations of a site that are kept whatever they did, and shown one by one."""
SHOWN = 16
"""Incarnations of a site that are shown one by one while there are no more."""
EARLIER = "earlier"
"""Stands for all other incarnations of a site."""
_COLUMNS = "site, incarnation, accepted, dropped, flavour, work_ahead_s"


@dataclass(frozen=True, slots=True)
class Row:
    """An incarnation, or the sum of a site's earlier ones."""

    site: str
    incarnation: str
    accepted: int
    dropped: int
    flavour: str
    ahead_s: float = 0.0


def note(connection: Connection, site: str, incarnation: str) -> list[str]:
    """Make a registered incarnation its site's newest; returns those that are forgotten for it."""
    key = f"incarnations/{site}"
    stored = get_meta(connection, key)
    if stored is None:
        # Of a program that kept no order.
        rows = connection.execute("SELECT incarnation FROM sites WHERE site = ?", (site,))
        known = [str(row[0]) for row in rows]
    else:
        known = json.loads(stored)
    newest = [incarnation, *(each for each in known if each != incarnation)]
    working = {row[0] for row in connection.execute("SELECT incarnation FROM temp.holder WHERE site = ?", (site,))}
    kept, forgotten = newest[:KEPT], []
    for each in newest[KEPT:]:
        if each in working:
            kept.append(each)
        elif not _has_pushed(connection, site, each):
            connection.execute("DELETE FROM sites WHERE site = ? AND incarnation = ?", (site, each))
            forgotten.append(each)
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


def shown(connection: Connection, active: Collection[tuple[str, str]]) -> list[Row]:
    """Rows of all sites: the newest incarnations and those in `active`, one more for each site's others."""
    rows: list[Row] = []
    totals = connection.execute(
        "SELECT site, count(*), sum(accepted), sum(dropped) FROM sites GROUP BY site"
    ).fetchall()
    few: defaultdict[str, list[Row]] = defaultdict(list)
    for row in connection.execute(
        # Of a thousand sites by one statement: others wait meanwhile.
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
        names = sorted({*newest, *(incarnation for each, incarnation in active if each == site)})
        # One value, however many they are: SQLite takes so many and no more.
        found = connection.execute(
            f"SELECT {_COLUMNS} FROM sites WHERE site = ? AND incarnation IN {NAMES} ORDER BY incarnation",
            (site, json.dumps(names)),
        )
        own = [Row(*row) for row in found]
        rest = accepted - sum(row.accepted for row in own), dropped - sum(row.dropped for row in own)
        rows += [Row(site, EARLIER, *rest, ""), *own]
    return rows
