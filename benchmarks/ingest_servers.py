"""Servers that take groups in, each a process on one core: a coordinator; peers are in benchmarks.ingest_peers.

Every server gives clients that push lists of the same bytes and return when all of them are durable.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import psutil

from benchmarks.groups import bench_contract, group_of, publish
from heterorl.common.errors import HeterorlError
from heterorl.common.identity.tls import TlsConfig
from heterorl.common.rpc.client import CoordinatorClient
from heterorl.common.types.common import Digest, SiteId
from heterorl.common.types.rollout import PushStatus, SealedGroup, WorkAssignment
from heterorl.common.types.run import Registration
from heterorl.common.weights.arena import Arena, Layout, TensorSpec
from heterorl.common.wire.sealed_groups import group_message, read_sealed, seal
from heterorl.demo.processes import start, stop
from tests.support.ports import free_port

INCARNATION = "b1946ac9"
LEASED_AT_ONCE = 4096
MESSAGE_BYTES = 16 << 20
CONNECT_S = 30.0


class Missing(Exception):
    """A server or its client library is not installed."""


class Client(Protocol):
    """One connection."""

    async def push(self, groups: Sequence[SealedGroup]) -> None:
        """Send groups; they are durable when this returns."""

    async def close(self) -> None:
        """End the connection."""


class Server(Protocol):
    """One server; `durability` says in words what an answer promises."""

    name: str
    durability: str

    async def start(self, directory: Path, *, num_tokens: int) -> None:
        """Start it in a directory of its own."""

    async def client(self, number: int) -> Client:
        """A connection of its own."""

    def cpu_s(self) -> float:
        """CPU that the server's processes have taken."""

    async def stop(self) -> None:
        """End it."""


@contextlib.contextmanager
def on_core(core: int) -> Iterator[None]:
    """Processes that begin here stay on one core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class Groups:
    """Groups of one size, alike but for what tells them apart; made when they are needed."""

    def __init__(self, *, num_tokens: int, root: Digest) -> None:
        work = WorkAssignment(id=0, prompt_index=0, seed=0, lease_s=1.0)
        group = group_of(work, 1, root=root, num_tokens=num_tokens)
        self._raw = group_message(seal(group).data)
        self.num_bytes = len(self.make(SiteId("bench-0"), 1, work).data)

    def make(self, site: SiteId, sequence: int, work: WorkAssignment) -> SealedGroup:
        """The group of an assignment."""
        raw = self._raw
        raw.id.site, raw.id.incarnation, raw.id.sequence = site, INCARNATION, sequence
        raw.assignment, raw.prompt_index = work.id, work.prompt_index
        return read_sealed(raw.SerializeToString(deterministic=True))


class Heterorl:
    """A coordinator as it is shipped, with a learner's lease and one site for each client."""

    name = "heterorl"
    durability = "outcome after the commit: SQLite, WAL, synchronous=FULL; groups of all streams share an fsync"

    def __init__(self, core: int) -> None:
        self._core = core
        self._address = ""
        self.root = Digest("")
        self.layout_id = Digest("")

    async def start(self, directory: Path, *, num_tokens: int) -> None:
        """Start a coordinator and publish version 0."""
        self._address = f"127.0.0.1:{free_port()}"
        tables = {
            "run_id": "bench", "data_dir": str(directory / "data"), "listen": self._address, "metrics_port": 0,
            "tls": {"insecure": True}, "max_staleness_versions": 1000, "max_superseded_s": 1e6,
            "groups_per_version": 1 << 18, "max_outstanding_groups": 1 << 18, "site_pending_bytes": 1 << 40,
            "learner_lease_s": 600.0, "work_lease_s": 3600.0,
        }  # fmt: skip
        with on_core(self._core):
            self._child = start("coordinator", name="coordinator", tables=tables, directory=directory)
        self._process = psutil.Process(self._child.process.pid)
        layout = Layout.build([TensorSpec(name="w", dtype="bf16", shape=(64,))])
        self._contract = bench_contract(layout.layout_id, num_tokens)
        api = self._connect(-1)
        deadline = time.monotonic() + CONNECT_S
        while True:
            try:
                grant = await api.acquire_lease(holder="bench", contract=self._contract, request_id="bench")
                break
            except HeterorlError:
                if time.monotonic() > deadline or self._child.exit_code is not None:
                    raise
                await asyncio.sleep(0.1)
        self.root = await publish(api, Arena(layout), grant.epoch, directory)
        await api.close()

    def _connect(self, number: int) -> CoordinatorClient:
        # gRPC joins connections of equal options within a process.
        return CoordinatorClient(
            self._address, tls=TlsConfig(insecure=True), max_message_bytes=MESSAGE_BYTES + 1 + number
        )

    async def client(self, number: int) -> HeterorlClient:
        """A registered site."""
        site, api = SiteId(f"bench-{number}"), self._connect(number)
        await api.register(
            Registration(
                site=site, incarnation=INCARNATION, contract=self._contract, engine="bench", dtype="fp32",
                max_delay_versions=0,
            )
        )  # fmt: skip
        return HeterorlClient(api, site)

    def cpu_s(self) -> float:
        """CPU of the coordinator."""
        times = self._process.cpu_times()
        return float(times.user + times.system)

    async def stop(self) -> None:
        """End the coordinator."""
        await asyncio.to_thread(stop, [self._child])


class HeterorlClient:
    """A site's connection."""

    def __init__(self, api: CoordinatorClient, site: SiteId) -> None:
        self._api = api
        self.site = site

    async def lease(self, count: int) -> list[WorkAssignment]:
        """Assignments."""
        work: list[WorkAssignment] = []
        while len(work) < count:
            grant = await self._api.lease_work(
                site=self.site, incarnation=INCARNATION, max_groups=min(LEASED_AT_ONCE, count - len(work)),
                policy_version=0,
            )  # fmt: skip
            assert grant.assignments, grant.reason
            work += grant.assignments
        return work

    async def push(self, groups: Sequence[SealedGroup]) -> None:
        """Push as a sampler does."""
        outcomes = await self._api.push_groups(groups)
        assert len(outcomes) == len(groups), "the link broke"
        assert all(outcome.status is PushStatus.ACCEPTED for outcome in outcomes), outcomes[0]

    async def close(self) -> None:
        """End the connection."""
        await self._api.close()
