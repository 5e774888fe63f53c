"""The durable queue of groups, and its order to the learner.

Store operations. Groups go into versions in the order of their leases, as many for each version as the learner stated.
A group that became too stale is dropped and counted, and its prompt is handed out again. A site's share binds
only while another site has groups. No site starves:

    oldest    the oldest policy first; with a share, sites below it first
    newest    as in arXiv 2508.17850: the first group of the newest version if it is newer than any taken before, else
              the first to arrive of all at most D versions behind the newest taken; D is half of the staleness bound.
              That program skips older groups. Here every LATE_EVERY-th group is from behind the window, the one that
              expires first, and each group while the window is empty.
"""

from __future__ import annotations

import functools
import json
import logging
import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from heterorl.common.errors import MalformedPayload
from heterorl.common.types.common import SiteId
from heterorl.common.types.rollout import DropReason, GroupId, LeasedGroup, SealedGroup
from heterorl.common.types.sample import SampleKind, kind_of
from heterorl.common.wire.common_messages import bytes_digest
from heterorl.common.wire.sealed_groups import read_sealed
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.coordinator.groups import ledger, schedule, work_assignments
from heterorl.coordinator.groups.schedule import seed_of
from heterorl.coordinator.sample_ring import SampleRing
from heterorl.coordinator.sites import quarantine
from heterorl.coordinator.sites.sites import Quotas
from heterorl.coordinator.store.database import NUMBERS, Connection, get_meta
from heterorl.coordinator.versions import lineage

Order = Literal["oldest", "newest"]
Waiting = Mapping[tuple[str, int], deque[int]]
"""Arrivals of pending groups by site and version, in order."""
LATE_EVERY = 4
"""Under `newest`, one group of so many is from behind the window while there is one."""


def newest_first(version: int, arrival: int, *, newest_taken: int) -> tuple[int, int, int]:
    """Rank of a waiting group under `newest`: the smallest is next.
    Its last number is `arrival`."""
    return (0, -version, arrival) if version > newest_taken else (1, 0, arrival)


@dataclass(slots=True, kw_only=True)
class SiteOrder:
    """The order of sites between leases.

    `window` is the groups of a batch, `share` a site's largest part of it. In memory: a restart begins a new window.
    """

    order: Order
    share: float
    window: int
    _recent: deque[str] = field(default_factory=deque)
    _num_passed: int = 0
    """Groups taken from the window since the last one from behind it."""

    def is_late_next(self, *, has_late: bool, has_others: bool) -> bool:
        """Whether the next group is from behind the window; counts the answer."""
        if not has_late:
            return False
        if has_others and self._num_passed < LATE_EVERY - 1:
            self._num_passed += 1
            return False
        self._num_passed = 0
        return True

    @property
    def is_plain(self) -> bool:
        """Whether the order is by policy only, not by site."""
        return self.order == "oldest" and self.share >= 1.0

    @property
    def cap(self) -> int:
        """Most groups of one site among any `window` groups in a row.
        It binds while another site has groups."""
        return max(1, math.floor(self.share * self.window))

    def next(self, ranks: Mapping[str, tuple[int, ...]]) -> str:
        """The site to serve next.
        `ranks` are (policy version, arrival) or from `newest_first`, the smallest first."""
        assert ranks, "asked only while there are groups"
        served = Counter(self._recent)
        counts = {site: served[site] for site in ranks}
        # If all are at their share, those with the fewest groups: two sites with a share of a third get a half each.
        bound = max(self.cap, min(counts.values()) + 1)
        below = {site for site in ranks if counts[site] < bound}
        chosen = min(below, key=lambda site: ranks[site])
        self._recent.append(chosen)
        while len(self._recent) >= max(1, self.window):
            self._recent.popleft()
        return chosen


LEASE_BYTES = 4 << 20
"""Approximate bytes of one lease: it ends with the step that reaches them."""
LEASE_STEP = 16
"""Groups read at once, which bounds the memory above LEASE_BYTES."""
DROPPED_AT_ONCE = 1000
"""Groups dropped by one statement, and by one lease, so that transactions stay short."""
_STALE = "SELECT arrival FROM groups WHERE state = 'pending' AND oldest_version < ?"
_WHERE_ID = "site = ? AND incarnation = ? AND sequence = ?"
_LOG = logging.getLogger(__name__)


