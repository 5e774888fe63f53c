"""A learner on two machines by torchrun: it trains, survives the death of a rank, and trains every group once.

The machines are two agents with a rank each: on loopback, or one in a network namespace of its own,
from which no coordinator can be reached.
"""

import asyncio
import contextlib
import os
import signal

import pytest
import tomli_w

from heterorl.common.generation.tiny_model import write_tiny_model
from heterorl.learner.learner_config import LearnerConfig
from heterorl.learner.learner_parts import assemble
from tests.support.hand_fed import fed_config, head_of, push, served_coordinator
from tests.support.learner_world import rows
from tests.support.limits import PATIENCE
from tests.support.nodes import Agents, Machine, can_make_namespaces, joined_namespace

pytestmark = pytest.mark.slow
RANK_TIMEOUT_S = 8.0 * PATIENCE


@contextlib.contextmanager
def _machines(kind):
    if kind == "loopback":
        yield Machine(), Machine()
    elif not can_make_namespaces():
        pytest.skip("network namespaces need root and iproute2")
    else:
        with joined_namespace() as made:
            yield made


@pytest.mark.parametrize("kind", ["loopback", pytest.param("namespace", marks=pytest.mark.nodes)])
async def test_killed_rank_ends_all_machines_and_torchrun_goes_on_from_the_checkpoint(tmp_path, kind):
    write_tiny_model(tmp_path / "model", seed=0, hidden_size=32, num_layers=1)
    with _machines(kind) as (first, second):
        async with served_coordinator(tmp_path) as (core, port):
            backend = {"kind": "fsdp2", "rank_timeout_s": RANK_TIMEOUT_S}
            config = fed_config(tmp_path, f"127.0.0.1:{port}", backend) | {"max_steps": 2}
            contract = assemble(LearnerConfig.model_validate({**config, "backend": {"kind": "torch"}})).contract
            (tmp_path / "learner.toml").write_text(tomli_w.dumps(config))
            agents = Agents([first, second], tmp_path / "learner.toml", log=tmp_path / "learner.log", max_restarts=1)
            try:
                await head_of(core, 0)
                await push(core, contract, [1, 2])
                await head_of(core, 1)
                ([rank_0], [rank_1]) = agents.ranks(0), agents.ranks(1)

                os.kill(rank_1, signal.SIGKILL)
                while os.path.exists(f"/proc/{rank_0}"):  # noqa: ASYNC110, ASYNC240, PTH110 - not our child
                    await asyncio.sleep(0.1)
                await push(core, contract, [3, 4])
                codes = [await asyncio.to_thread(agent.wait) for agent in agents.agents]
            finally:
                agents.close()
            status = await core.get_status()

    log = (tmp_path / "learner.log").read_text()
    assert codes == [0, 0], log
    assert "no sign of life from rank 1" in log
    assert (status.head_version, status.ledger.consumed, status.ledger.leased, status.ledger.pending) == (2, 4, 0, 0)
    assert [row["version"] for row in rows(tmp_path / "learner" / "versions.jsonl")] == [0, 1, 2]
    assert [row["step"] for row in rows(tmp_path / "learner" / "steps.jsonl")] == [1, 2]
