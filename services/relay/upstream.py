"""The coordinator as the relay itself speaks to it: asks for weights, hands its numbers out, under its own name."""

from __future__ import annotations

from collections.abc import Sequence

from heterorl.common.process.metrics import RELAY_BYTES
from heterorl.common.rpc.client import CoordinatorClient
from heterorl.common.rpc.retry import RetryPolicy
from heterorl.common.types.series import Series
from heterorl.common.wire.metrics import series_to_pb
from heterorl.v1 import metrics_pb2

FROM_COORDINATOR, FROM_BUCKET, TO_NODES = "from_coordinator", "from_bucket", "to_nodes"
"""Ways of a payload's bytes."""
BRIEF = RetryPolicy(budget_s=5.0)
"""Samplers ask again themselves; what is kept is to be given before their calls reach their deadlines."""


class Upstream(CoordinatorClient):
    """A client that counts what comes over the line."""

    def _note_frame(self, frame: bytes, *, is_direct: bool) -> None:
        RELAY_BYTES.labels(FROM_BUCKET if is_direct else FROM_COORDINATOR).inc(len(frame))

    async def push_relay_metrics(self, *, site: str, series: Sequence[Series]) -> bool:
        """Hand out this relay's numbers, once; returns whether the coordinator keeps them."""
        request = metrics_pb2.PushRelayMetricsRequest(site=site, series=series_to_pb(series))
        return bool((await self._once("PushRelayMetrics", request)).is_kept)