def _best(ranks: Iterable[tuple[str, tuple[int, ...]]]) -> dict[str, tuple[int, ...]]:
    best: dict[str, tuple[int, ...]] = {}
    for site, rank in ranks:
        best[site] = min(best.get(site, rank), rank)
    return best


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """Store operations under the run's bounds; `quotas` and `site_order` live in memory."""

    config: CoordinatorConfig
    quotas: Quotas
    site_order: SiteOrder
    ring: SampleRing

    @classmethod
    def of(cls, config: CoordinatorConfig, ring: SampleRing) -> Queue:
        """The queue of a configuration; leaving groups may enter the ring."""
        site_order = SiteOrder(
            order=config.lease_order, share=config.site_batch_share, window=config.groups_per_version
        )
        return cls(config=config, quotas=Quotas(config), site_order=site_order, ring=ring)

    def lease(self, connection: Connection, *, count: int, head: int, now: float) -> list[LeasedGroup]:
        """Lease up to `count` groups in order, fewer if they are large.
        Drops some stale groups; `has_stale` tells whether more are left."""
        oldest = self._oldest_usable(connection, head=head, now=now)
        rows = connection.execute(f"{_STALE} LIMIT {DROPPED_AT_ONCE}", (oldest,)).fetchall()
        self._drop_at(connection, [arrival for (arrival,) in rows], DropReason.STALE_AT_LEASE)
        leased: list[LeasedGroup] = []
        num_bytes = 0
        # Once for a lease: read again for each group, 2048 waiting ones took the store's thread a quarter of a second.
        waiting = {} if self.site_order.is_plain else pending_arrivals(connection)
        superseded_s = functools.cache(
            functools.partial(lineage.superseded_s, connection, reach=self.config.max_staleness_versions + 1, now=now)
        )
        # Go on while damaged groups leave room: only arrivals wake the learner's stream.
        while num_bytes < LEASE_BYTES and (
            rows := self._next(connection, waiting, min(LEASE_STEP, count - len(leased)), head, oldest)
        ):
            for arrival, digest, data, arrived, published, version, assignment, *key in rows:
                group = _verified(data, digest)
                if group is None or len(data) > self.config.max_group_bytes:
                    _LOG.critical(
                        "group %s is dropped, its prompt goes out again: wrong digest, or max_message_bytes too low",
                        key,
                    )
                    group = None
                reason = DropReason.INVALID
                if group is not None and lineage.abandoned_span(connection, group.versions) is not None:
                    # Its oldest version is in the lineage, a later one was abandoned.
                    group, reason = None, DropReason.UNKNOWN_VERSION
                if group is None:
                    self.drop(connection, [GroupId(site=key[0], incarnation=key[1], sequence=key[2])], reason)
                    continue
                connection.execute("UPDATE groups SET state = 'leased' WHERE arrival = ?", (arrival,))
                num_bytes += len(data)
                leased.append(
                    LeasedGroup(
                        sealed=group,
                        superseded_s=superseded_s(version),
                        policy_age_s=max(0.0, now - published),
                        queue_age_s=max(0.0, now - arrived),
                        seed=seed_of(assignment, seed=self.config.seed),
                        variant=lineage.variant_of(connection, group.oldest_version, group.state_root),
                        wants_note=self.ring.wants(SampleKind.CONSUMED, arrival),
                    )
                )
        return leased

    def has_stale(self, connection: Connection, *, head: int, now: float) -> bool:
        oldest = self._oldest_usable(connection, head=head, now=now)
        return connection.execute(f"{_STALE} LIMIT 1", (oldest,)).fetchone() is not None

    def _next(
        self, connection: Connection, waiting: Waiting, count: int, head: int, oldest: int
    ) -> list[tuple[Any, ...]]:
        # A group that would be too old at its step waits: its step may come sooner if groups before it are dropped.
        bound = self.config.max_staleness_versions
        count, first_version = next_lease(connection, head=head, bound=bound, count=count)
        first_version = max(first_version, oldest)
        if self.site_order.is_plain or count < 1:
            return oldest_pending(connection, count, first_version=first_version)
        firsts = {arrivals[0]: key for key, arrivals in waiting.items() if arrivals and key[1] >= first_version}
        ranks = self._ranks(connection, firsts) if firsts else {}
        if not ranks:
            return []
        arrival = ranks[self.site_order.next(ranks)][-1]
        waiting[firsts[arrival]].popleft()
        return pending_at(connection, arrival)

    def _ranks(self, connection: Connection, firsts: Mapping[int, tuple[str, int]]) -> dict[str, tuple[int, ...]]:
        """Each site's smallest rank.
        Under `newest` of the groups within the window, or of those behind it."""
        if self.site_order.order != "newest":
            return _best((site, (version, arrival)) for arrival, (site, version) in firsts.items())
        taken = newest_taken(connection)
        floor = taken - self.config.max_staleness_versions // 2
        late = _best((site, (version, arrival)) for arrival, (site, version) in firsts.items() if version < floor)
        others = _best(
            (site, newest_first(version, arrival, newest_taken=taken))
            for arrival, (site, version) in firsts.items()
            if version >= floor
        )
        return late if self.site_order.is_late_next(has_late=bool(late), has_others=bool(others)) else others

    def _oldest_usable(self, connection: Connection, *, head: int, now: float) -> int:
        config = self.config
        return lineage.oldest_usable(
            connection, head=head, max_versions=config.max_staleness_versions, max_s=config.max_superseded_s, now=now
        )

    def consume(
        self, connection: Connection, ids: Sequence[GroupId], *, version: int, parent: int
    ) -> tuple[list[GroupId], str]:
        """Move all groups into a version, or none.
        If none, drops stale groups; returns the ones in the way, and the reason."""
        if len(set(ids)) != len(ids):
            return list(ids), "a group is named twice"
        missing: list[GroupId] = []
        stale: list[GroupId] = []
        arrivals: list[int] = []
        for group_id in ids:
            row = connection.execute(
                f"SELECT state, oldest_version, arrival FROM groups WHERE {_WHERE_ID}", _key(group_id)
            ).fetchone()
            if row is None or row[0] not in ("leased", "pending"):
                missing.append(group_id)
            elif parent - row[1] > self.config.max_staleness_versions:
                stale.append(group_id)
            else:
                arrivals.append(row[2])
        if missing or stale:
            self.drop(connection, stale, DropReason.STALE_AT_COMMIT)
            return missing + stale, f"{len(missing)} groups are not available, {len(stale)} became too stale"
        schedule.note_rewards(connection, self._contents(connection, arrivals), self.config.difficulty)
        for arrival in arrivals:
            kept = self._content(connection, arrival, SampleKind.CONSUMED)
            if kept is not None:
                self.ring.keep_group(connection, kept, None, version=version)
        connection.executemany(
            f"UPDATE groups SET state = 'consumed', version = ?, payload = NULL WHERE {_WHERE_ID}",
            [(version, *_key(group_id)) for group_id in ids],
        )
        ledger.add(connection, ledger.CONSUMED, len(ids))
        return [], ""

    def drop(self, connection: Connection, ids: Sequence[GroupId], reason: DropReason, *, detail: str = "") -> int:
        """Drop pending or leased groups; returns how many.
        Samples show `detail`. Some reasons reopen the prompts."""
        arrivals: list[int] = []
        for group_id in ids:
            row = connection.execute(f"SELECT arrival FROM groups WHERE {_WHERE_ID}", _key(group_id)).fetchone()
            arrivals += row or ()
        return self._drop_at(connection, arrivals, reason, detail=detail)

    def _drop_at(self, connection: Connection, arrivals: Sequence[int], reason: DropReason, *, detail: str = "") -> int:
        """The same by arrival numbers, in a few statements for each thousand."""
        num_dropped = 0
        for first in range(0, len(arrivals), DROPPED_AT_ONCE):
            some = list(dict.fromkeys(arrivals[first : first + DROPPED_AT_ONCE]))
            kept = [self._content(connection, arrival, kind_of(reason)) for arrival in some]
            if reason is DropReason.UNIFORM and self.config.difficulty.is_on:
                schedule.note_rewards(connection, self._contents(connection, some), self.config.difficulty)
            rows = connection.execute(
                "UPDATE groups SET state = 'dropped', reason = ?, payload = NULL WHERE state IN ('pending', 'leased')"
                f" AND arrival IN {NUMBERS} RETURNING assignment",
                (reason.value, json.dumps(some)),
            ).fetchall()
            num_dropped += len(rows)
            ledger.add(connection, ledger.account_of(reason), len(rows))
            for group in filter(None, kept):
                self.ring.keep_dropped(connection, group, reason, detail=detail)
            if reason in work_assignments.REOPENED:
                work_assignments.reopen(connection, [assignment for (assignment,) in rows])
        return num_dropped

    def drop_of_site(self, connection: Connection, site: SiteId, *, detail: str = "") -> int:
        rows = connection.execute("SELECT arrival FROM groups WHERE state = 'pending' AND site = ?", (site,)).fetchall()
        return self._drop_at(connection, [arrival for (arrival,) in rows], DropReason.QUARANTINED, detail=detail)

    @staticmethod
    def _contents(connection: Connection, arrivals: Sequence[int]) -> Iterator[bytes | None]:
        for arrival in arrivals:
            yield connection.execute("SELECT payload FROM groups WHERE arrival = ?", (arrival,)).fetchone()[0]

    def _content(self, connection: Connection, arrival: int, kind: SampleKind) -> SealedGroup | None:
        """A group to keep as a sample; None if unwanted or unreadable."""
        if not self.ring.wants(kind, arrival):
            return None
        data, digest = connection.execute("SELECT payload, digest FROM groups WHERE arrival = ?", (arrival,)).fetchone()
        return None if data is None else _verified(data, digest)

    def drop_abandoned(self, connection: Connection, versions: Sequence[int]) -> int:
        """Drop pending and leased groups of abandoned versions.
        No learner can get their weights."""
        arrivals = [
            arrival
            for version in versions
            for (arrival,) in connection.execute(
                "SELECT arrival FROM groups WHERE state IN ('pending', 'leased') AND oldest_version = ?", (version,)
            )
        ]
        return self._drop_at(connection, arrivals, DropReason.UNKNOWN_VERSION)

    def return_leased(self, connection: Connection, *, held: Iterable[GroupId] = ()) -> int:
        """Return the learner's groups to the queue, except `held` ones.
        Groups of quarantined sites are dropped."""
        keep = {_key(group_id) for group_id in held}
        rows = connection.execute("SELECT site, incarnation, sequence FROM groups WHERE state = 'leased'").fetchall()
        back = [tuple(row) for row in rows if tuple(row) not in keep]
        connection.executemany(f"UPDATE groups SET state = 'pending' WHERE {_WHERE_ID}", back)
        for site in quarantine.convicted_sites(connection):
            self.drop_of_site(connection, site)
        return len(back)


