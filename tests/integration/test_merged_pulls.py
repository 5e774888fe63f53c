"""Samplers far behind, over a real server: one object, the same state as by the chain, also after a crash."""

import asyncio
import os
import signal
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from heterorl.common.rpc.calls import RetryPolicy
from heterorl.common.rpc.client import CoordinatorClient
from heterorl.common.types.policy import PayloadKind
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.coordinator.rpc.grpc_server import Server
from heterorl.coordinator.servicers.policy_servicer import PolicyServicer
from heterorl.v1 import policy_pb2_grpc
from tests.support.links import PLAINTEXT
from tests.support.merging import Counted, count_composed, merging, published, puller

ROOT = Path(__file__).parents[2]
QUICK = RetryPolicy(budget_s=5.0, base_s=0.01, cap_s=0.05)


@asynccontextmanager
async def served(core):
    """A client of the coordinator behind a port of loopback."""
    server = Server(CoordinatorConfig(max_message_bytes=2 << 20, max_concurrent_rpcs=64, run_id="run", tls=PLAINTEXT))
    policy_pb2_grpc.add_PolicyServiceServicer_to_server(PolicyServicer(core.policy, core.lease), server.grpc)
    port = await server.start("127.0.0.1:0")
    client = CoordinatorClient(f"127.0.0.1:{port}", tls=PLAINTEXT, policy=QUICK)
    try:
        yield client
    finally:
        await client.close()
        await core.end_streams()
        await server.stop(0.2)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_sampler_8_64_or_256_versions_behind_pulls_one_object_and_ends_at_the_state_of_the_chain(tmp_path):
    # The head is no multiple of 4, so no block fits a lag: what is pulled was made because somebody asked.
    head = 259
    async with merging(tmp_path) as core:
        run = await published(core, tmp_path, head)
        await core.merger.settle()
        async with served(core) as client:
            for lag in (8, 64, 256):
                new, old = Counted(client), Counted(client, is_old=True)
                held = await puller(old, tmp_path / "held").pull(held=None, want_version=head - lag)

                first = await puller(new, tmp_path / "first").pull(held=held, want_version=-1)
                num_first = new.num_read
                await core.merger.settle()
                new.num_read = 0
                second = await puller(new, tmp_path / "second").pull(held=held, want_version=-1)
                chain = await puller(old, tmp_path / "chain").pull(held=held, want_version=-1)

                assert (new.num_read, new.kinds) == (1, {PayloadKind.MERGED: 1})
                assert 1 < num_first < lag or lag == 8, "blocks served the first one meanwhile"
                assert old.kinds == {PayloadKind.DELTA: lag}
                roots = {pulled.arena.state_root() for pulled in (first, second, chain)}
                assert roots == {run.roots[head]}
                for number in range(second.arena.num_chunks):
                    assert second.arena.chunk(number).tobytes() == chain.arena.chunk(number).tobytes()


async def test_samplers_at_once_cause_one_composition(tmp_path):
    async with merging(tmp_path) as core:
        run = await published(core, tmp_path, 7)
        await core.merger.settle()
        made = count_composed(core)
        async with served(core) as client:
            held = await puller(client, tmp_path / "held").pull(held=None, want_version=0)
            pulls = [puller(client, tmp_path / f"s{n}").pull(held=held, want_version=-1) for n in range(4)]
            pulled = await asyncio.gather(*pulls)
            await core.merger.settle()

    assert {one.arena.state_root() for one in pulled} == {run.roots[7]}
    assert len(made) == 1


@pytest.mark.slow
@pytest.mark.parametrize("num_chunks", [0, 3, 8])
async def test_kill_in_the_middle_of_a_composition_costs_only_the_work(tmp_path, num_chunks):
    async with merging(tmp_path, merged_bytes=0) as core:
        run = await published(core, tmp_path, 9)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
    child = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "tests.support.merge_child", str(tmp_path), str(num_chunks)],
        cwd=ROOT, env=environment, capture_output=True, check=False,
    )  # fmt: skip
    assert child.returncode == -signal.SIGKILL, child.stderr
    folder = tmp_path / "data" / "merged"
    # Six chunks an object: the block 4-8 first, then 0-4.
    names = ["compose.tmp"] if num_chunks < 6 else ["4-8", "compose.tmp"]
    assert sorted(path.name.rsplit("-", 1)[0] for path in folder.iterdir()) == names

    async with merging(tmp_path) as core, served(core) as client:
        await core.merger.settle()
        held = await puller(client, tmp_path / "held").pull(held=None, want_version=0)
        first = await puller(client, tmp_path / "a").pull(held=held, want_version=-1)
        await core.merger.settle()
        api = Counted(client)
        second = await puller(api, tmp_path / "a").pull(held=held, want_version=-1)

        assert api.num_read == 1
        assert {first.arena.state_root(), second.arena.state_root()} == {run.roots[9]}
        assert [path for path in folder.iterdir() if path.name.startswith("compose")] == []
