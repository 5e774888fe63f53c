"""What is known of the samplers: durable registrations, and in memory who was seen when and whose leases run out.

Times are instants of the monotonic clock and affect liveness only; after a restart every lease gets a fresh term.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from services.common.api import CanaryReport, Heartbeat, Registration
from services.common.types import SiteId, SiteStatus, WorkAssignment
from services.coordinator import incarnations, quarantine
from services.coordinator.quotas import Quotas
from services.coordinator.work import Handed


@dataclass(slots=True)
class _Seen:
    at: float
    policy_version: int = -1
    state_root: str = ""
    tokens_per_s: float = 0.0
    canary_difference: float | None = None
    apply_s: float = 0.0


class Sites:
    """Registrations, last signs of life, and deadlines of assignments.

    Deadlines are read and written by store operations only: the table of work says what is leased, and a lease whose
    deadline this process does not know (it restarted, or an operation was undone) gets a fresh term.
    """

    def __init__(self, *, work_lease_s: float) -> None:
        self._work_lease_s = work_lease_s
        self._seen: dict[tuple[str, str], _Seen] = {}
        self._deadlines: dict[int, float] = {}

    def leased(self, handed: Sequence[Handed], now: float) -> tuple[WorkAssignment, ...]:
        """Start the terms of new leases."""
        self._deadlines.update(dict.fromkeys((entry.assignment for entry in handed), now + self._work_lease_s))
        return tuple(
            WorkAssignment(
                id=entry.assignment, prompt_index=entry.prompt_index, seed=entry.seed, lease_s=self._work_lease_s
            )
            for entry in handed
        )

    def expired(self, assignments: Iterable[int], now: float) -> list[int]:
        """Those of the leased assignments whose term ended."""
        fresh = now + self._work_lease_s
        self._deadlines = {assignment: self._deadlines.get(assignment, fresh) for assignment in assignments}
        return [assignment for assignment, deadline in self._deadlines.items() if deadline <= now]

    def see(self, site: str, incarnation: str, now: float, *, policy_version: int | None = None) -> None:
        """Note a sign of life."""
        seen = self._seen.setdefault((site, incarnation), _Seen(at=now))
        seen.at = now
        if policy_version is not None:
            seen.policy_version = policy_version

    def beat(self, beat: Heartbeat, now: float) -> None:
        """Note what a heartbeat says."""
        seen = self._seen.setdefault((beat.site, beat.incarnation), _Seen(at=now))
        seen.at = now
        seen.policy_version = beat.policy_version
        seen.state_root = beat.state_root
        seen.tokens_per_s = beat.tokens_per_s
        seen.apply_s = beat.apply_s

    def note_canary(self, report: CanaryReport, difference: float | None, now: float) -> None:
        """Note how far a site's canary is off."""
        seen = self._seen.setdefault((report.site, report.incarnation), _Seen(at=now))
        seen.canary_difference = difference

    def versions_in_use(self, since: float) -> frozenset[int]:
        """Versions that sites seen since then generate with."""
        return frozenset(seen.policy_version for seen in self._seen.values() if seen.at >= since)

    def register(self, connection: sqlite3.Connection, registration: Registration) -> int:
        """Make a registration durable; returns the highest sequence known of the incarnation."""
        key = (registration.site, registration.incarnation)
        connection.execute(
            "INSERT INTO sites (site, incarnation, engine, dtype, flavour) VALUES (?, ?, ?, ?, ?)"
            " ON CONFLICT (site, incarnation) DO UPDATE"
            " SET engine = excluded.engine, dtype = excluded.dtype, flavour = excluded.flavour",
            (*key, registration.engine, registration.dtype, registration.flavour),
        )
        for forgotten in incarnations.note(connection, *key):
            self._seen.pop((registration.site, forgotten), None)
        (highest,) = connection.execute(
            "SELECT max(watermark, coalesce((SELECT max(sequence) FROM beyond_watermark b"
            " WHERE b.site = sites.site AND b.incarnation = sites.incarnation), 0))"
            " FROM sites WHERE site = ? AND incarnation = ?",
            key,
        ).fetchone()
        return int(highest)

    def is_known(self, connection: sqlite3.Connection, site: str, incarnation: str) -> bool:
        """Whether the incarnation is registered."""
        row = connection.execute("SELECT 1 FROM sites WHERE site = ? AND incarnation = ?", (site, incarnation))
        return row.fetchone() is not None

    def flavour(self, connection: sqlite3.Connection, site: str, incarnation: str) -> str:
        """Form of the weights that a registered incarnation pulls."""
        row = connection.execute("SELECT flavour FROM sites WHERE site = ? AND incarnation = ?", (site, incarnation))
        return str((row.fetchone() or ("",))[0])

    def statuses(
        self, connection: sqlite3.Connection, now: float, *, quotas: Quotas, rule: quarantine.Rule
    ) -> tuple[SiteStatus, ...]:
        """All sites, also those never seen by this process; of each the newest incarnations and the sum of others."""
        leased: dict[tuple[str, str], int] = {
            (site, incarnation): count
            for site, incarnation, count in connection.execute(
                "SELECT site, incarnation, count(*) FROM work WHERE is_leased = 1 GROUP BY site, incarnation"
            )
        }
        rows = incarnations.shown(connection, {*leased, *self._seen.copy()})
        quarantines, failures = quarantine.read_reasons(connection), quarantine.count_failures(connection, rule)
        statuses = []
        for row in rows:
            site, incarnation = row.site, row.incarnation
            seen = self._seen.get((site, incarnation))
            statuses.append(
                SiteStatus(
                    site=SiteId(site),
                    incarnation=incarnation,
                    policy_version=seen.policy_version if seen else -1,
                    state_root=seen.state_root if seen else "",
                    last_seen_s=now - seen.at if seen else -1.0,
                    groups_accepted=row.accepted,
                    groups_dropped=row.dropped,
                    tokens_per_s=seen.tokens_per_s if seen else 0.0,
                    work_leased=leased.get((site, incarnation), 0),
                    canary_difference=seen.canary_difference if seen else None,
                    quarantine=quarantines.get(site, ""),
                    apply_s=seen.apply_s if seen else 0.0,
                    flavour=row.flavour,
                    groups_failed=failures.get(site, 0),
                    groups_refused=quotas.refusals_of(site),
                    quota_used=max(quotas.used(site, now).values()),
                )
            )
        return tuple(statuses)
