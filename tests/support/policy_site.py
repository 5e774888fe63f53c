"""The policy half of a sampler, over a real link to a real coordinator: for tests of what a site accepts."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random

from heterorl.common.identity.signing import Trust
from heterorl.common.process.backoff import Backoff
from heterorl.common.process.clock import Bell, SystemClock
from heterorl.common.pull.puller import Puller
from heterorl.common.rpc.client import CoordinatorClient
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.coordinator.core import Coordinator
from heterorl.coordinator.rpc.grpc_server import Server
from heterorl.coordinator.servicers.policy_servicer import PolicyServicer
from heterorl.coordinator.servicers.rollout_servicer import RolloutServicer
from heterorl.coordinator.servicers.run_servicer import DiagnosisServicer, RunServicer
from heterorl.sampler.delay import NoDelay, Visibility
from heterorl.sampler.trust_record import TrustRecord
from heterorl.sampler.weight_sync import WeightSync
from heterorl.v1 import diagnosis_pb2_grpc, policy_pb2_grpc, rollout_pb2_grpc, run_pb2_grpc
from tests.support.links import PLAINTEXT
from tests.support.run import LAYOUT

NO_DELAY = NoDelay()


@contextlib.asynccontextmanager
async def serving(data_dir, **changes):
    """A client of a coordinator on a port of loopback."""
    config = CoordinatorConfig(data_dir=data_dir, groups_per_version=2, max_staleness_versions=500, **changes)
    core = await Coordinator.open(config, SystemClock())
    server = Server(CoordinatorConfig(max_message_bytes=16 << 20, max_concurrent_rpcs=64, run_id="run", tls=PLAINTEXT))
    policy_pb2_grpc.add_PolicyServiceServicer_to_server(PolicyServicer(core.policy, core.lease), server.grpc)
    rollout_pb2_grpc.add_RolloutServiceServicer_to_server(RolloutServicer(core.rollout), server.grpc)
    run_pb2_grpc.add_RunServiceServicer_to_server(RunServicer(core.run), server.grpc)
    diagnosis_pb2_grpc.add_DiagnosisServiceServicer_to_server(DiagnosisServicer(core.context), server.grpc)
    port = await server.start("127.0.0.1:0")
    try:
        async with CoordinatorClient(f"127.0.0.1:{port}", tls=PLAINTEXT) as client:
            client.served_at = f"127.0.0.1:{port}"
            yield client
            await core.end_streams()
    finally:
        await server.stop(0.2)
        await core.close()


class Counting:
    """An api that notes which payloads are planned, and which are read."""

    def __init__(self, inner):
        self._inner = inner
        self.planned = []
        self.read = []

    async def plan_pull(self, **wanted):
        plan = await self._inner.plan_pull(**wanted)
        self.planned = [payload.kind for payload in plan.payloads]
        return plan

    def __getattr__(self, name):
        return getattr(self._inner, name)

    async def read_payload(self, *, digest, **wanted):
        self.read.append(digest)
        async for frame in self._inner.read_payload(digest=digest, **wanted):
            yield frame


class Heard(logging.Handler):
    """Error lines of the policy sync, to be waited for."""

    def __init__(self):
        super().__init__(logging.ERROR)
        self.lines = asyncio.Queue()

    def emit(self, record):
        self.lines.put_nowait(record.getMessage())


@contextlib.asynccontextmanager
async def sampling(client, directory, keys, *, delay=NO_DELAY, layout=LAYOUT):
    """The policy half of a sampler process with a state directory of its own."""
    bell, api, heard = Bell(), Counting(client), Heard()
    policy = WeightSync(
        api=api,
        puller=Puller(api=api, spool=directory / "incoming", layout=layout, clock=SystemClock()),
        visibility=Visibility(delay, seed=0),
        record=TrustRecord(directory / "versions.jsonl"),
        trust=Trust(keys),
        clock=SystemClock(),
        bell=bell,
        rng=random.Random(0),
        backoff=Backoff(clock=SystemClock(), rng=random.Random(0)),
    )
    logger = logging.getLogger("heterorl.sampler.weight_sync")
    logger.addHandler(heard)
    tasks = [asyncio.create_task(policy.watch()), asyncio.create_task(policy.sync())]

    async def reach(version):
        while True:
            ticket = bell.ticket()
            staged = policy.take(-1)
            if staged is not None and staged.version >= version:
                return staged
            await ticket.wait()

    async def refusal():
        return await heard.lines.get()

    async def end():
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(task.exception() for task in tasks if task.done())

    policy.reach, policy.refusal, policy.end, policy.api = reach, refusal, end, api
    try:
        yield policy
    finally:
        logger.removeHandler(heard)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
