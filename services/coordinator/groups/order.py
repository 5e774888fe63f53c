"""Whose group the learner gets next: oldest policies first, or sites in turn by deficit round robin; pure.

Guarantees: work-conserving (a site's share is a bound only while another site has groups), and without starvation: in
the fair order every site with groups is served once in each round; in the share order every site below its share comes
before those above it, and where all are at theirs, those with the least come first. Must never decide whether a group
is trained on, only when.

Deficit round robin (Shreedhar and Varghese, 1996) with a cost of 1 for a group and a quantum of 1: what is left of a
site's deficit is never more than 0, so a round is one group of each site that has one.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Order = Literal["oldest", "fair"]


@dataclass(slots=True, kw_only=True)
class Turns:
    """The order of sites between leases. `window` is how many groups a batch has, `share` a site's largest part of it.

    In memory: after a restart the first round begins anew. For store operations alone.
    """

    order: Order
    share: float
    window: int
    _ring: dict[str, None] = field(default_factory=dict)
    """Sites by whose turn is next."""
    _recent: deque[str] = field(default_factory=deque)

    @property
    def is_plain(self) -> bool:
        """Whether oldest policies go first, whose they are."""
        return self.order == "oldest" and self.share >= 1.0

    @property
    def cap(self) -> int:
        """Groups of one site among any `window` groups in a row while another site has groups."""
        return max(1, math.floor(self.share * self.window))

    def next(self, oldest: Mapping[str, tuple[int, int]]) -> str:
        """The site that is served now.

        Args:
            oldest: for each site with groups, the (policy version, arrival) of its oldest one.
        """
        assert oldest, "asked only while there are groups"
        served = Counter(self._recent)
        counts = {site: served[site] for site in oldest}
        # Where all are at their share, those with the least of it: two sites under a share of a third get a half each.
        bound = max(self.cap, min(counts.values()) + 1)
        below = {site for site in oldest if counts[site] < bound}
        if self.order == "oldest":
            chosen = min(below, key=lambda site: oldest[site])
        else:
            for site in sorted(oldest.keys() - self._ring.keys(), key=lambda site: oldest[site]):
                self._ring[site] = None
            chosen = next(site for site in self._ring if site in below)
            del self._ring[chosen]
            self._ring[chosen] = None
            if len(self._ring) > max(1024, 2 * len(oldest)):
                # Sites that left; those with groups keep their places, however many they are.
                self._ring = {site: None for site in self._ring if site in oldest}
        self._recent.append(chosen)
        while len(self._recent) >= max(1, self.window):
            self._recent.popleft()
        return chosen
