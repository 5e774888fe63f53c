"""Pull plans: the cheapest payloads from a sampler's version to another.

Versions are nodes, payloads are edges; a snapshot starts at None. A path costs the bytes of its payloads. `plan_pull`
is pure; `plan` is a store operation.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from heterorl.common.errors import UnknownVersion
from heterorl.common.types.policy import PayloadKind, PayloadRef, PlanKind, PullPlan, stated_version, version_or_none
from heterorl.coordinator.versions import lineage
from heterorl.coordinator.versions.chain import Chain, Into


def plan_pull(
    into: Into, *, have_version: int | None, want_version: int, base_version: int | None = None
) -> tuple[PlanKind, tuple[PayloadRef, ...], str]:
    """Choose the payloads to apply, in order, and say why.
    `into` gives the payloads that lead to a version; `base_version` needs no transfer. Raises UnknownVersion: no path
    leads to the version."""
    if have_version == want_version:
        return PlanKind.SAME, (), f"version {want_version} is already there"
    if base_version == want_version:
        return PlanKind.SAME, (), f"version {want_version} is the caller's base model"
    # Dijkstra backwards from the goal: only the versions between it and a start are visited.
    cost: dict[int | None, int] = {want_version: 0}
    via: dict[int | None, PayloadRef] = {}
    heap = [(0, *_rank(want_version))]
    while heap:
        spent, is_version, number = heapq.heappop(heap)
        version = number if is_version else None
        if spent > cost[version]:
            continue
        if version is None or version in (have_version, base_version):
            return _describe(version, want_version, via)
        for payload in into(version):
            is_whole = payload.kind is PayloadKind.SNAPSHOT
            start = None if is_whole else version_or_none(payload.from_version)
            if start is None and not is_whole:
                # A delta without a version before it cannot be applied.
                continue
            total = spent + payload.num_bytes
            if total < cost.get(start, total + 1):
                cost[start] = total
                via[start] = payload
                heapq.heappush(heap, (total, *_rank(start)))
    raise UnknownVersion(f"version {want_version} is no longer stored: no payloads lead to it")


def cheapest_way(into: Into, *, have_version: int | None, want_version: int) -> tuple[PayloadRef, ...]:
    """The payloads of `plan_pull`, empty if no path leads there."""
    try:
        return plan_pull(into, have_version=have_version, want_version=want_version)[1]
    except UnknownVersion:
        return ()


def _rank(version: int | None) -> tuple[bool, int]:
    """Rank of a version; None, where snapshots begin, wins at equal cost."""
    return version is not None, version or 0


def _describe(
    start: int | None, goal: int, via: dict[int | None, PayloadRef]
) -> tuple[PlanKind, tuple[PayloadRef, ...], str]:
    path: list[PayloadRef] = []
    while start != goal:
        path.append(via[start])
        start = path[-1].to_version
    num_bytes = sum(payload.num_bytes for payload in path)
    if path[0].kind is PayloadKind.SNAPSHOT:
        kind = PlanKind.SNAPSHOT
        reason = f"snapshot of version {path[0].to_version} and {len(path) - 1} deltas, {num_bytes} bytes"
    else:
        kind = PlanKind.CHAIN
        if len(path) == 1:
            kind = PlanKind.MERGED if path[0].kind is PayloadKind.MERGED else PlanKind.DELTA
        reason = f"{len(path)} deltas from version {path[0].from_version}, {num_bytes} bytes"
    num_merged = sum(payload.kind is PayloadKind.MERGED for payload in path)
    if num_merged:
        reason += f", {num_merged} of them merged"
    return kind, tuple(path), reason


MAX_MANIFEST_BYTES = 1 << 20
"""Bytes of a plan's manifests, beyond which only its target's is sent; half of the smallest max_message_bytes."""


def no_merged(_version: int) -> tuple[PayloadRef, ...]:
    """No merged delta leads anywhere."""
    return ()


def plan(
    chain: Chain,
    *,
    have_version: int | None,
    have_root: str,
    want_version: int | None,
    merged_into: Into,
    base_root: str = "",
) -> PullPlan:
    """Plan a pull, to the head if `want_version` is None.

    The caller's version counts only with the right state root. `base_root` is the state of the caller's base model.
    Raises UnknownVersion: the wanted version does not exist or was abandoned.
    """
    want = lineage.head_version(chain.connection) if want_version is None else want_version
    if want is None or not chain.is_in_lineage(want):
        where = f" in variant {chain.variant}" if chain.variant else ""
        raise UnknownVersion(f"version {stated_version(want)} does not exist{where} in the lineage")
    start, note = have_version, ""
    if have_version is not None and chain.state_root(have_version) != have_root:
        start, note = None, f"; version {have_version} of the caller is not the run's"

    def into(version: int) -> list[PayloadRef]:
        return [*chain.into(version), *merged_into(version)]

    kind, payloads, reason = plan_pull(
        into,
        have_version=start,
        want_version=want,
        # Version 0 can have the state of a base model.
        base_version=0 if chain.state_root(0) == base_root and chain.is_in_lineage(0) else None,
    )
    return PullPlan(
        kind=PlanKind(kind),
        target_version=want,
        payloads=payloads,
        manifests=_manifests(chain, [payload.to_version for payload in payloads]),
        reason=reason + note,
        signature=chain.signature(want) if payloads else b"",
    )


def _manifests(chain: Chain, versions: Sequence[int]) -> tuple[bytes, ...]:
    # Sizes first: a store operation must stay short, and a large model's manifest has hundreds of kilobytes.
    sizes = [chain.manifest_bytes(version) for version in versions]
    stated = versions if sum(sizes) <= MAX_MANIFEST_BYTES else versions[-1:]
    return tuple(chain.manifest(version) for version in stated)
