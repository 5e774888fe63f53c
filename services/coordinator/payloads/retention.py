"""Pull leases, and which published payloads may be deleted.

A lease covers all payloads of one plan. Each frame sent renews it, as long as a pull may last whose every frame comes
within STALL_S. Leases are in memory; a restart waits one term before it deletes.

The decision is pure. Versions are nodes, payloads are edges. Kept are:

    each delta into the newest `window` versions
    the cheapest path, with its snapshot, to the oldest version that the staleness bound allows and to each later one
    that no delta leads to; where it is not verified, also one to the next version with a verified path
    the path from each of the newest two verified snapshots to the head: one damaged file costs no rebuild
    the cheapest path from each version in use or leased to the head and to the oldest allowed version
    payloads that are leased or being read
    snapshots newer than the newest verified one

All payloads stay while no verified path leads to the head.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from heterorl.common.pull.fetcher import STALL_S
from heterorl.common.types.common import Digest
from heterorl.common.types.policy import PayloadKind, PayloadRef
from heterorl.common.weights.payload import SLOW_BYTES
from heterorl.coordinator.versions.pull_plans import cheapest_way

MAX_LEASES = 4096
"""Plans remembered; beyond, the longest silent one is forgotten, and its caller plans again."""
_Plan = tuple[int | None, tuple[Digest, ...]]


class PullLeases:
    """Plans with their ends, monotonic instants."""

    def __init__(self, *, term_s: float, started: float) -> None:
        self._term_s = term_s
        self._is_known_from = started + term_s
        self._ends: dict[_Plan, tuple[float, float]] = {}
        """When each lease ends, and the latest end that frames give it."""
        self._plans_of: defaultdict[Digest, list[_Plan]] = defaultdict(list)
        self._reading: Counter[Digest] = Counter()

    def grant(self, *, have_version: int | None, payloads: tuple[PayloadRef, ...], now: float) -> None:
        if payloads:
            plan = (have_version, tuple(payload.digest for payload in payloads))
            num_frames = sum(payload.num_bytes // SLOW_BYTES + 1 for payload in payloads)
            self._renew(plan, now, latest=now + self._term_s + num_frames * STALL_S)
            while len(self._ends) > MAX_LEASES:
                self._forget(next(iter(self._ends)))

    @contextmanager
    def reading(self, digest: Digest) -> Iterator[None]:
        self._reading[digest] += 1
        try:
            yield
        finally:
            self._reading[digest] -= 1
            if not self._reading[digest]:
                del self._reading[digest]

    def touch(self, digest: Digest, now: float) -> None:
        """Renew the leases of a payload's plans."""
        # Called for each frame, so it must not read all leases.
        for plan in [*self._plans_of.get(digest, ())]:
            self._renew(plan, now, latest=self._ends[plan][1])

    def are_known(self, now: float) -> bool:
        """Whether all plans of an earlier process have ended."""
        return now >= self._is_known_from

    def payloads(self, now: float) -> frozenset[Digest]:
        self._expire(now)
        return frozenset(digest for plan in self._ends for digest in plan[1]) | frozenset(self._reading)

    def versions(self, now: float) -> frozenset[int]:
        self._expire(now)
        return frozenset(start for start, _ in self._ends if start is not None)

    def _renew(self, plan: _Plan, now: float, *, latest: float) -> None:
        # Put last: the order is by last renewal.
        if self._ends.pop(plan, None) is None:
            for digest in plan[1]:
                self._plans_of[digest].append(plan)
        self._ends[plan] = min(now + self._term_s, latest), latest

    def _forget(self, plan: _Plan) -> None:
        del self._ends[plan]
        for digest in plan[1]:
            self._plans_of[digest].remove(plan)
            if not self._plans_of[digest]:
                del self._plans_of[digest]

    def _expire(self, now: float) -> None:
        for plan in [plan for plan, (end, _) in self._ends.items() if end <= now]:
            self._forget(plan)


