"""A coordinator's own code with 1,000 and 10,000 sites on virtual time: CPU of each kind of call.

The coordinator is the real one with its store on disk, in this process and without gRPC. Its sites beat and watch;
together they lease and push 60 groups a virtual second. A version comes each 20 s, and each site that hears of it plans
its pull. gRPC and admission are added: the CPU of one short call at a coordinator process, for each call and each
answer of a watch. TLS, publications, payloads, the learner's stream and metrics are not counted.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc.aio
import psutil

from heterorl.common.types.common import SiteId
from heterorl.common.types.policy import NO_VERSION
from heterorl.common.types.rollout import GroupId
from heterorl.common.types.run import Heartbeat
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.coordinator.core import Coordinator
from heterorl.v1.policy_pb2 import QueryUploadRequest
from heterorl.v1.policy_pb2_grpc import PolicyServiceStub
from tests.support.clock import ManualClock
from tests.support.run import Run

SLICE_S = 0.02
"""Virtual time of one look; heartbeats within it are one operation of the store."""
SECONDS = 40
SECONDS_PER_VERSION = 20
LEASES_PER_S, PER_LEASE = 30, 2
KINDS = ("heartbeat", "watch", "plan", "lease and push")
CALLS, OF_CONNECTION = 4000, 4


async def measure(
    directory: Path, *, sites: Sequence[int], heartbeat_s: float, address: str, pid: int
) -> dict[str, Any]:
    """Rows by number of sites; `address` and `pid` are of a coordinator as a process."""
    call_ms = 1e3 * await call_s(address, pid)
    rows = [await row(directory / f"simulated-{num}", num, heartbeat_s, call_ms) for num in sites]
    return {"call_cpu_ms": round(call_ms, 4), "rows": rows}


async def call_s(address: str, pid: int) -> float:
    """CPU seconds of a coordinator for a call that does not ask its store."""
    server = psutil.Process(pid)
    request = QueryUploadRequest(digest="0" * 64)
    async with grpc.aio.insecure_channel(address) as channel:
        query = PolicyServiceStub(channel).QueryUpload
        await query(request, wait_for_ready=True)
        before = sum(server.cpu_times()[:2])
        for _ in range(CALLS // OF_CONNECTION):
            await asyncio.gather(*(query(request) for _ in range(OF_CONNECTION)))
        return (sum(server.cpu_times()[:2]) - before) / CALLS


class World:
    """One coordinator and its sites; `calls` and `cpu_s` are by kind."""

    def __init__(self, core: Coordinator, clock: ManualClock, directory: Path, num_sites: int) -> None:
        self.run = Run(core, directory)
        self.names = [SiteId(f"site-{number:05}") for number in range(num_sites)]
        self.calls: Counter[str] = Counter()
        self.cpu_s: Counter[str] = Counter()
        self._core = core
        self._clock = clock
        self._sequences: Counter[SiteId] = Counter()
        self._num_told = 0
        self._turns: Counter[str] = Counter()
        self._watches: list[asyncio.Task[None]] = []

    async def begin(self) -> None:
        """Publish version 0; every site registers and watches."""
        await self.run.begin()
        await self.run.publish()
        for name in self.names:
            await self.run.register(name, "1")
        self._watches = [asyncio.ensure_future(self._watch()) for _ in self.names]
        while self._num_told < len(self.names):
            await self._core.database.run(lambda _: None)
        self._num_told = 0

    async def end(self) -> None:
        """End the watches and the coordinator."""
        for watch in self._watches:
            watch.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)
        await self._core.close()

    async def work(self, heartbeat_s: float) -> None:
        """Live for all virtual seconds."""
        version = self.run.head
        for number in range(round(SECONDS / SLICE_S)):
            at = number * SLICE_S
            if int(at) % SECONDS_PER_VERSION == 0 and int(at) // SECONDS_PER_VERSION == self.run.head - version:
                have, root = self.run.head, self.run.roots[self.run.head]
                await self.run.publish()
            await self._timed("heartbeat", self._beat, self._due("heartbeat", len(self.names) / heartbeat_s))
            await self._timed("lease and push", self._lease, self._due("lease and push", LEASES_PER_S))
            started, told = time.process_time(), self._num_told
            self._clock.advance(SLICE_S)
            await self._core.database.run(lambda _: None)
            self.cpu_s["watch"] += time.process_time() - started
            told = self._num_told - told
            self.calls["watch"] += told
            plan = functools.partial(self._core.plan_pull, have_version=have, have_root=root)
            await self._timed("plan", lambda _, plan=plan: plan(want_version=self.run.head), self.names[:told])
        # A lease and a push.
        self.calls["lease and push"] *= 2

    def _due(self, kind: str, per_s: float) -> list[SiteId]:
        """Sites whose turn it is."""
        first, self._turns[kind] = self._turns[kind], self._turns[kind] + 1
        numbers = range(int(first * per_s * SLICE_S), int((first + 1) * per_s * SLICE_S))
        return [self.names[number % len(self.names)] for number in numbers]

    async def _timed(self, kind: str, call: Callable[[SiteId], Awaitable[object]], names: Sequence[SiteId]) -> None:
        started = time.process_time()
        await asyncio.gather(*(call(name) for name in names))
        self.cpu_s[kind] += time.process_time() - started
        self.calls[kind] += len(names)

    async def _beat(self, name: SiteId) -> None:
        root = self.run.roots[self.run.head]
        beat = Heartbeat(site=name, incarnation="1", policy_version=self.run.head, state_root=root, tokens_per_s=100.0)
        await self._core.heartbeat(beat)

    async def _lease(self, name: SiteId) -> None:
        grant = await self._core.lease_work(
            site=name, incarnation="1", max_groups=PER_LEASE, policy_version=self.run.head
        )
        groups = []
        for assignment in grant.assignments:
            self._sequences[name] += 1
            own = GroupId(site=name, incarnation="1", sequence=self._sequences[name])
            groups.append(self.run.group(assignment, id=own))
        await self._core.push_groups(groups)

    async def _watch(self) -> None:
        async for _ in self._core.watch_head(after_version=NO_VERSION):
            self._num_told += 1


async def row(directory: Path, num_sites: int, heartbeat_s: float, call_ms: float) -> dict[str, Any]:
    """Shares of one core, by kind of call."""
    clock = ManualClock()
    config = CoordinatorConfig(data_dir=directory / "data", groups_per_version=500, max_outstanding_groups=4000)
    world = World(await Coordinator.open(config, clock), clock, directory, num_sites)
    await world.begin()
    await world.work(heartbeat_s)
    await world.end()
    kinds = {
        kind: {
            "calls_per_s": round(world.calls[kind] / SECONDS, 1),
            "own_cpu_ms": round(1e3 * world.cpu_s[kind] / world.calls[kind], 4),
            "core_share": round((world.cpu_s[kind] + world.calls[kind] * call_ms / 1e3) / SECONDS, 3),
        }
        for kind in KINDS
    }
    total = round(sum(each["core_share"] for each in kinds.values()), 3)
    found = {"sites": num_sites, "heartbeat_s": heartbeat_s, "core_share": total, "kinds": kinds}
    print(found, flush=True)
    return found
