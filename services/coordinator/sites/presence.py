"""Which sites fell silent and which came back: pure, a sentence for each change."""

from __future__ import annotations

from collections.abc import Sequence

from heterorl.common.types.run import SiteStatus
from heterorl.common.types.words import peer_words

SILENT_S = 30.0
"""A site without any call for so long is said to be silent; its heartbeats come every few seconds."""


class Presence:
    """The sites as they were at the last look."""

    def __init__(self) -> None:
        self._silent: dict[str, float] = {}

    def look(self, sites: Sequence[SiteStatus]) -> list[str]:
        """What changed since the last look; a site that this process never saw is not missed.

        Of several incarnations of a site the one seen last speaks for it.
        """
        last_seen_s: dict[str, float] = {}
        ahead_s: dict[str, float] = {}
        for status in sites:
            ahead_s[status.site] = max(status.work_ahead_s, ahead_s.get(status.site, 0.0))
            if status.last_seen_s >= 0:
                last_seen_s[status.site] = min(status.last_seen_s, last_seen_s.get(status.site, status.last_seen_s))
        words = []
        for site, seen_s in last_seen_s.items():
            name = peer_words(site, most=64)
            if seen_s >= SILENT_S and site not in self._silent:
                words.append(f"site {name} is silent for {seen_s:.0f} s; {_later(ahead_s[site])}")
            elif seen_s < SILENT_S and site in self._silent:
                words.append(f"site {name} is back after {self._silent[site]:.0f} s")
            if seen_s >= SILENT_S:
                self._silent[site] = seen_s
            else:
                self._silent.pop(site, None)
        return words


def _later(ahead_s: float) -> str:
    if ahead_s <= 0:
        return "its work is handed out again when its lease ends"
    return f"its work waits for it, up to {ahead_s:.0f} s beyond its lease, and others get new work"
