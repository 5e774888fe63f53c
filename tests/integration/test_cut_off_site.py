"""Two sites over real sockets: one is cut off with its reserve, and brings everything when the line is back."""

import asyncio
import contextlib
import dataclasses

import pytest

from heterorl.common.errors import Unreachable
from heterorl.common.rpc.calls import RetryPolicy
from heterorl.common.rpc.client import CoordinatorClient
from heterorl.common.types.common import SiteId
from heterorl.common.types.rollout import GroupId, PushStatus
from heterorl.common.types.run import Heartbeat
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.coordinator.core import Coordinator
from heterorl.coordinator.rpc.grpc_server import Server
from heterorl.coordinator.servicers.policy_servicer import PolicyServicer
from heterorl.coordinator.servicers.rollout_servicer import RolloutServicer
from heterorl.coordinator.servicers.run_servicer import RunServicer
from heterorl.v1 import policy_pb2_grpc, rollout_pb2_grpc, run_pb2_grpc
from tests.support.clock import ManualClock
from tests.support.links import PLAINTEXT
from tests.support.relay import Relay
from tests.support.run import INCARNATION, Run

QUICK = RetryPolicy(budget_s=0.3, base_s=0.01, cap_s=0.05)
PER_VERSION, LIMIT, LEASE_S, AHEAD_S = 4, 32, 120.0, 600.0


class Site:
    """A sampler's calls over its own connection."""

    def __init__(self, name, port, run):
        self.name, self.run = SiteId(name), run
        self.client = CoordinatorClient(f"127.0.0.1:{port}", tls=PLAINTEXT, policy=QUICK)
        self.outbox = []

    async def register(self):
        return await self.client.register(self.run.registration(site=self.name, work_ahead_s=AHEAD_S))

    async def generate(self, count):
        """Lease work and put its groups into the outbox; returns the assignments."""
        grant = await self.client.lease_work(
            site=self.name, incarnation=INCARNATION, max_groups=count, policy_version=self.run.head
        )
        for work in grant.assignments:
            group_id = GroupId(site=self.name, incarnation=INCARNATION, sequence=len(self.outbox) + 1)
            self.outbox.append(dataclasses.replace(self.run.group(work), id=group_id))
        return [work.id for work in grant.assignments]

    async def beat(self):
        await self.client.heartbeat(
            Heartbeat(
                site=self.name, incarnation=INCARNATION, policy_version=self.run.head, state_root="", tokens_per_s=0.0
            )
        )

    async def return_(self):
        """Try until the line is back; gRPC dials ever more rarely."""
        while True:
            with contextlib.suppress(Unreachable):
                return await self.beat()


@pytest.fixture
async def core(tmp_path):
    config = CoordinatorConfig(
        data_dir=tmp_path / "data", groups_per_version=PER_VERSION, max_outstanding_groups=LIMIT,
        work_lease_s=LEASE_S, max_staleness_versions=64,
    )  # fmt: skip
    core = await Coordinator.open(config, ManualClock())
    server = Server(config.model_copy(update={"max_concurrent_rpcs": 64, "run_id": "run", "tls": PLAINTEXT}))
    policy_pb2_grpc.add_PolicyServiceServicer_to_server(PolicyServicer(core.policy, core.lease), server.grpc)
    rollout_pb2_grpc.add_RolloutServiceServicer_to_server(RolloutServicer(core.rollout), server.grpc)
    run_pb2_grpc.add_RunServiceServicer_to_server(RunServicer(core.run), server.grpc)
    core.port = await server.start("127.0.0.1:0")
    yield core
    await core.end_streams()
    await server.stop(0.2)
    await core.close()


async def train(core, run, count):
    """Take groups as a learner does and publish them in versions."""

    async def credits():
        yield count
        await asyncio.Event().wait()

    ids = []
    stream = core.stream_groups(epoch=run.epoch, held=(), credits=credits())
    async for queued in stream:
        ids.append(queued.group.id)
        if len(ids) == count:
            break
    for start in range(0, count, PER_VERSION):
        await run.publish(consumed=ids[start : start + PER_VERSION])
    await stream.aclose()
    return ids


async def test_site_that_was_cut_off_brings_everything_and_nothing_is_taken_twice(core, tmp_path):
    run = Run(core, tmp_path)
    await run.begin()
    await run.publish()
    async with Relay(f"127.0.0.1:{core.port}", one_way_s=0.0).open() as relay:
        far, near = Site("far", relay.port, run), Site("near", core.port, run)
        assert (await far.register()).work_ahead_s == AHEAD_S
        await near.register()
        reserve = await far.generate(4096)
        assert len(reserve) == 24
        relay.cut()
        with pytest.raises(Unreachable):
            await far.client.push_groups(far.outbox[:4])

        # The other one gets what is left, until the silent one counts as away: then it is paced as if it were alone.
        worked = await near.generate(12)
        assert len(worked) == LIMIT - 24
        core.clock.advance(LEASE_S + 1)
        for number in range(4):
            await near.beat()
            worked += await near.generate(12 if number else 4)
            left = near.outbox[-12:]
            assert [o.status for o in await near.client.push_groups(left)] == [PushStatus.ACCEPTED] * 12
            await train(core, run, 12)
        assert not set(worked) & set(reserve)
        (status,) = [each for each in (await near.client.get_status()).sites if each.site == "far"]
        assert (status.work_leased, status.work_away) == (24, 24)

        relay.mend()
        await far.return_()
        outcomes = await far.client.push_groups(far.outbox)
        assert [outcome.status for outcome in outcomes] == [PushStatus.ACCEPTED] * 24
        again = await far.client.push_groups(far.outbox)
        assert [outcome.status for outcome in again] == [PushStatus.DUPLICATE] * 24
        assert {group_id.site for group_id in await train(core, run, 24)} == {"far"}

        status = await near.client.get_status()
        assert (status.ledger.acked, status.ledger.consumed) == (72, 72)
        assert status.ledger.is_balanced
        rows = await core.database.run(
            lambda c: c.execute("SELECT assignment FROM groups WHERE state = 'consumed'").fetchall()
        )
        assert sorted(row[0] for row in rows) == list(range(72))
        await far.client.close()
        await near.client.close()
