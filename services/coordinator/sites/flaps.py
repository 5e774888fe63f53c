"""Quarantines by the canary that come and go: the log of audit keeps a few changes an hour of each site, and a sum.

The log is never emptied, and a report costs a site nothing; whoever reports a wrong and a right canary in turn must not
write it full. The quarantine itself takes effect with every report, whatever is written down.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from heterorl.common.types.common import SiteId
from heterorl.coordinator.sites import audit, canary
from heterorl.coordinator.sites.audit import AuditKind
from heterorl.coordinator.store.connection import Connection

MAX_RECORDED = 6
"""Changes of one site in a period that have a row each."""
PERIOD_S = 3600.0


@dataclass(slots=True)
class _Period:
    began: float
    recorded: int = 0
    left_out: int = 0


class Flaps:
    """Changes of sites in their current periods, by instants of the monotonic clock; a restart begins anew.

    `note` is for store operations, `due` for the event loop: a site's period is added by one and taken by the other.
    """

    def __init__(self) -> None:
        self._periods: dict[SiteId, _Period] = {}

    def note(self, site: SiteId, now: float) -> bool:
        """Count one change; returns whether it has a row of its own."""
        period = self._periods.setdefault(site, _Period(began=now))
        if period.recorded < MAX_RECORDED:
            period.recorded += 1
            return True
        period.left_out += 1
        return False

    def due(self, now: float) -> dict[SiteId, int]:
        """Changes without a row of periods that are over, which are forgotten."""
        # Copied: a report on the store's thread may add one.
        over = [site for site, period in [*self._periods.items()] if now - period.began >= PERIOD_S]
        counts = {site: self._periods.pop(site).left_out for site in over}
        return {site: count for site, count in counts.items() if count}


def note_left_out(connection: Connection, counts: Mapping[SiteId, int], *, now: float) -> None:
    """Set: add a row for each site with how many changes had none, and how it stands now."""
    reasons = canary.read_quarantines(connection)
    for site, count in sorted(counts.items()):
        state = f"in quarantine: {reasons[site]}" if site in reasons else "not in quarantine"
        detail = f"{count} more changes by its canary within {PERIOD_S:g} s; it is {state}"
        audit.append(connection, AuditKind.QUARANTINE_CHANGES, subject=site, detail=detail, now=now)