def abandon_consumed(connection: Connection, versions: Sequence[int]) -> None:
    """Count groups that abandoned versions consumed as dropped; reopen their prompts."""
    for version in versions:
        rows = connection.execute(
            "UPDATE groups SET state = 'dropped', reason = ? WHERE version = ? AND state = 'consumed'"
            " RETURNING assignment",
            (DropReason.LINEAGE_ABANDONED.value, version),
        ).fetchall()
        ledger.add(connection, ledger.CONSUMED, -len(rows))
        ledger.add(connection, ledger.account_of(DropReason.LINEAGE_ABANDONED), len(rows))
        work_assignments.reopen(connection, [assignment for (assignment,) in rows])


def undo_lease(connection: Connection, ids: Iterable[GroupId]) -> None:
    """Return leased groups that were not sent."""
    connection.executemany(
        f"UPDATE groups SET state = 'pending' WHERE state = 'leased' AND {_WHERE_ID}",
        [_key(group_id) for group_id in ids],
    )


def _key(group_id: GroupId) -> tuple[str, str, int]:
    return group_id.site, group_id.incarnation, group_id.sequence


def _verified(data: bytes, digest: str) -> SealedGroup | None:
    if bytes_digest(data) != digest:
        return None
    try:
        return read_sealed(data)
    except MalformedPayload:
        return None


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
