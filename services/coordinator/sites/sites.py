"""What is known of the samplers: durable registrations, and in memory who was seen when and whose leases run out.

Times are instants of the monotonic clock and affect liveness only; after a restart every lease gets a fresh term.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from heterorl.common.types.common import SiteId
from heterorl.common.types.rollout import WorkAssignment
from heterorl.common.types.run import CanaryReport, Heartbeat, Registration, SiteStatus
from heterorl.coordinator.groups.work import Handed
from heterorl.coordinator.sites import incarnations, quarantine, watermark
from heterorl.coordinator.sites.quotas import Quotas
from heterorl.coordinator.sites.shares import Shares

_LOG = logging.getLogger(__name__)
Holder = tuple[str, str]
"""A site and its incarnation."""


@dataclass(slots=True)
class _Seen:
    at: float
    policy_version: int = -1
    state_root: str = ""
    tokens_per_s: float = 0.0
    canary_difference: float | None = None
    apply_s: float = 0.0
    problem: str = ""


class Sites:
    """Registrations, last signs of life, and deadlines of assignments.

    Terms are read and written by store operations only: the table of work says what is leased, and a lease whose
    beginning this process does not know (it restarted, or an operation was undone) gets a fresh term.
    """

    def __init__(self, *, work_lease_s: float) -> None:
        self._work_lease_s = work_lease_s
        self._seen: dict[Holder, _Seen] = {}
        self._leased_at: dict[int, float] = {}
        self.shares = Shares()

    def leased(
        self, connection: sqlite3.Connection, handed: Sequence[Handed], holder: Holder, now: float
    ) -> tuple[WorkAssignment, ...]:
        """Start the terms of new leases; those that run go on, so that no site keeps one by asking again."""
        term_s = self._work_lease_s + _delay_s(connection, holder)
        starts = [self._leased_at.setdefault(entry.assignment, now) for entry in handed]
        return tuple(
            WorkAssignment(
                id=entry.assignment,
                prompt_index=entry.prompt_index,
                seed=entry.seed,
                lease_s=max(0.0, start + term_s - now),
            )
            for entry, start in zip(handed, starts, strict=True)
        )

    def expired(self, connection: sqlite3.Connection, leased: Mapping[int, Holder], now: float) -> list[int]:
        """Those of the leased assignments whose term ended; they are forgotten, and count against their holders."""
        terms = {holder: self._work_lease_s + self._grace_s(connection, holder, now) for holder in set(leased.values())}
        self._leased_at = {assignment: self._leased_at.get(assignment, now) for assignment in leased}
        found = [number for number, start in self._leased_at.items() if start + terms[leased[number]] <= now]
        for assignment in found:
            del self._leased_at[assignment]
            self.shares.note_expired(leased[assignment][0])
        return found

    def _grace_s(self, connection: sqlite3.Connection, holder: Holder, now: float) -> float:
        """What its delay adds to the terms of a site, while it says that it lives; one that died delivers nothing."""
        seen = self._seen.get(holder)
        is_silent = seen is None or now - seen.at > self._work_lease_s
        return 0.0 if is_silent else _delay_s(connection, holder)

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
        seen.problem = beat.problem

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
            "INSERT INTO sites (site, incarnation, engine, dtype, flavour, max_delay_s) VALUES (?, ?, ?, ?, ?, ?)"
            " ON CONFLICT (site, incarnation) DO UPDATE SET engine = excluded.engine, dtype = excluded.dtype,"
            " flavour = excluded.flavour, max_delay_s = excluded.max_delay_s",
            (*key, registration.engine, registration.dtype, registration.flavour, registration.max_delay_s),
        )
        for forgotten in incarnations.note(connection, *key):
            self._seen.pop((registration.site, forgotten), None)
        missing = watermark.pass_over(connection, *key, lowest=registration.lowest_sequence)
        if missing:
            _LOG.warning("site %s, incarnation %s: %d groups that it settled are not known here", *key, missing)
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
                    problem=seen.problem if seen else "",
                    flavour=row.flavour,
                    groups_failed=failures.get(site, 0),
                    groups_refused=quotas.refusals_of(site),
                    quota_used=max(quotas.used(site, now).values()),
                )
            )
        return tuple(statuses)


def _delay_s(connection: sqlite3.Connection, holder: Holder) -> float:
    """What the delay model of a site adds there and back, as it declared."""
    row = connection.execute("SELECT max_delay_s FROM sites WHERE site = ? AND incarnation = ?", holder).fetchone()
    return 0.0 if row is None else float(row[0])
