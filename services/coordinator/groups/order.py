"""Which group the learner gets next: of the oldest policy, of the newest, or of the site whose turn it is; pure.

Guarantees: work-conserving (a site's share is a bound only while another site has groups), and without starvation: in
the fair order every site with groups is served once in each round; in the share order every site below its share comes
before those above it, and where all are at theirs, those with the least come first. Must never decide whether a group
is trained on, only when.

Deficit round robin (Shreedhar and Varghese, 1996) with a cost of 1 for a group and a quantum of 1: what is left of a
site's deficit is never more than 0, so a round is one group of each site that has one.

Newest first is the queue of the program of arXiv 2508.17850: as soon as there is a group of a newer version than any
that was taken, the first of the newest version; else the one that came first of those that are at most D versions older
than the newest that was taken, where D is half of the bound on staleness. That program takes nothing older; a site that
is always between D and the bound behind would train nothing. Here every `LATE_EVERY`-th group is of those behind the
window while there are any, the one that will be too old first, and so is each one while the window is empty.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Order = Literal["oldest", "fair", "newest"]
LATE_EVERY = 4
"""Under newest first, one group of so many is of those behind the window while there are any."""


def newest_first(version: int, arrival: int, *, newest_taken: int) -> tuple[int, int, int]:
    """Rank of a waiting group of a version under newest first: the smallest is next, its last number is `arrival`."""
    return (0, -version, arrival) if version > newest_taken else (1, 0, arrival)


def oldest_in_window(newest_taken: int, *, max_staleness_versions: int) -> int:
    """The oldest version that is not late under newest first."""
    return newest_taken - max_staleness_versions // 2


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
    _num_passed: int = 0
    """Groups that went before late ones since the last late one."""

    def is_late_next(self, *, has_late: bool, has_others: bool) -> bool:
        """Whether the next group is of those behind the window of newest first; counts it."""
        if not has_late:
            return False
        if has_others and self._num_passed < LATE_EVERY - 1:
            self._num_passed += 1
            return False
        self._num_passed = 0
        return True

    @property
    def is_plain(self) -> bool:
        """Whether oldest policies go first, whose they are."""
        return self.order == "oldest" and self.share >= 1.0

    @property
    def cap(self) -> int:
        """Groups of one site among any `window` groups in a row while another site has groups."""
        return max(1, math.floor(self.share * self.window))

    def next(self, ranks: Mapping[str, tuple[int, ...]]) -> str:
        """The site that is served now.

        Args:
            ranks: for each site with groups, the rank of its first one, smallest first: (policy version, arrival), or
                that of `newest_first` of groups in its window.
        """
        assert ranks, "asked only while there are groups"
        served = Counter(self._recent)
        counts = {site: served[site] for site in ranks}
        # Where all are at their share, those with the least of it: two sites under a share of a third get a half each.
        bound = max(self.cap, min(counts.values()) + 1)
        below = {site for site in ranks if counts[site] < bound}
        if self.order != "fair":
            chosen = min(below, key=lambda site: ranks[site])
        else:
            for site in sorted(ranks.keys() - self._ring.keys(), key=lambda site: ranks[site]):
                self._ring[site] = None
            chosen = next(site for site in self._ring if site in below)
            del self._ring[chosen]
            self._ring[chosen] = None
            if len(self._ring) > max(1024, 2 * len(ranks)):
                # Sites that left; those with groups keep their places, however many they are.
                self._ring = {site: None for site in self._ring if site in ranks}
        self._recent.append(chosen)
        while len(self._recent) >= max(1, self.window):
            self._recent.popleft()
        return chosen
