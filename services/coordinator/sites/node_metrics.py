"""Metrics that nodes push, and the port that serves all metrics.

A node's entry expires after KEPT_S without a push. Entries are in memory. A node may push twice a second, with a
bounded number of different series an hour, since Prometheus keeps each for hours.

Most gauges of a standby would read 0 and raise alerts. So it shows only that it stands by and its certificate's expiry.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field

from heterorl.common.errors import InvalidRequest, QuotaExceeded
from heterorl.common.identity.credentials import MaterialFiles
from heterorl.common.process import metrics, pushed_metrics
from heterorl.common.process.clock import Clock
from heterorl.common.process.metrics import Service
from heterorl.common.types.common import Series
from heterorl.coordinator.coordinator_config import CoordinatorConfig

KEPT_S = 60.0
"""Seconds for which a push is shown; longer than a node's interval."""
BETWEEN_S = 0.5
VARIETY_S = 3600.0
VARIETY = 2
"""Different series that a node may push in VARIETY_S, in multiples of its largest push."""
_REMEMBERED = 4
"""Nodes remembered for VARIETY_S, in multiples of the nodes shown."""


@dataclass(slots=True)
class _Node:
    since: float
    tried: float
    """Its last push, accepted or not."""
    at: float = float("-inf")
    lines: Mapping[str, str] = field(default_factory=dict)
    seen: frozenset[int] = frozenset()


class NodeMetrics:
    """Entries by service and site.
    `put` is for the event loop, `page` for any thread."""

    def __init__(self, *, run_id: str, most_nodes: int, clock: Clock) -> None:
        self._run_id = run_id
        self._most_nodes = most_nodes
        self._clock = clock
        # In the order of their last pushes.
        self._nodes: OrderedDict[tuple[Service, str], _Node] = OrderedDict()

    async def put(self, service: Service, site: str, found: Sequence[Series]) -> bool:
        """Replace a node's series; returns whether there was room.
        Raises InvalidRequest: not that service's own, or too many; QuotaExceeded: pushed a moment ago."""
        now = self._clock.monotonic()
        node = self._admitted((service, site), now)
        if node is None:
            return False
        added = {"run": self._run_id, "service": service, "instance": site}
        if service != "learner":
            added["site"] = site
        lines, seen = await asyncio.to_thread(_made, found, service, added, node.seen)
        if node.at <= now:
            node.at, node.lines, node.seen = now, lines, seen
        return True

    def page(self) -> bytes:
        now = self._clock.monotonic()
        # Copied: the event loop may add a node.
        return pushed_metrics.page(node.lines for node in [*self._nodes.values()] if now - node.at <= KEPT_S)

    def _admitted(self, key: tuple[Service, str], now: float) -> _Node | None:
        """The node that may push now; None without room."""
        while self._nodes and now - next(iter(self._nodes.values())).tried > VARIETY_S:
            self._nodes.popitem(last=False)
        node = self._nodes.get(key)
        if node is None or now - node.tried > KEPT_S:
            shown = sum(now - other.tried <= KEPT_S for other in self._nodes.values())
            if shown >= self._most_nodes or (node is None and len(self._nodes) >= _REMEMBERED * self._most_nodes):
                return None
        elif now - node.tried < BETWEEN_S:
            raise QuotaExceeded("metrics come more often than twice a second", retry_after_s=BETWEEN_S)
        if node is None:
            node = self._nodes[key] = _Node(since=now, tried=now)
        if now - node.since > VARIETY_S:
            node.since, node.seen = now, frozenset()
        node.tried = now
        self._nodes.move_to_end(key)
        return node


def _made(
    found: Sequence[Series], service: Service, added: Mapping[str, str], seen: frozenset[int]
) -> tuple[Mapping[str, str], frozenset[int]]:
    lines = pushed_metrics.rendered(found, service=service, added=added)
    # hash() is seeded per process, so a node cannot craft collisions.
    seen = seen | frozenset(map(hash, pushed_metrics.lines_of(lines)))
    most = VARIETY * pushed_metrics.LIMITS[service].lines
    if len(seen) > most:
        raise InvalidRequest(f"series: more than {most} different ones within an hour")
    return lines, seen


NODES_PAGE = "/nodes"
"""Path of other nodes' metrics; the coordinator's own are at /metrics."""
OF_STANDBY = frozenset({"heterorl_coordinator_standing_by", "heterorl_certificate_expiry_seconds"})


class MetricsPage:
    """The metrics port, of a standby and then of the active coordinator."""

    def __init__(self, config: CoordinatorConfig, reported: NodeMetrics) -> None:
        self._config = config
        self.reported = reported
        self._files: MaterialFiles | None = None
        self._port = 0
        self._is_whole = False

    def stand_by(self) -> int:
        """Serve a standby's metrics; returns the port.
        Raises as `metrics.serve`, or ConfigError: bad certificates."""
        if self._config.tls.cert:
            self._files = MaterialFiles(self._config.tls)
        metrics.STANDING_BY.set(1)
        return self._open()

    def serve(self) -> int:
        """Serve all metrics, on the standby's port if any; returns it.
        Raises as `metrics.serve`."""
        metrics.STANDING_BY.set(0)
        self._is_whole = True
        return self._open()

    def _open(self) -> int:
        self._port = self._port or metrics.serve_by(
            self._config, service="coordinator", pages={NODES_PAGE: self.reported.page}, shown=self._shown
        )
        return self._port

    def _shown(self) -> Container[str] | None:
        if self._is_whole:
            return None
        if self._files is not None:
            # A scrape reloads renewed certificates.
            self._files.current()
        return OF_STANDBY
