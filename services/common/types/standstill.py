"""Whether a run stands still because no site may work: every one that answers is in quarantine.

No work means no groups, no groups no version, and only a new version could end a quarantine by the canary: it takes a
person. Pure, so that the coordinator's log, its metric and a status on a screen say the same.
"""

from __future__ import annotations

from collections.abc import Sequence

from heterorl.common.types.run import RunStatus

ACTIVE_S = 120.0
"""A site that was silent for so long is not counted: it does no work, in quarantine or not."""
_SHOWN = 5
RELEASE = "heterorl sites release SITE HOST:PORT --reason TEXT"


def quarantined_sites(status: RunStatus) -> tuple[str, ...]:
    """The sites that answer, sorted, if there are some and all of them are in quarantine; otherwise none."""
    # -1 is not seen yet; a clock that is read after the site's call says a little less than 0.
    active = {site.site: site.quarantine for site in status.sites if -1.0 < site.last_seen_s < ACTIVE_S}
    return () if status.is_draining or not all(active.values()) else tuple(sorted(active))


def describe(sites: Sequence[str]) -> str:
    """What to say of a run that stands still; empty where none of `sites` keeps it."""
    if not sites:
        return ""
    more = f" and {len(sites) - _SHOWN} more" if len(sites) > _SHOWN else ""
    return (
        f"the run stands still: every site that answers is in quarantine ({', '.join(sites[:_SHOWN])}{more}) and no"
        f" work is handed out, so no new version comes. Where a site is right: {RELEASE}. After a canary it works until"
        " its next version is scored; if that is off again, compare learner and site, or raise the coordinator's"
        " canary_threshold"
    )
