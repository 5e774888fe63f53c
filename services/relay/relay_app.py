"""Start and stop of a relay: cache, server, coordinator link, metrics, signals.

    loop      waits for                               unblocked by
    rpcs      messages of samplers                    the samplers; the end of the grace period
    carried   the coordinator                         the coordinator; the node's deadline
    head      news of the head                        the coordinator; a broken line (it dials again)
    push      its interval                            the clock
    fetches   bytes of a payload                      the coordinator; a minute without any
    watchdog  half the service manager's interval     the clock
    main      SIGTERM or SIGINT                       the operator

A relay starts without the coordinator too and serves what it has cached.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import grpc.aio

from heterorl.common.errors import ConfigError
from heterorl.common.identity.credentials import MaterialFiles, Revocations, add_port
from heterorl.common.identity.spiffe import Role, names_of
from heterorl.common.process import metrics, notify
from heterorl.common.process.files import announce
from heterorl.common.process.metrics import RELAY_BYTES
from heterorl.common.rpc import server_limits
from heterorl.common.rpc.calls import RetryPolicy
from heterorl.common.rpc.client import CoordinatorClient
from heterorl.common.rpc.server_limits import MemoryQuota
from heterorl.common.rpc.transport_options import server_options
from heterorl.relay.cache import CacheDirectory
from heterorl.relay.cached_weights import CachedWeights
from heterorl.relay.payloads import FROM_BUCKET, FROM_COORDINATOR, TO_NODES
from heterorl.relay.relay_config import RelayConfig
from heterorl.relay.router import Forwarder, NodeAdmission, Router

_LOG = logging.getLogger(__name__)
UNREFUSED_RPCS = 8
"""Calls that gRPC lets in for each place; all but the placed ones are on their way out."""
BRIEF = RetryPolicy(budget_s=5.0)
"""Samplers ask again themselves; what is kept is to be given before their calls reach their deadlines."""
ASK_S = 15.0
"""Limit of one question to a coordinator that does not answer over a sound line, below the samplers' deadlines."""


async def main(config: RelayConfig) -> int:
    """Serve until a signal; returns the exit code."""
    async with notify.running() as process:
        await _serve(config, process)
    return 0


async def _serve(config: RelayConfig, process: notify.Process) -> None:
    server_limits.raise_limit(calls=config.max_concurrent_rpcs)
    cache = await asyncio.to_thread(CacheDirectory, config.cache_dir, max_bytes=config.cache_bytes)
    metrics.watch_disk(config.cache_dir)
    metrics.RELAY_CACHE_LIMIT_BYTES.set(config.cache_bytes)
    for way in (FROM_COORDINATOR, FROM_BUCKET, TO_NODES):
        metrics.RELAY_BYTES.labels(way)
    upstream = Upstream.of(config, max_message_bytes=config.max_message_bytes, policy=BRIEF)
    try:
        weights = CachedWeights(api=upstream, cache=cache, clock=process.clock)
        server = RelayServer(config, weights)
        port = await server.start()
        head = asyncio.ensure_future(weights.head.run())
        try:
            metrics_port = metrics.serve_by(config, service="relay")
            await asyncio.to_thread(announce, config.cache_dir, config.listen, port, service="relay")
            _LOG.info(
                "the relay of %s listens on port %d, metrics on port %d; %d bytes are cached",
                config.coordinator, port, metrics_port, cache.num_bytes,
            )  # fmt: skip
            process.notifier.ready(f"relay of {config.coordinator}, port {port}")
            site = names_of(config.tls.cert)[1] or "relay"
            async with upstream.pushing("relay", site=site, interval_s=config.metrics_push_s):
                await process.stop.wait()
        finally:
            _LOG.info("the relay of %s stops", config.coordinator)
            process.notifier.stopping()
            head.cancel()
            await asyncio.gather(head, return_exceptions=True)
            await weights.close()
            await server.stop()
    finally:
        await upstream.close()
        cache.close()


class RelayServer:
    """Answers the samplers of a site."""

    def __init__(self, config: RelayConfig, weights: CachedWeights) -> None:
        """Prepare a server.
        Raises ConfigError: a file of certificates cannot be used, or is not a relay's."""
        self._config = config
        self._files = None if config.tls.insecure or not config.tls.cert else MaterialFiles(config.tls)
        if self._files is not None and self._files.current().identity.role is not Role.RELAY:
            found = self._files.current().identity.uri
            action = "heterorl certs issue relay SITE --host NAME"
            raise ConfigError("tls.cert", f"names {found}, and this is a relay", action=action)
        self.admission = NodeAdmission(
            own=lambda: None if self._files is None else self._files.current().identity,
            revoked=Revocations(Path(config.tls.revoked)) if config.tls.revoked else frozenset(),
            places=config.max_concurrent_rpcs,
            places_of_node=config.site_concurrent_rpcs,
            budget=MemoryQuota(total_bytes=config.messages_in_flight_bytes, message_bytes=config.max_message_bytes),
        )
        self._forwarder = Forwarder(
            config.coordinator, tls=config.tls, max_message_bytes=config.max_message_bytes, admission=self.admission
        )
        self._grpc = grpc.aio.server(
            options=server_options(config.max_message_bytes),
            maximum_concurrent_rpcs=UNREFUSED_RPCS * config.max_concurrent_rpcs,
        )
        self._router = Router(weights=weights, forwarder=self._forwarder, admission=self.admission)
        self._grpc.add_generic_rpc_handlers((self._router,))

    async def start(self) -> int:
        """Listen and report SERVING; returns the port.
        Raises ConfigError: plaintext on a public address, or the address is taken."""
        port = add_port(self._grpc, self._config.listen, tls=self._config.tls, files=self._files)
        await self._grpc.start()
        self._router.is_serving = True
        return port

    async def stop(self) -> None:
        """Report NOT_SERVING, refuse new calls, cut running ones after their grace."""
        self._router.is_serving = False
        await self._grpc.stop(self._config.stop_grace_s)
        await self._forwarder.close()


class Upstream(CoordinatorClient):
    """A client that counts bytes, and waits less than samplers do."""

    async def _call(self, name: str, message: Any = None, /, **fields: Any) -> Any:
        return await super()._call(name, message, **{"timeout_s": ASK_S, **fields})

    def _note_frame(self, frame: bytes, *, is_direct: bool) -> None:
        RELAY_BYTES.labels(FROM_BUCKET if is_direct else FROM_COORDINATOR).inc(len(frame))