KEPT_SNAPSHOTS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """Published payloads over versions.
    `lineage` ascends to the head; `verified` are versions with a verified snapshot."""

    payloads: Sequence[PayloadRef]
    lineage: Sequence[int]
    verified: Collection[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Pulls that must stay possible.
    `in_use` are versions; `window` is at least `staleness`."""

    window: int
    staleness: int
    in_use: Collection[int]
    leased: Collection[Digest]


@dataclass(frozen=True, slots=True, kw_only=True)
class Retirement:
    """Payloads to delete, and the path that must be proved before.
    `way` is a verified path to the head, empty if none needs a proof."""

    payloads: tuple[PayloadRef, ...]
    way: tuple[PayloadRef, ...]


def decide_retirement(graph: Graph, needs: Needs) -> Retirement:
    """Choose the payloads that no sampler needs."""
    if not graph.lineage:
        return Retirement(payloads=(), way=())
    head = graph.lineage[-1]
    lowest = next(version for version in graph.lineage if version >= head - needs.staleness)
    ways = _Ways(graph)
    way = ways.cheapest(None, head)
    if not way:
        # No verified snapshot leads to the head.
        return Retirement(payloads=(), way=())
    kept = {*way, *ways.deltas_after(head - needs.window), *ways.from_snapshots(lowest)}
    kept.update(payload for payload in graph.payloads if payload.digest in needs.leased)
    kept.update(ways.of_snapshots(head))
    for start in needs.in_use:
        for goal in (lowest, head):
            kept.update(ways.cheapest(start, goal) if start < goal else ())
    return Retirement(payloads=tuple(payload for payload in graph.payloads if payload not in kept), way=way)


class _Ways:
    """Paths over the lineage from a verified snapshot or a held version."""

    def __init__(self, graph: Graph) -> None:
        self._lineage = graph.lineage
        self._verified = [version for version in graph.lineage if version in graph.verified]
        self._into: defaultdict[int, list[PayloadRef]] = defaultdict(list)
        lineage = set(graph.lineage)
        for payload in graph.payloads:
            if payload.to_version in lineage:
                self._into[payload.to_version].append(payload)
        payloads = (payload for into in self._into.values() for payload in into)
        self._snapshots = {each.to_version: each for each in payloads if each.kind is PayloadKind.SNAPSHOT}

    def cheapest(self, start: int | None, goal: int) -> tuple[PayloadRef, ...]:
        def into(version: int) -> list[PayloadRef]:
            return self._into[version] if version in self._verified else self._deltas_into(version)

        return cheapest_way(into, have_version=start, want_version=goal)

    def deltas_after(self, version: int) -> Iterable[PayloadRef]:
        for newer in [newer for newer in self._into if newer > version]:
            yield from self._deltas_into(newer)

    def from_snapshots(self, lowest: int) -> Iterable[PayloadRef]:
        """Paths to `lowest` and newer versions, from verified snapshots if possible.
        Deltas between them are kept already."""
        is_reached = False
        for version in self._lineage[bisect_left(self._lineage, lowest) :]:
            has_delta = version > lowest and bool(self._deltas_into(version))
            if is_reached and has_delta:
                continue
            way = self.cheapest(None, version)
            is_reached = bool(way)
            if not way and not has_delta:
                way = cheapest_way(lambda goal: self._into[goal], have_version=None, want_version=version)
            yield from way

    def of_snapshots(self, head: int) -> Iterable[PayloadRef]:
        """Newest verified snapshots, their paths to the head, and newer unverified snapshots."""
        newest = [version for version in self._verified if version in self._snapshots][-KEPT_SNAPSHOTS:]
        for version in newest:
            yield self._snapshots[version]
            # Empty if only another snapshot leads to the head.
            yield from cheapest_way(self._deltas_into, have_version=version, want_version=head)
        for version, payload in self._snapshots.items():
            if not newest or version > newest[-1]:
                yield payload

    def _deltas_into(self, version: int) -> list[PayloadRef]:
        return [payload for payload in self._into[version] if payload.kind is not PayloadKind.SNAPSHOT]
