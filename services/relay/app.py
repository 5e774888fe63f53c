"""Wires a relay: cache, server, the link to the coordinator, metrics, signals.

    loop      waits for                               unblocked by
    rpcs      messages of samplers                    the samplers; the end of the grace period
    carried   the coordinator                         the coordinator; the node's deadline
    head      news of the head                        the coordinator; a broken line (it dials again)
    push      its interval                            the clock
    fetches   bytes of a payload                      the coordinator; a minute without any
    watchdog  half the service manager's interval     the clock
    main      SIGTERM or SIGINT                       the operator

A coordinator that does not answer keeps no relay from starting: what is kept is served.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from pathlib import Path

from heterorl.common.federation.push import pushing
from heterorl.common.identity.identity import site_of
from heterorl.common.process import descriptors, metrics, notify
from heterorl.common.process.clock import Clock, SystemClock
from heterorl.common.process.files import replacing
from heterorl.relay.cache import CacheDirectory
from heterorl.relay.config import RelayConfig
from heterorl.relay.server import RelayServer
from heterorl.relay.upstream import BRIEF, FROM_BUCKET, FROM_COORDINATOR, TO_NODES, Upstream
from heterorl.relay.weights import Weights

_LOG = logging.getLogger(__name__)


async def main(config: RelayConfig) -> int:
    """Serve until a signal; returns the exit code."""
    stop = asyncio.Event()
    clock = SystemClock()
    notifier = notify.from_environment()
    notify.on_stop((signal.SIGTERM, signal.SIGINT), notifier=notifier, stop=stop.set)
    async with notify.supervised(notifier, clock):
        await _serve(config, clock, stop, notifier)
    return 0


async def _serve(config: RelayConfig, clock: Clock, stop: asyncio.Event, notifier: notify.Notifier) -> None:
    descriptors.raise_limit(calls=config.max_concurrent_rpcs)
    cache = await asyncio.to_thread(CacheDirectory, config.cache_dir, max_bytes=config.cache_bytes)
    metrics.watch_disk(config.cache_dir)
    metrics.RELAY_CACHE_LIMIT_BYTES.set(config.cache_bytes)
    for way in (FROM_COORDINATOR, FROM_BUCKET, TO_NODES):
        metrics.RELAY_BYTES.labels(way)
    upstream = Upstream(
        config.coordinator,
        tls=config.tls,
        max_message_bytes=config.max_message_bytes,
        policy=BRIEF,
        bandwidth=config.bandwidth,
        payload_urls=config.payload_urls,
        payload_hosts=config.payload_hosts,
    )
    try:
        weights = Weights(api=upstream, cache=cache, clock=clock)
        server = RelayServer(config, weights)
        port = await server.start()
        head = asyncio.ensure_future(weights.head.run())
        try:
            metrics_port = metrics.serve(
                config.metrics_port,
                service="relay",
                address=config.metrics_host,
                may_move="metrics_port" not in config.model_fields_set,
            )
            await asyncio.to_thread(_announce, config, port)
            _LOG.info(
                "relay of %s: listening on port %d, metrics on port %d, %d bytes are kept",
                config.coordinator, port, metrics_port, cache.num_bytes,
            )  # fmt: skip
            notifier.ready(f"relay of {config.coordinator}, port {port}")
            async with pushing(
                lambda series: upstream.push_relay_metrics(site=site_of(config.tls.cert) or "relay", series=series),
                registry=metrics.registry_of("relay"),
                interval_s=config.metrics_push_s,
                clock=clock,
            ):
                await stop.wait()
        finally:
            _LOG.info("stopping")
            notifier.stopping()
            head.cancel()
            await asyncio.gather(head, return_exceptions=True)
            await weights.close()
            await server.stop()
    finally:
        await upstream.close()
        cache.close()


def _announce(config: RelayConfig, port: int) -> None:
    """Write host:port beside the cache, for those who let the system choose the port."""
    host = config.listen.rpartition(":")[0]
    path = Path(config.cache_dir) / "address"
    try:
        with replacing(path, is_durable=False) as file:
            file.write(f"{host}:{port}\n".encode("ascii"))
    except OSError as error:
        _LOG.warning("%s is not written: %s", path, error)
