"""Messages <-> metrics of nodes. Decides nothing."""

from __future__ import annotations

from typing import Any

import grpc.aio

from heterorl.common.wire.metrics import series_from_pb
from heterorl.coordinator.sites.reported import Reported
from heterorl.v1 import metrics_pb2, metrics_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]


class MetricsServicer(metrics_pb2_grpc.MetricsServiceServicer):
    """heterorl.v1.MetricsService."""

    def __init__(self, reported: Reported) -> None:
        self._reported = reported

    async def PushSamplerMetrics(
        self, request: metrics_pb2.PushSamplerMetricsRequest, context: Context
    ) -> metrics_pb2.PushSamplerMetricsResponse:
        """Keep a sampler's metrics."""
        is_kept = await self._reported.put("sampler", request.site, series_from_pb(request.series))
        return metrics_pb2.PushSamplerMetricsResponse(is_kept=is_kept)

    async def PushLearnerMetrics(
        self, request: metrics_pb2.PushLearnerMetricsRequest, context: Context
    ) -> metrics_pb2.PushLearnerMetricsResponse:
        """Keep a learner's metrics."""
        is_kept = await self._reported.put("learner", request.site, series_from_pb(request.series))
        return metrics_pb2.PushLearnerMetricsResponse(is_kept=is_kept)

    async def PushRelayMetrics(
        self, request: metrics_pb2.PushRelayMetricsRequest, context: Context
    ) -> metrics_pb2.PushRelayMetricsResponse:
        """Keep a relay's metrics."""
        is_kept = await self._reported.put("relay", request.site, series_from_pb(request.series))
        return metrics_pb2.PushRelayMetricsResponse(is_kept=is_kept)
