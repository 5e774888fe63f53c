"""The newest metrics of nodes that push them, as a page for Prometheus beside the coordinator's own.

Guarantees: a node has one entry, which ends with a few intervals without a push; so a node that is gone shows nothing,
as one that is scraped and does not answer. Nothing is durable: after a restart nodes push within an interval.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from heterorl.common.federation import series
from heterorl.common.process.clock import Clock
from heterorl.common.process.metrics import Service
from heterorl.common.types.series import Series

KEPT_S = 60.0
"""From a push until its numbers are no longer shown; longer than the interval of any node that is to be watched."""


@dataclass(frozen=True, slots=True)
class _Entry:
    at: float
    lines: Mapping[str, str]


class Reported:
    """Entries by service and site. `put` is for the event loop, `page` for any thread."""

    def __init__(self, *, run_id: str, most_nodes: int, clock: Clock) -> None:
        self._run_id = run_id
        self._most_nodes = most_nodes
        self._clock = clock
        self._entries: dict[tuple[Service, str], _Entry] = {}

    def put(self, service: Service, site: str, found: Sequence[Series]) -> bool:
        """Keep a node's numbers instead of its earlier ones; returns whether there is room for them.

        Raises:
            InvalidRequest: they are not that service's own.
        """
        now = self._clock.monotonic()
        for key in [key for key, entry in self._entries.items() if now - entry.at > KEPT_S]:
            del self._entries[key]
        if (service, site) not in self._entries and len(self._entries) >= self._most_nodes:
            return False
        added = {"run": self._run_id, "service": service, "instance": site}
        if service == "sampler":
            added["site"] = site
        self._entries[service, site] = _Entry(now, series.rendered(found, service=service, added=added))
        return True

    def page(self) -> bytes:
        """The text format of what nodes pushed lately."""
        now = self._clock.monotonic()
        # Copied: the loop may add one meanwhile.
        return series.page(entry.lines for entry in [*self._entries.values()] if now - entry.at <= KEPT_S)
