"""The operator's rollback order: publish an earlier version's state next. Store operations.

There is at most one order, and it is durable. The same request id is the same order, also after it took effect. The
transaction that commits a version with that state ends it. An order that the learner refuses keeps no payloads. Numbers
continue and no version is abandoned.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

from heterorl.common.errors import InvalidRequest, UnknownVersion
from heterorl.common.types.common import Digest
from heterorl.common.types.policy import (
    NO_VERSION,
    Manifest,
    PayloadKind,
    PayloadRef,
    PlanKind,
    PullPlan,
    stated_version,
    version_or_none,
)
from heterorl.coordinator.store.database import Connection, answer_to_order, get_meta, remember_order, set_meta
from heterorl.coordinator.versions import lineage, pull_plans
from heterorl.coordinator.versions.chain import Chain

_ORDER, _KIND = "rollback_to", "rollback"
_ID = "rollback_id"
"""Key of meta: the order's request id; empty once the learner refused it."""


def ordered(connection: Connection) -> int | None:
    """The version to go back to, or None without an order.
    A refused order stays for operators until it is replaced."""
    return version_or_none(int(get_meta(connection, _ORDER) or NO_VERSION))


def open_order(connection: Connection) -> tuple[int | None, str]:
    """Version and request id of an order that is not refused."""
    request_id = get_meta(connection, _ID) or ""
    return ordered(connection) if request_id else None, request_id


def refuse(connection: Connection, *, request_id: str) -> int | None:
    """Note that the learner cannot carry out the order of this id.
    Returns its version. An order given since, also an equal one, stays open."""
    version, current = open_order(connection)
    if version is None or request_id != current:
        return None
    set_meta(connection, _ID, "")
    return version


def is_known(connection: Connection, request_id: str) -> bool:
    """Whether an order was given under this id before."""
    return answer_to_order(connection, _KIND, request_id) is not None


def place(connection: Connection, *, to_version: int | None, request_id: str) -> None:
    """Replace the order (None cancels it).
    Raises InvalidRequest: no id; UnknownVersion: the version is missing, abandoned, or cannot be rebuilt."""
    if not request_id or (to_version is not None and to_version < 0):
        raise InvalidRequest("request_id must not be empty, to_version at least -1")
    if is_known(connection, request_id):
        return
    if to_version is not None:
        _ways(connection, to_version)
    set_meta(connection, _ORDER, str(stated_version(to_version)))
    set_meta(connection, _ID, request_id)
    remember_order(connection, _KIND, request_id, "")


def needed(connection: Connection) -> frozenset[Digest]:
    """Payloads from which the learner gets the ordered state, at any time.
    A refused order needs none."""
    version, _ = open_order(connection)
    try:
        ways = () if version is None else _ways(connection, version)
    except UnknownVersion:
        # Damaged since: no payload helps any more.
        return frozenset()
    return frozenset(payload.digest for way in ways for payload in way.payloads)


def restorable(connection: Connection) -> tuple[int, ...]:
    """Versions that `place` would take, ascending, without the head."""
    chain, head = Chain(connection), lineage.head_version(connection)
    if head is None:
        return ()
    into: defaultdict[int, list[PayloadRef]] = defaultdict(list)
    for payload in chain.payloads():
        into[payload.to_version].append(payload)
    found = (_undone(into, head) | _rebuilt(into)) - {head}
    return tuple(version for version in sorted(found) if chain.is_in_lineage(version))


def _undone(into: Mapping[int, Sequence[PayloadRef]], head: int) -> set[int]:
    """Versions whose deltas to the head cost less than a snapshot.
    The learner can undo these deltas."""
    cost, whole = {head: 0}, math.inf
    # A payload leads to a later version than it begins at.
    for version in sorted(into, reverse=True):
        for payload in into[version] if version in cost else ():
            total = cost[version] + payload.num_bytes
            if payload.kind is PayloadKind.SNAPSHOT:
                whole = min(whole, total)
            else:
                cost[payload.from_version] = min(total, cost.get(payload.from_version, total))
    return {version for version, total in cost.items() if total < whole}


def _rebuilt(into: Mapping[int, Sequence[PayloadRef]]) -> set[int]:
    """Versions that a snapshot and deltas lead to."""
    found: set[int] = set()
    for version in sorted(into):
        if any(each.kind is PayloadKind.SNAPSHOT or each.from_version in found for each in into[version]):
            found.add(version)
    return found


def settle(connection: Connection, manifest: Manifest) -> None:
    """End the order if a published version has its state."""
    version = ordered(connection)
    if version is not None and Chain(connection).state_root(version) == manifest.state_root:
        set_meta(connection, _ORDER, str(NO_VERSION))


def _ways(connection: Connection, version: int) -> tuple[PullPlan, ...]:
    """Plans to get a version's state; one is enough.
    One leads from it to the head and is undone, the other from a snapshot to it."""
    chain = Chain(connection)
    root = chain.state_root(version)
    if root is None or not chain.is_in_lineage(version):
        raise UnknownVersion(f"version {version} does not exist in the lineage")
    plan = functools.partial(pull_plans.plan, chain, merged_into=pull_plans.no_merged)
    # To the head.
    there = plan(have_version=version, have_root=root, want_version=None)
    found = [] if there.kind is PlanKind.SNAPSHOT else [there]
    try:
        found.append(plan(have_version=None, have_root="", want_version=version))
    except UnknownVersion:
        if not found:
            raise UnknownVersion(f"version {version} cannot be rebuilt: its payloads were deleted") from None
    return tuple(found)
