"""One row a site, whatever number of its incarnations the coordinator remembers: for screens and reports."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from heterorl.common.types.run import SiteStatus

NEVER_S = -1.0
"""Seen so long ago: not since the coordinator started."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Folded:
    """A site as its incarnation seen last is, with the counts of all of them; `starts` is how many there were."""

    newest: SiteStatus
    starts: int


def fold(sites: Sequence[SiteStatus]) -> list[Folded]:
    """One entry a site, in the order in which sites first come; a quarantine is the site's, not one incarnation's."""
    by_site: dict[str, list[SiteStatus]] = {}
    for status in sites:
        by_site.setdefault(status.site, []).append(status)
    folded = []
    for own in by_site.values():
        seen = [status for status in own if status.last_seen_s > NEVER_S]
        newest = min(seen, key=lambda status: status.last_seen_s) if seen else own[-1]
        whole = dataclasses.replace(
            newest,
            groups_accepted=sum(status.groups_accepted for status in own),
            groups_dropped=sum(status.groups_dropped for status in own),
            work_leased=sum(status.work_leased for status in own),
            work_away=sum(status.work_away for status in own),
        )
        folded.append(Folded(newest=whole, starts=len(own)))
    return folded
