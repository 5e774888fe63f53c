"""How old a policy is, and whether it still counts, as store operations. Age begins when a newer version can be had.

Guarantees: the newest version has no age. However long a run stood still, groups of its newest version are taken, so it
goes on by itself; and what a step of the wall clock makes too old is only what a sampler can replace by pulling.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from heterorl.common.wire.common import MAX_INT64
from heterorl.coordinator.store.connection import Connection
from heterorl.coordinator.store.dialect import NUMBERS


def superseded_s(connection: Connection, version: int, *, reach: int, now: float) -> float:
    """Seconds for which a newer version could be had; 0 for the newest.

    Args:
        connection: the store's.
        version: the one whose age is asked for.
        reach: how many versions after it are looked at.
        now: wall time.
    """
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
