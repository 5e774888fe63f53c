"""How old a policy is, and which groups are still fresh when the learner comes to train on them, as store operations.

Age begins when a newer version can be had, so the newest version has none: however long a run stood still, groups of
its newest version are taken, and it goes on by itself. A step of the wall clock makes too old only what a sampler can
replace by pulling.

Groups go into versions in the order in which they are leased, so many for each version as the learner said. A group
that is leased behind others is consumed by a later version, whose parent is not the head yet but one of its successors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from heterorl.common.types.rollout import GroupId
from heterorl.common.wire.common import MAX_INT64
from heterorl.coordinator.store.database import get_meta
from heterorl.coordinator.store.database_engine import NUMBERS, Connection


def superseded_s(connection: Connection, version: int, *, reach: int, now: float) -> float:
    """Seconds for which one of the `reach` versions after this one could be had; 0 for the newest. `now` is wall
    time."""
    (published,) = connection.execute(
        "SELECT min(published) FROM versions WHERE version > ? AND version <= ? AND is_abandoned = 0",
        (version, min(version + reach, MAX_INT64)),
    ).fetchone()
    return 0.0 if published is None else max(0.0, now - float(published))


def oldest_usable(connection: Connection, *, head: int, max_versions: int, max_s: float, now: float) -> int:
    """The oldest version whose groups are within both bounds, that on versions and that on seconds."""
    floor = head - max_versions
    row = connection.execute(
        "SELECT max(version) FROM versions WHERE version > ? AND published < ? AND is_abandoned = 0",
        (floor, now - max_s),
    ).fetchone()
    # What came out so long ago was a newer version to all before it.
    return floor if row[0] is None else int(row[0])


def abandoned_span(connection: Connection, versions: Sequence[int]) -> int | None:
    """An abandoned version among those that tokens of a group were drawn from; None when there is none."""
    (found,) = connection.execute(
        f"SELECT min(version) FROM versions WHERE is_abandoned = 1 AND version IN {NUMBERS}",
        (json.dumps(versions),),
    ).fetchone()
    return None if found is None else int(found)


VERSIONS_TIMED = 8
"""Whose publications say how long a version takes."""
_MANY = 1e6


def next_lease(connection: Connection, *, head: int, bound: int, count: int) -> tuple[int, int]:
    """How many of `count` groups go into the same version when they are leased now, at least 1 where `count` is, and
    the oldest version that they may be of; `bound` is the largest staleness that a version may consume."""
    size = int(get_meta(connection, "lease_groups_per_version") or 0)
    if size < 1:
        return count, head - bound
    (leased,) = connection.execute("SELECT count(*) FROM groups WHERE state = 'leased'").fetchone()
    return min(count, size - leased % size), head + leased // size - bound


def coming(connection: Connection, generation_s: float, *, head: int, now: float) -> int:
    """How many versions come while a group is made, which takes `generation_s`; 0 while that is not known.

    A version takes as long as the last VERSIONS_TIMED did, or as the run has been without a new one: a run that stands
    still makes none stale.
    """
    rows = connection.execute(
        "SELECT published FROM versions WHERE version >= ? AND is_abandoned = 0 ORDER BY version DESC",
        (head - VERSIONS_TIMED,),
    ).fetchall()
    if len(rows) < 2:
        return 0
    newest, oldest = float(rows[0][0]), float(rows[-1][0])
    version_s = max((newest - oldest) / (len(rows) - 1), now - newest)
    # The one that ends with the group is its own.
    if generation_s <= 0 or version_s <= 0:
        return 0
    return math.ceil(min(generation_s / version_s, _MANY)) - 1


def too_stale(connection: Connection, ids: Sequence[GroupId], *, head: int, bound: int) -> list[GroupId]:
    """Those that no version after the head may consume."""
    query = "SELECT oldest_version FROM groups WHERE site = ? AND incarnation = ? AND sequence = ?"
    found = []
    for group_id in ids:
        row = connection.execute(query, (group_id.site, group_id.incarnation, group_id.sequence)).fetchone()
        if row is not None and head - row[0] > bound:
            found.append(group_id)
    return found


_LEASED = (
    "SELECT arrival, digest, payload, arrived, published, assignment, site, incarnation, sequence"
    " FROM groups JOIN versions ON versions.version = oldest_version WHERE state = 'pending'"
)


def oldest_pending(connection: Connection, count: int, *, first_version: int, site: str = "") -> list[tuple[Any, ...]]:
    """Up to `count` pending groups of a version or later ones, oldest policy first; of one site if named."""
    return connection.execute(
        f"{_LEASED} AND ? IN ('', site) AND oldest_version >= ? ORDER BY oldest_version, arrival LIMIT ?",
        (site, first_version, count),
    ).fetchall()


def pending_at(connection: Connection, arrival: int) -> list[tuple[Any, ...]]:
    """The pending group of an arrival, as a row like those of `oldest_pending`."""
    return connection.execute(f"{_LEASED} AND arrival = ?", (arrival,)).fetchall()


def newest_taken(connection: Connection) -> int:
    """The newest version of which a group is leased or was consumed; -1 where none is."""
    row = connection.execute(
        "SELECT (SELECT max(oldest_version) FROM groups WHERE state = 'leased'),"
        " (SELECT max(oldest_version) FROM groups WHERE state = 'consumed')"
    ).fetchone()
    return max(-1 if version is None else int(version) for version in row)
