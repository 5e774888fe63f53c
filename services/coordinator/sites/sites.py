"""Registered sites, and the time each was last seen.

Sites are durable; the time is in memory, by the monotonic clock.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from heterorl.common.errors import NotRegistered
from heterorl.common.types.common import SiteId
from heterorl.common.types.run import CanaryReport, Heartbeat, Registration, SiteStatus
from heterorl.coordinator.sites import incarnations, quarantine
from heterorl.coordinator.sites.quotas import Quotas
from heterorl.coordinator.store import tallies
from heterorl.coordinator.store.database import Connection, get_meta, set_meta

_LOG = logging.getLogger(__name__)
MAX_SEEN = 16
"""Incarnations of a site whose last sign of life is remembered, the most recent ones."""
Holder = tuple[str, str]
GROUPS_TIMED = 20
"""Groups over which the mean duration of a site's groups decays."""


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
