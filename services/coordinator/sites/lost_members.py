"""How many members of its groups each site loses, and the bound on that; store operations around a pure rule.

    lost_shares    site (its name, whatever its process), share (of lost members, decayed over WINDOW_GROUPS)

A site that says which members are lost chooses which rewards its groups have: unbounded, it would leave all low ones
out. Above `max_lost_share` its groups with lost members are dropped; its whole ones are taken, and the share falls.
"""

from __future__ import annotations

from heterorl.common.types.common import SiteId
from heterorl.coordinator.store.connection import Connection

WINDOW_GROUPS = 50
"""A share moves by so small a part of the difference with each group: an outage of 20 groups is seen, one group not."""
_SHARES = "SELECT site, share FROM lost_shares"


def moved(share: float, lost: float) -> float:
    """A site's share after a group that lost `lost` of its members, 0 to 1."""
    return share + (lost - share) / WINDOW_GROUPS


def problem_of(share: float, bound: float) -> str:
    """What to say of a site with such a share; empty while it is within the bound."""
    if share <= bound:
        return ""
    return (
        f"it loses {share:.1%} of the members of its groups, and max_lost_share is {bound:.1%}: groups with lost"
        " members are dropped. Its log says why it loses them; whole groups are taken, and the share falls with each"
    )


def note(connection: Connection, site: SiteId, lost: float, *, groups: int = 1) -> float:
    """Move a site's share by so many groups that lost `lost` of their members each; returns it."""
    row = connection.execute(f"{_SHARES} WHERE site = ?", (site,)).fetchone()
    if row is None and not lost:
        # A site that lost no member yet, as all of single completions, costs no row.
        return 0.0
    share = 0.0 if row is None else float(row[1])
    for _ in range(groups):
        share = moved(share, lost)
    connection.execute(
        "INSERT INTO lost_shares VALUES (?, ?) ON CONFLICT (site) DO UPDATE SET share = excluded.share", (site, share)
    )
    return share


def problems(connection: Connection, bound: float) -> dict[str, str]:
    """What to say of each site above the bound."""
    found = {site: problem_of(float(share), bound) for site, share in connection.execute(_SHARES)}
    return {site: text for site, text in found.items() if text}
