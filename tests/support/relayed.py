"""A coordinator, a relay of site `eu` and samplers behind it, with real sockets and certificates in one process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np

from heterorl.common.identity.tls import ServerTlsConfig
from heterorl.common.process.clock import SystemClock
from heterorl.common.process.metrics import BYTES, RELAY_BYTES, RELAY_READS
from heterorl.common.pull.puller import Puller
from heterorl.common.rpc.calls import RetryPolicy
from heterorl.common.rpc.client import CoordinatorClient
from heterorl.common.types.common import SiteId
from heterorl.common.types.run import Registration
from heterorl.common.weights.arena import Layout, TensorSpec
from heterorl.relay.cache import CacheDirectory
from heterorl.relay.cached_weights import CachedWeights
from heterorl.relay.relay_app import RelayServer, Upstream
from heterorl.relay.relay_config import RelayConfig
from tests.support.certificates import paths
from tests.support.run import CONTRACT, Run
from tests.support.secure_run import PATIENT, SecureRun

LAYOUT = Layout.build([TensorSpec(name="w", dtype="bf16", shape=(3 << 20,))], chunk_elements=1 << 18)
"""6 MiB, so that a snapshot of random weights has several frames."""
HASTY = RetryPolicy(budget_s=0.0)


class LargeRun(Run):
    """A run whose payloads have several frames."""

    layout = LAYOUT
    contract = CONTRACT.__class__(**{**{name: getattr(CONTRACT, name) for name in CONTRACT.__slots__}, "layout_id": LAYOUT.layout_id})  # fmt: skip
    rng = np.random.default_rng(0)

    def step(self) -> None:
        for number in range(self.arena.num_chunks):
            chunk = self.arena.chunk(number)
            chunk[:] = self.rng.integers(-(1 << 15), 1 << 15, chunk.size, np.int16)


class Site:
    """The relay of one site; `restart` ends it and begins another over the same directory."""

    def __init__(self, run: SecureRun, directory: Path, *, site: str = "eu", **changes: Any) -> None:
        self.run = run
        self.directory = directory
        self.site = site
        self.coordinator = run.address
        self.changes = changes
        self.port = 0
        self.clients: list[CoordinatorClient] = []

    async def __aenter__(self) -> Site:
        certificates = self.run.certificates
        tls = ServerTlsConfig(
            **paths(certificates.node("relay", self.site)), revoked=str(certificates.authority.revoked_path)
        )
        self.config = RelayConfig(
            coordinator=self.coordinator, listen=f"127.0.0.1:{self.port}", tls=tls, cache_dir=self.directory,
            stop_grace_s=0.2, **self.changes,
        )  # fmt: skip
        self.cache = CacheDirectory(self.directory, max_bytes=self.config.cache_bytes)
        self.upstream = Upstream(self.coordinator, tls=tls, policy=HASTY, payload_urls=self.config.payload_urls)
        self.weights = CachedWeights(api=self.upstream, cache=self.cache, clock=SystemClock())
        self.server = RelayServer(self.config, self.weights)
        self.port = await self.server.start()
        self.head = asyncio.ensure_future(self.weights.head.run())
        return self

    async def __aexit__(self, *exception: object) -> None:
        for client in self.clients:
            await client.close()
        self.clients.clear()
        self.head.cancel()
        await asyncio.gather(self.head, return_exceptions=True)
        await self.weights.close()
        await self.server.stop()
        await self.upstream.close()
        self.cache.close()

    async def settled(self) -> None:
        """Wait until what has arrived is kept: samplers have it before the disk does."""
        for arrival in [*self.weights.payloads._arrivals.values()]:
            await asyncio.wait([arrival.fetching])

    async def restart(self) -> None:
        await self.settled()
        await self.__aexit__()
        await self.__aenter__()

    def client(self, name: str = "eu.1", *, role: str = "sampler", policy: RetryPolicy = PATIENT) -> CoordinatorClient:
        """A node that dials the relay."""
        tls = self.run.certificates.tls(role, name)
        client = CoordinatorClient(f"127.0.0.1:{self.port}", tls=tls, policy=policy)
        self.clients.append(client)
        return client

    def puller(self, spool: Path, *, client: CoordinatorClient | None = None, streams: int = 1) -> Puller:
        """What a sampler pulls with."""
        return Puller(
            api=client or self.client(), spool=spool, layout=self.run.run.layout, clock=SystemClock(),
            num_streams=streams,
        )  # fmt: skip


def registration(run: Run, site: str) -> Registration:
    """How a sampler of a site introduces itself."""
    return run.registration(site=SiteId(site), incarnation="inc-1")


@contextlib.asynccontextmanager
async def large_run(directory: Path) -> AsyncIterator[SecureRun]:
    """A secured run whose head is version 0 of LAYOUT."""
    secure = SecureRun(directory)
    secure.run_class = LargeRun
    async with secure:
        yield secure


def counted() -> dict[str, float]:
    """Payload bytes and reads so far."""
    values = {way: RELAY_BYTES.labels(way)._value.get() for way in ("from_coordinator", "from_bucket", "to_nodes")}
    values["served"] = BYTES.labels("weights", "out")._value.get()
    for outcome in ("hit", "joined", "fetched", "passed", "damaged"):
        values[outcome] = RELAY_READS.labels(outcome)._value.get()
    return values


def since(before: dict[str, float]) -> dict[str, float]:
    """What was counted since then."""
    return {name: value - before[name] for name, value in counted().items()}
