"""Registered sites: when each was last seen, what it may push.

Sites are durable; the rest is in memory, by the monotonic clock. A refusal by a quota is free and says when to retry. A
group larger than the burst passes when the bucket is full. A restart fills buckets.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from heterorl.common.errors import NotRegistered
from heterorl.common.process import metrics
from heterorl.common.types.common import SiteId
from heterorl.common.types.run import CanaryReport, Heartbeat, Registration, SiteStatus
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.coordinator.sites import incarnations, quarantine
from heterorl.coordinator.store import tallies
from heterorl.coordinator.store.database import Connection, get_meta, set_meta

_LOG = logging.getLogger(__name__)
MAX_SEEN = 16
"""Incarnations of a site whose last sign of life is remembered, the most recent ones."""
Holder = tuple[str, str]
GROUPS_TIMED = 20
"""Groups over which the mean duration of a site's groups decays."""


MAX_WAIT_S = 60.0
"""Longest delay asked for, seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """A token bucket's fill rate and capacity.
    A charge larger than the rest takes its level below 0. Times are monotonic seconds."""

    per_s: float
    burst: float


def level_at(now: float, rate: Rate, bucket: tuple[float, float] | None) -> float:
    """A bucket's level now; a new one is full.
    `bucket` is an earlier level and its instant."""
    if bucket is None:
        return rate.burst
    level, since = bucket
    return min(rate.burst, level + max(0.0, now - since) * rate.per_s)


def wait_s(level: float, rate: Rate, amount: float) -> float:
    """Seconds until the amount may be taken; 0 for now."""
    needed = min(amount, rate.burst)
    return 0.0 if level >= needed else min(MAX_WAIT_S, (needed - level) / rate.per_s)


class Quotas:
    """The buckets of all sites and their refusals.

    `take` runs in store operations, other threads read single entries.
    """

    def __init__(self, config: CoordinatorConfig) -> None:
        self._pending_limit = config.site_pending_bytes
        rates = {"groups": config.site_groups_per_s, "bytes": config.site_bytes_per_s}
        self._rates = {
            name: Rate(per_s=per_s, burst=max(1.0, per_s * config.site_burst_s))
            for name, per_s in rates.items()
            if per_s > 0
        }
        self._buckets: dict[tuple[str, str], tuple[float, float]] = {}
        """The level of each site's buckets, and its instant."""
        self.full: set[str] = set()
        """Sites whose newest group was refused, because theirs in the queue leave it no room."""
        self._refused: Counter[tuple[str, str]] = Counter()

    def take(self, site: str, *, num_bytes: int, pending_bytes: int, now: float) -> tuple[float, str]:
        """Charge one group to a site, or refuse it without a charge.
        Returns (0, ""), or the seconds to wait and the reason."""
        if pending_bytes + num_bytes > self._pending_limit:
            self._refuse(site, "pending_bytes")
            self.full.add(site)
            return 1.0, f"the site has {pending_bytes} bytes in the queue; site_pending_bytes is {self._pending_limit}"
        self.full.discard(site)
        amounts = {"groups": 1.0, "bytes": float(num_bytes)}
        levels = {name: level_at(now, rate, self._buckets.get((site, name))) for name, rate in self._rates.items()}
        for name, rate in self._rates.items():
            delay_s = wait_s(levels[name], rate, amounts[name])
            if delay_s > 0:
                self._refuse(site, name)
                return delay_s, f"quota: site_{name}_per_s is {rate.per_s:g}; push again in {delay_s:.2f} s"
        for name, level in levels.items():
            self._buckets[site, name] = level - amounts[name], now
        return 0.0, ""

    def _refuse(self, site: str, quota: str) -> None:
        self._refused[site, quota] += 1
        metrics.QUOTA_REFUSALS.labels(metrics.SITES.of(site), quota).inc()

    def used(self, site: str, now: float, *, pending_bytes: int) -> dict[str, float]:
        shares = {"pending_bytes": pending_bytes / self._pending_limit}
        for name, rate in self._rates.items():
            level = level_at(now, rate, self._buckets.get((site, name)))
            shares[name] = 1.0 - level / rate.burst
        return {name: min(1.0, max(0.0, share)) for name, share in shares.items()}

    def refusals_of(self, site: str) -> int:
        return sum(self._refused[site, quota] for quota in ("pending_bytes", *self._rates))


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteRows:
    """The store's rows of all sites, by site or holder."""

    incarnations: Sequence[incarnations.Row]
    holdings: Mapping[Holder, tuple[int, int]]
    """Each holder's assignments, and how many are away."""
    quarantines: Mapping[str, str]
    failures: Mapping[str, int]
    waiting_bytes: Mapping[str, int]
    revoked: Mapping[str, int]
    problems: Mapping[str, str]
    """The coordinator's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """A holder's declared round-trip delay and work ahead (bounded), in seconds."""

    delay_s: float = 0.0
    ahead_s: float = 0.0


