"""A rank is killed in the middle of a step: all ranks end, and a restart trains every group once."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tomli_w

from heterorl.common.generation.tiny_model import write_tiny_model
from heterorl.learner.learner_config import LearnerConfig
from heterorl.learner.learner_parts import assemble
from tests.support.hand_fed import fed_config, head_of, push, served_coordinator, until_leased
from tests.support.learner_world import rows

pytestmark = pytest.mark.timeout(900)


@pytest.fixture
async def served(tmp_path):
    async with served_coordinator(tmp_path) as (core, port):
        yield core, port


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
        return [
            pid for pid in children if b"heterorl.learner.rank_process" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]

    async def end(self) -> int:
        return await asyncio.to_thread(self.process.wait)


async def test_rank_killed_in_a_step_ends_all_and_a_restart_trains_every_group_once(served, tmp_path):
    core, port = served
    write_tiny_model(tmp_path / "model", seed=0, hidden_size=32, num_layers=1)
    config = fed_config(tmp_path, f"127.0.0.1:{port}", {"kind": "deepspeed", "stage": 2})
    contract = assemble(LearnerConfig.model_validate({**config, "backend": {"kind": "torch"}})).contract

    first = Learner(tmp_path, config)
    try:
        await head_of(core, 0)
        await push(core, contract, [1, 2])
        await head_of(core, 1)
        [rank] = first.ranks()
        # Stopped, it lets rank 0 wait inside the step for as long as the test likes.
        os.kill(rank, signal.SIGSTOP)
        await push(core, contract, [3, 4])
        await until_leased(core, 2)
        os.kill(rank, signal.SIGKILL)
        code = await first.end()
    finally:
        first.process.kill()
        first.process.wait()
    before = await core.get_status()

    second = Learner(tmp_path, config)
    try:
        await head_of(core, 2)
        await push(core, contract, [5, 6])
        await head_of(core, 3)
        await push(core, contract, [7, 8])
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
