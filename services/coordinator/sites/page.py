"""The port of a coordinator's metrics: a few while it stands by, all of them once it serves.

What only the coordinator that serves can know reads 0 elsewhere, which alerts take for a broken ledger or a run that
stands still. So a standby shows that it is there, that it stands by, and how long its certificate lasts.
"""

from __future__ import annotations

from collections.abc import Container

from heterorl.common.identity.credentials import MaterialFiles
from heterorl.common.process import metrics
from heterorl.coordinator.config import CoordinatorConfig
from heterorl.coordinator.sites.reported import Reported

NODES_PAGE = "/nodes"
"""Where the metrics of other nodes are, beside the coordinator's own at /metrics."""
OF_STANDBY = frozenset({"heterorl_coordinator_standing_by", "heterorl_certificate_expiry_seconds"})


class MetricsPage:
    """One port for both times."""

    def __init__(self, config: CoordinatorConfig, reported: Reported) -> None:
        self._config = config
        self.reported = reported
        self._files: MaterialFiles | None = None
        self._port = 0
        self._is_whole = False

    def stand_by(self) -> int:
        """Serve what a standby shows; returns the port.

        Raises:
            PortInUse, ConfigError: as `metrics.serve`, or a certificate cannot be used.
        """
        if self._config.tls.cert:
            self._files = MaterialFiles(self._config.tls)
        metrics.STANDING_BY.set(1)
        return self._open()

    def serve(self) -> int:
        """Show all, on the same port; returns it. Whatever is shown must be known by now.

        Raises:
            PortInUse, ConfigError: as `metrics.serve`.
        """
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
