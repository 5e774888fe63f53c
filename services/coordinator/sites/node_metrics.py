"""Metrics that nodes push, and the port that serves them with the coordinator's own.

A node has one entry that expires after KEPT_S without a push. Nothing is durable. A node may push twice a second and
state a bounded number of different series an hour, since Prometheus keeps each for hours.

Gauges that only the active coordinator knows would read 0 on a standby and raise alerts. So a standby shows only that
it stands by and when its certificate expires.
"""

from __future__ import annotations

import asyncio
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
"""From a push until its numbers are no longer shown; longer than the interval of any node that is to be watched."""
BETWEEN_S = 0.5
VARIETY_S = 3600.0
VARIETY = 2
"""How many times the numbers of its largest push a node may state under different labels in VARIETY_S."""
_REMEMBERED = 4
"""Nodes that are known for VARIETY_S, in those that are shown at once; only without certificates there can be more."""


@dataclass(slots=True)
class _Node:
    since: float
    tried: float
    """Its last push, accepted or not."""
    at: float = float("-inf")
    lines: Mapping[str, str] = field(default_factory=dict)
    seen: frozenset[int] = frozenset()


class NodeMetrics:
    """Entries by service and site. `put` is for the event loop, `page` for any thread."""

    def __init__(self, *, run_id: str, most_nodes: int, clock: Clock) -> None:
        self._run_id = run_id
        self._most_nodes = most_nodes
        self._clock = clock
        self._nodes: dict[tuple[Service, str], _Node] = {}

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
        # Copied: the loop may add one meanwhile.
        return pushed_metrics.page(node.lines for node in [*self._nodes.values()] if now - node.at <= KEPT_S)

    def _admitted(self, key: tuple[Service, str], now: float) -> _Node | None:
        """The node that may push now; None without room."""
        for other in [other for other, node in self._nodes.items() if now - node.tried > VARIETY_S]:
            del self._nodes[other]
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
    """One port for both times."""

    def __init__(self, config: CoordinatorConfig, reported: NodeMetrics) -> None:
        self._config = config
        self.reported = reported
        self._files: MaterialFiles | None = None
        self._port = 0
        self._is_whole = False

    def stand_by(self) -> int:
        """Serve a standby's metrics; returns the port. Raises PortInUse, ConfigError: as `metrics.serve`, or bad
        certificates."""
        if self._config.tls.cert:
            self._files = MaterialFiles(self._config.tls)
        metrics.STANDING_BY.set(1)
        return self._open()

    def serve(self) -> int:
        """Serve all metrics on the same port, once they are known; returns it. Raises PortInUse, ConfigError: as
        `metrics.serve`."""
        metrics.STANDING_BY.set(0)
        self._is_whole = True
        return self._open()

    def _open(self) -> int:
        config = self._config
        self._port = self._port or metrics.serve(
            config.metrics_port,
            service="coordinator",
            address=config.metrics_host,
            may_move="metrics_port" not in config.model_fields_set,
            pages={NODES_PAGE: self.reported.page},
            shown=self._shown,
        )
        return self._port

    def _shown(self) -> Container[str] | None:
        if self._is_whole:
            return None
        if self._files is not None:
            # Renewed ones are taken up when the metrics are asked for.
            self._files.current()
        return OF_STANDBY
