"""A site's line to its coordinator: calls over gRPC, and this site's metrics, which nobody else could fetch."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from heterorl.common.federation.push import pushing
from heterorl.common.process import metrics
from heterorl.common.process.clock import Clock
from heterorl.common.rpc.client import CoordinatorClient
from heterorl.common.types.common import SiteId
from heterorl.sampler.config import SamplerConfig


@contextlib.asynccontextmanager
async def linked(config: SamplerConfig, clock: Clock) -> AsyncIterator[CoordinatorClient]:
    """The coordinator that a configuration names; while it is open, metrics are pushed to it."""
    site = SiteId(config.site)
    async with (
        CoordinatorClient(
            config.coordinator,
            tls=config.tls,
            bandwidth=config.bandwidth,
            payload_urls=config.payload_urls,
            payload_hosts=config.payload_hosts,
        ) as api,
        pushing(
            lambda series: api.push_sampler_metrics(site=site, series=series),
            registry=metrics.registry_of("sampler"),
            interval_s=config.metrics_push_s,
            clock=clock,
        ),
    ):
        yield api