@dataclass(slots=True)
class _Seen:
    at: float
    policy_version: int = -1
    state_root: str = ""
    tokens_per_s: float = 0.0
    canary_difference: float | None = None
    apply_s: float = 0.0
    problem: str = ""
    is_stopped: bool = False


class Sites:
    """Registrations and last signs of life.

    The event loop writes signs of life; other threads read them, and the store's may forget an incarnation.
    """

    def __init__(self, *, max_work_ahead_s: float) -> None:
        self._seen: dict[str, dict[str, _Seen]] = {}
        """By site, then by incarnation."""
        self._max_work_ahead_s = max_work_ahead_s
        self._generation_s: dict[str, float] = {}

    def seen_at(self, holder: Holder) -> float | None:
        """Instant of a holder's last sign of life; None without one."""
        seen = self._of(*holder)
        return None if seen is None else seen.at

    def _of(self, site: str, incarnation: str) -> _Seen | None:
        return self._seen.get(site, {}).get(incarnation)

    def generation_s(self, site: str) -> float:
        """Decayed mean seconds of a site's groups; 0 before the first."""
        return self._generation_s.get(site, 0.0)

    def time_group(self, site: str, seconds: float) -> None:
        mean = self._generation_s.get(site, seconds)
        self._generation_s[site] = mean + (seconds - mean) / GROUPS_TIMED

    def granted_ahead_s(self, registration: Registration) -> float:
        return min(registration.work_ahead_s, self._max_work_ahead_s)

    def see(self, site: str, incarnation: str, now: float, *, policy_version: int | None = None) -> None:
        seen = self._noted(site, incarnation, now)
        seen.at, seen.is_stopped = now, False
        if policy_version is not None:
            seen.policy_version = policy_version

    def beat(self, beat: Heartbeat, now: float) -> None:
        seen = self._noted(beat.site, beat.incarnation, now)
        seen.at = now
        seen.policy_version = beat.policy_version
        seen.state_root = beat.state_root
        seen.tokens_per_s = beat.tokens_per_s
        seen.apply_s = beat.apply_s
        seen.problem = beat.problem
        seen.is_stopped = beat.is_stopped

    def note_canary(self, report: CanaryReport, difference: float | None, now: float) -> None:
        self._noted(report.site, report.incarnation, now).canary_difference = difference

    def _noted(self, site: str, incarnation: str, now: float) -> _Seen:
        """The entry of an incarnation.
        Beyond MAX_SEEN a new one replaces its site's longest silent one."""
        own = self._seen.setdefault(site, {})
        seen = own.get(incarnation)
        if seen is None:
            if len(own) >= MAX_SEEN:
                # Copied: a registration on the store's thread may remove one.
                own.pop(min(own.copy().items(), key=lambda each: each[1].at)[0], None)
            seen = own[incarnation] = _Seen(at=now)
        return seen

    def versions_in_use(self, since: float) -> frozenset[int]:
        """Versions that sites seen since then generate with."""
        found = (seen for own in [*self._seen.values()] for seen in [*own.values()])
        return frozenset(seen.policy_version for seen in found if seen.at >= since)

    def register(self, connection: Connection, registration: Registration) -> int:
        """Store a registration; returns the highest known sequence of the incarnation."""
        key = (registration.site, registration.incarnation)
        connection.execute(
            "INSERT INTO sites (site, incarnation, engine, dtype, variant, max_delay_s, work_ahead_s)"
            " VALUES (?, ?, ?, ?, ?, ?, ?)"
            " ON CONFLICT (site, incarnation) DO UPDATE SET engine = excluded.engine, dtype = excluded.dtype,"
            " variant = excluded.variant, max_delay_s = excluded.max_delay_s, work_ahead_s = excluded.work_ahead_s",
            (
                *key,
                registration.engine,
                registration.dtype,
                registration.variant,
                registration.max_delay_s,
                self.granted_ahead_s(registration),
            ),
        )
        tallies.look_soon(connection, registration.site)
        for forgotten in incarnations.note(connection, *key):
            self._seen.get(registration.site, {}).pop(forgotten, None)
        missing = incarnations.pass_over(connection, *key, lowest=registration.lowest_sequence)
        if missing:
            _LOG.warning(
                "site %s, incarnation %s, settled %d groups that this store lacks: they are passed over", *key, missing
            )
        dense, beyond = connection.execute(
            "SELECT watermark, (SELECT max(sequence) FROM beyond_watermark b"
            " WHERE b.site = sites.site AND b.incarnation = sites.incarnation)"
            " FROM sites WHERE site = ? AND incarnation = ?",
            key,
        ).fetchone()
        return max(int(dense), int(beyond or 0))

    def require(self, connection: Connection, site: str, incarnation: str) -> None:
        """Raises NotRegistered: the incarnation must register first."""
        found = connection.execute("SELECT 1 FROM sites WHERE site = ? AND incarnation = ?", (site, incarnation))
        if found.fetchone() is None:
            raise NotRegistered(f"site {site}, incarnation {incarnation}, is not registered")

    def variant(self, connection: Connection, site: str, incarnation: str) -> str:
        row = connection.execute("SELECT variant FROM sites WHERE site = ? AND incarnation = ?", (site, incarnation))
        return str((row.fetchone() or ("",))[0])

    def read(
        self,
        connection: Connection,
        *,
        window_groups: int,
        max_lost_share: float,
        holdings: Mapping[Holder, tuple[int, int]],
    ) -> SiteRows:
        """All sites: the newest incarnations, and the sum of others."""
        active = {site: {*own} for site, own in self._seen.copy().items()}
        for site, incarnation in holdings:
            active.setdefault(site, set()).add(incarnation)
        return SiteRows(
            incarnations=incarnations.shown(connection, active),
            holdings=holdings,
            quarantines=quarantine.read_reasons(connection),
            failures=quarantine.count_failures(connection, window_groups=window_groups),
            waiting_bytes=tallies.waiting_by_site(connection),
            revoked=revoked_sites(connection),
            problems=quarantine.lost_problems(connection, max_lost_share),
        )

    def statuses(self, rows: SiteRows, now: float, *, quotas: Quotas) -> tuple[SiteStatus, ...]:
        """Statuses of the sites read; may run on any thread."""
        statuses = []
        for row in rows.incarnations:
            site, incarnation = row.site, row.incarnation
            seen = self._of(site, incarnation)
            held, away = rows.holdings.get((site, incarnation), (0, 0))
            statuses.append(
                SiteStatus(
                    site=SiteId(site),
                    incarnation=incarnation,
                    policy_version=seen.policy_version if seen else -1,
                    state_root=seen.state_root if seen else "",
                    # A heartbeat may come after `now` was read.
                    last_seen_s=max(0.0, now - seen.at) if seen else -1.0,
                    groups_accepted=row.accepted,
                    groups_dropped=row.dropped,
                    tokens_per_s=seen.tokens_per_s if seen else 0.0,
                    work_leased=held,
                    work_away=away,
                    work_ahead_s=row.ahead_s,
                    canary_difference=seen.canary_difference if seen else None,
                    quarantine=rows.quarantines.get(site, ""),
                    apply_s=seen.apply_s if seen else 0.0,
                    problem=_problem(rows.revoked.get(site), seen) or rows.problems.get(site, ""),
                    is_revoked=site in rows.revoked,
                    variant=row.variant,
                    groups_failed=rows.failures.get(site, 0),
                    groups_refused=quotas.refusals_of(site),
                    quota_used=max(quotas.used(site, now, pending_bytes=rows.waiting_bytes.get(site, 0)).values()),
                    is_stopped=seen is not None and seen.is_stopped,
                )
            )
        return tuple(statuses)


def _problem(serial: int | None, seen: _Seen | None) -> str:
    if serial is not None:
        return f"its certificate {serial:x} is revoked, and its calls are refused"
    return seen.problem if seen else ""


def revoked_sites(connection: Connection) -> dict[str, int]:
    """Sites whose newest certificate is revoked, with its serial."""
    return dict(json.loads(get_meta(connection, "revoked_sites") or "{}"))


def note_revoked_sites(connection: Connection, serials: Container[int], by_site: Mapping[str, int]) -> None:
    """Keep which sites' newest certificates are revoked.
    A site that does not call any more is still known after a restart."""
    before = revoked_sites(connection)
    revoked = {site: serial for site, serial in {**before, **by_site}.items() if serial in serials}
    if revoked != before:
        set_meta(connection, "revoked_sites", json.dumps(revoked))


def declared(connection: Connection, holder: Holder) -> Declared:
    """The declaration of a holder; zeros if it never registered."""
    row = connection.execute(
        "SELECT max_delay_s, work_ahead_s FROM sites WHERE site = ? AND incarnation = ?", holder
    ).fetchone()
    return Declared() if row is None else Declared(delay_s=float(row[0]), ahead_s=float(row[1]))
