"""The operator's order to go back: the next version is to hold what an earlier one held; as store operations.

Guarantees: at most one order, durable; an order given twice under one id is one order, also after it was carried out;
it ends in the transaction that commits a version with the state asked for, so it is carried out once, whoever dies.
Numbers go on: nothing is abandoned, and the version that carries an order out is an ordinary child of the head.
"""

from __future__ import annotations

import functools
import sqlite3

from heterorl.common.errors import InvalidRequest, UnknownVersion
from heterorl.common.types.policy import Manifest, PlanKind, PullPlan
from heterorl.coordinator.store import repeats
from heterorl.coordinator.store.database import get_meta, set_meta
from heterorl.coordinator.versions import lineage, plans

_ORDER, _KIND = "rollback_to", "rollback"
_EARLIER = "rollback_request_id"
"""Where an earlier program kept the newest id alone."""


def ordered(connection: sqlite3.Connection) -> int:
    """The version to go back to; NONE where there is no order."""
    return int(get_meta(connection, _ORDER) or lineage.NONE)


def is_known(connection: sqlite3.Connection, request_id: str) -> bool:
    """Whether an order was given under this id: it is said again because an answer was lost."""
    if request_id and get_meta(connection, _EARLIER) == request_id:
        return True
    return repeats.answer_to(connection, _KIND, request_id) is not None


def place(connection: sqlite3.Connection, *, to_version: int, request_id: str) -> tuple[PullPlan, ...]:
    """Replace the order (NONE takes it back); returns the plans by which the learner can carry it out.

    Raises:
        InvalidRequest: there is no id.
        UnknownVersion: the version does not exist, was abandoned, or its weights can no longer be had.
    """
    if not request_id or to_version < lineage.NONE:
        raise InvalidRequest("request_id must not be empty, to_version at least -1")
    if is_known(connection, request_id):
        return ()
    ways = () if to_version == lineage.NONE else _ways(connection, to_version)
    set_meta(connection, _ORDER, str(to_version))
    repeats.remember(connection, _KIND, request_id, "")
    return ways


def settle(connection: sqlite3.Connection, manifest: Manifest) -> None:
    """End an order that a version carries out: one is published, and it has the state asked for."""
    version = ordered(connection)
    if version != lineage.NONE and _root(connection, version) == manifest.state_root:
        set_meta(connection, _ORDER, str(lineage.NONE))


def _ways(connection: sqlite3.Connection, version: int) -> tuple[PullPlan, ...]:
    """From the version to the head, to be undone, and from nothing to the version; one of them is enough."""
    if not lineage.is_in_lineage(connection, version):
        raise UnknownVersion(f"version {version} does not exist in the lineage")
    plan = functools.partial(plans.plan, connection, merged_into=plans.no_merged)
    head, root = lineage.read_head(connection).version, _root(connection, version)
    there = plan(have_version=version, have_root=root, want_version=head)
    found = [] if there.kind is PlanKind.SNAPSHOT else [there]
    try:
        found.append(plan(have_version=lineage.NONE, have_root="", want_version=version))
    except UnknownVersion:
        if not found:
            raise UnknownVersion(f"version {version} cannot be rebuilt: its payloads were deleted") from None
    return tuple(found)


def _root(connection: sqlite3.Connection, version: int) -> str:
    row = connection.execute("SELECT state_root FROM versions WHERE version = ?", (version,)).fetchone()
    return "" if row is None else str(row[0])
