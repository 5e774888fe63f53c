"""The age of policies, and groups fresh enough to train on.

Store operations. Ages come from the index `versions_ages`, since rows hold manifests of up to megabytes. A policy's
age counts from the publication of the next version, so the newest version has age 0 even if a run stands still. Groups
go into versions in the order of their leases, as many for each version as the learner stated.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any

from heterorl.common.wire.common_messages import MAX_INT64
from heterorl.coordinator.store.database import NUMBERS, Connection, get_meta


def superseded_s(connection: Connection, version: int, *, reach: int, now: float) -> float:
    """Seconds since one of the next `reach` versions was published.
    The newest version has 0. `now` is wall time."""
    (published,) = connection.execute(
        "SELECT min(published) FROM versions WHERE version > ? AND version <= ? AND is_abandoned = 0",
        (version, min(version + reach, MAX_INT64)),
    ).fetchone()
    return 0.0 if published is None else max(0.0, now - float(published))


def oldest_usable(connection: Connection, *, head: int, max_versions: int, max_s: float, now: float) -> int:
    """The oldest version within both bounds, of versions and of seconds."""
    floor = head - max_versions
    row = connection.execute(
        "SELECT max(version) FROM versions WHERE version > ? AND published < ? AND is_abandoned = 0",
        (floor, now - max_s),
    ).fetchone()
    # It superseded all versions before it more than `max_s` ago.
    return floor if row[0] is None else int(row[0])


def abandoned_span(connection: Connection, versions: Sequence[int]) -> int | None:
    """An abandoned version among a group's versions, or None."""
    (found,) = connection.execute(
        f"SELECT min(version) FROM versions WHERE is_abandoned = 1 AND version IN {NUMBERS}", (json.dumps(versions),)
    ).fetchone()
    return None if found is None else int(found)


VERSIONS_TIMED = 8
"""Newest versions whose intervals give the duration of a version."""
_MANY = 1e6


def next_lease(connection: Connection, *, head: int, bound: int, count: int) -> tuple[int, int]:
    """How many of the next `count` groups go into one version.

    Also returns the oldest version that they may have. `bound` is the largest staleness, in versions, at which a
    version may consume a group.
    """
    size = int(get_meta(connection, "lease_groups_per_version") or 0)
    if size < 1:
        return count, head - bound
    (leased,) = connection.execute("SELECT count(*) FROM groups WHERE state = 'leased'").fetchone()
    return min(count, size - leased % size), head + leased // size - bound


def coming(connection: Connection, generation_s: float, *, head: int, now: float) -> int:
    """Versions that come in the `generation_s` of a group; 0 while unknown.

    A version takes the mean of the last VERSIONS_TIMED, or the time since the newest one if that is longer.
    """
    rows = connection.execute(
        "SELECT published FROM versions WHERE version >= ? AND is_abandoned = 0 ORDER BY version DESC",
        (head - VERSIONS_TIMED,),
    ).fetchall()
    if len(rows) < 2:
        return 0
    newest, oldest = float(rows[0][0]), float(rows[-1][0])
    version_s = max((newest - oldest) / (len(rows) - 1), now - newest)
    # The version that the group ends with does not count.
    if generation_s <= 0 or version_s <= 0:
        return 0
    return math.ceil(min(generation_s / version_s, _MANY)) - 1


_LEASED = (
    "SELECT arrival, digest, payload, arrived, published, oldest_version, assignment, site, incarnation, sequence"
    " FROM groups JOIN versions ON versions.version = oldest_version WHERE state = 'pending'"
)


def oldest_pending(connection: Connection, count: int, *, first_version: int) -> list[tuple[Any, ...]]:
    """Up to `count` pending groups from `first_version` on, oldest policy first."""
    return connection.execute(
        f"{_LEASED} AND oldest_version >= ? ORDER BY oldest_version, arrival LIMIT ?", (first_version, count)
    ).fetchall()


def pending_arrivals(connection: Connection) -> dict[tuple[str, int], deque[int]]:
    """Arrivals of pending groups by site and version, in order."""
    found: defaultdict[tuple[str, int], deque[int]] = defaultdict(deque)
    # By the index `groups_by_site`, which has these columns.
    rows = connection.execute(
        "SELECT site, oldest_version, arrival FROM groups WHERE state = 'pending'"
        " ORDER BY site, oldest_version, arrival"
    )
    for site, version, arrival in rows:
        found[site, version].append(arrival)
    return found


def pending_at(connection: Connection, arrival: int) -> list[tuple[Any, ...]]:
    """The pending group of an arrival, as a row of `oldest_pending`."""
    return connection.execute(f"{_LEASED} AND arrival = ?", (arrival,)).fetchall()


def newest_taken(connection: Connection) -> int:
    """Newest version with a leased or consumed group; -1 without one."""
    row = connection.execute(
        "SELECT (SELECT max(oldest_version) FROM groups WHERE state = 'leased'),"
        " (SELECT max(oldest_version) FROM groups WHERE state = 'consumed')"
    ).fetchone()
    return max(-1 if version is None else int(version) for version in row)
