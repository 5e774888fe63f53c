"""A rank is killed in the middle of a step: all ranks end, and a restart trains every group once."""

import asyncio
import dataclasses
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tomli_w

from heterorl.common.types.rollout import FinishReason, PushStatus
from heterorl.common.types.run import Registration
from heterorl.common.wire.policy import manifest_from_bytes
from heterorl.coordinator.rpc.server import Server
from heterorl.coordinator.servicers.policy import PolicyServicer
from heterorl.coordinator.servicers.rollout import RolloutServicer
from heterorl.coordinator.servicers.run import RunServicer
from heterorl.demo.tiny_model import write_tiny_model
from heterorl.learner.assembly import assemble
from heterorl.learner.config import LearnerConfig
from heterorl.v1 import policy_pb2_grpc, rollout_pb2_grpc, run_pb2_grpc
from tests.support.learner_world import INCARNATION, SITE, make_group, open_coordinator, rows
from tests.support.links import PLAINTEXT

pytestmark = pytest.mark.timeout(900)


@pytest.fixture
async def served(tmp_path):
    core = await open_coordinator(tmp_path)
    server = Server(max_message_bytes=16 << 20, max_concurrent_rpcs=64, run_id="run", tls=PLAINTEXT)
    policy_pb2_grpc.add_PolicyServiceServicer_to_server(PolicyServicer(core.policy, core.lease), server.grpc)
    rollout_pb2_grpc.add_RolloutServiceServicer_to_server(RolloutServicer(core.rollout), server.grpc)
    run_pb2_grpc.add_RunServiceServicer_to_server(RunServicer(core.run), server.grpc)
    port = await server.start("127.0.0.1:0")
    yield core, port
    await core.end_streams()
    await server.stop(1.0)
    await core.close()


def _config(tmp_path, port):
    return {
        "coordinator": f"127.0.0.1:{port}",
        "tls": {"insecure": True},
        "model_dir": str(tmp_path / "model"),
        "state_dir": str(tmp_path / "learner"),
        "task": {"name": "arithmetic", "digits": 1},
        "sampling": {"max_new_tokens": 8},
        "group_size": 2,
        "groups_per_step": 2,
        "max_steps": 4,
        "metrics_port": 0,
        "backend": {"kind": "deepspeed", "stage": 2, "lr": 1e-3, "threads": 1},
        # The test pushes groups of no task.
        "verification": {"recompute_rewards": False},
    }


class Learner:
    """`heterorl learner --nproc 2` as an operator starts it."""

    def __init__(self, directory: Path, config) -> None:
        path = directory / "learner.toml"
        path.write_text(tomli_w.dumps(config))
        self.log = directory / "learner.log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "heterorl", "learner", "--config", str(path), "--nproc", "2"],
                stdout=log,
                stderr=log,
            )

    def ranks(self) -> list[int]:
        """Process ids of the other ranks; the kernel lists children by the thread that started them."""
        tasks = Path(f"/proc/{self.process.pid}/task")
        children = [int(pid) for task in tasks.iterdir() for pid in (task / "children").read_text().split()]
        return [pid for pid in children if b"heterorl.learner.rank" in Path(f"/proc/{pid}/cmdline").read_bytes()]

    async def end(self) -> int:
        return await asyncio.to_thread(self.process.wait)


async def _head(core, version):
    async for update in core.watch_head(after_version=version - 1):
        return update.version
    raise AssertionError("the stream ended")


def _ended(rollout, eos_token_id):
    """The rollout with tokens of the tiny vocabulary, the end token at its end alone."""
    ids = rollout.token_ids % 16
    ids[ids == eos_token_id] = (eos_token_id + 1) % 16
    ids[-1] = eos_token_id
    return dataclasses.replace(rollout, token_ids=ids, finish_reason=FinishReason.EOS)


async def _push(core, contract, numbers):
    head = (await core.get_status()).head_version
    manifest = manifest_from_bytes((await core.get_signed_manifest(version=head)).data)
    await core.register(
        Registration(
            site=SITE, incarnation=INCARNATION, contract=contract, engine="test", dtype="fp32", max_delay_versions=0
        )
    )
    grant = await core.lease_work(site=SITE, incarnation=INCARNATION, max_groups=len(numbers), policy_version=head)
    groups = []
    for number, work in zip(numbers, grant.assignments, strict=True):
        group = make_group(
            number,
            assignment=work.id,
            prompt_index=work.prompt_index,
            version=head,
            state_root=manifest.state_root,
        )
        rollouts = tuple(_ended(entry, contract.end_token_ids[0]) for entry in group.rollouts)
        groups.append(dataclasses.replace(group, rollouts=rollouts))
    outcomes = await core.push_groups(groups)
    assert [outcome.status for outcome in outcomes] == [PushStatus.ACCEPTED] * len(groups)


async def _until_leased(core, count):
    while (await core.get_status()).ledger.leased < count:  # noqa: ASYNC110 - a lease rings no bell
        await asyncio.sleep(0.05)


async def test_rank_killed_in_a_step_ends_all_and_a_restart_trains_every_group_once(served, tmp_path):
    core, port = served
    write_tiny_model(tmp_path / "model", seed=0, hidden_size=32, num_layers=1)
    config = _config(tmp_path, port)
    contract = assemble(LearnerConfig.model_validate({**config, "backend": {"kind": "torch"}})).contract

    first = Learner(tmp_path, config)
    try:
        await _head(core, 0)
        await _push(core, contract, [1, 2])
        await _head(core, 1)
        [rank] = first.ranks()
        # Stopped, it lets rank 0 wait inside the step for as long as the test likes.
        os.kill(rank, signal.SIGSTOP)
        await _push(core, contract, [3, 4])
        await _until_leased(core, 2)
        os.kill(rank, signal.SIGKILL)
        code = await first.end()
    finally:
        first.process.kill()
        first.process.wait()
    before = await core.get_status()

    second = Learner(tmp_path, config)
    try:
        await _head(core, 2)
        await _push(core, contract, [5, 6])
        await _head(core, 3)
        await _push(core, contract, [7, 8])
        second_code = await second.end()
    finally:
        second.process.kill()
        second.process.wait()

    log = first.log.read_text()
    status = await core.get_status()
    assert code == 1, log
    assert "rank 1 was ended by SIGKILL; all ranks are stopped" in log
    assert (before.head_version, before.ledger.consumed) == (1, 2)
    assert second_code == 0, log
    assert (status.head_version, status.ledger.consumed, status.ledger.leased, status.ledger.pending) == (4, 8, 0, 0)
    assert [row["version"] for row in rows(tmp_path / "learner" / "versions.jsonl")] == [0, 1, 2, 3, 4]
    assert [row["step"] for row in rows(tmp_path / "learner" / "steps.jsonl")] == [1, 2, 3, 4]
