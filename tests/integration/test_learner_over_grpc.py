"""The learner through gRPC: credits, uploads and commits over a real server on a free port."""

import asyncio
import dataclasses

import pytest

from heterorl.common.rpc.client import CoordinatorClient
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.coordinator.rpc.grpc_server import Server
from heterorl.coordinator.servicers.policy_servicer import PolicyServicer
from heterorl.coordinator.servicers.rollout_servicer import RolloutServicer
from heterorl.coordinator.servicers.run_servicer import RunServicer
from heterorl.v1 import policy_pb2_grpc, rollout_pb2_grpc, run_pb2_grpc
from tests.support.learner_world import FragileApi, Killed, fill, head_root, learn, learner_config, open_coordinator
from tests.support.links import PLAINTEXT


@pytest.fixture
async def served(tmp_path):
    core = await open_coordinator(tmp_path)
    server = Server(CoordinatorConfig(max_message_bytes=16 << 20, max_concurrent_rpcs=64, run_id="run", tls=PLAINTEXT))
    policy_pb2_grpc.add_PolicyServiceServicer_to_server(PolicyServicer(core.policy, core.lease), server.grpc)
    rollout_pb2_grpc.add_RolloutServiceServicer_to_server(RolloutServicer(core.rollout), server.grpc)
    run_pb2_grpc.add_RunServiceServicer_to_server(RunServicer(core.run), server.grpc)
    port = await server.start("127.0.0.1:0")
    async with CoordinatorClient(f"127.0.0.1:{port}", tls=PLAINTEXT) as client:
        yield core, client
        await core.end_streams()
    await server.stop(1.0)
    await core.close()


async def test_learner_trains_over_grpc_and_survives_a_kill(served, tmp_path):
    core, client = served
    config = learner_config(tmp_path)
    filling = asyncio.create_task(fill(client, 6))

    with pytest.raises(Killed):
        await learn(config, FragileApi(client, die_after=("publish_version", 3)))
    result = await learn(config, client)

    await filling
    status = await client.get_status()
    assert (result.step, result.version, result.is_finished) == (3, 3, True)
    assert (status.ledger.consumed, status.ledger.pending, status.ledger.leased) == (6, 0, 0)
    reference = await open_coordinator(tmp_path / "reference")
    await asyncio.gather(learn(learner_config(tmp_path / "reference"), reference), fill(reference, 6))
    assert await head_root(core) == await head_root(reference)
    await reference.close()
    for report in await client.list_steps(after_step=0, limit=10):
        times = dataclasses.asdict(report.times)
        assert 0.0 <= sum(times.values()) - times["period_s"] <= times["period_s"]
        # The first step of each process has no version of its own before it.
        assert (times["publishing_s"] > 0.0) == (report.step == 2)
