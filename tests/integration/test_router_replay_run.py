"""A run that replays routing: the real learner, coordinator and sampler in one process."""

import asyncio
import random

import pytest

from heterorl.common.errors import ContractMismatch
from heterorl.common.model.router_replay import RouterReplay
from heterorl.common.process.clock import SystemClock
from heterorl.common.types.run import Registration
from heterorl.learner import learner_app
from heterorl.learner.learner_config import LearnerConfig
from heterorl.learner.learner_parts import Parts
from heterorl.learner.learner_parts import assemble as assemble_learner
from heterorl.sampler import sampler_app
from heterorl.sampler.outbox.outbox import Outbox
from heterorl.sampler.sampler_app import load_components as assemble_sampler
from heterorl.sampler.sampler_config import SamplerConfig
from tests.support.engines import write_model
from tests.support.learner_world import open_coordinator

REPLAYED = {"max_new_tokens": 6, "router_replay": "rollout"}
LAYERS, ACTIVE = 2, 2


@pytest.mark.slow
async def test_experts_of_samplers_are_those_of_the_learners_passes(tmp_path, monkeypatch):
    base = write_model(
        tmp_path / "base", family="Qwen3Moe", num_experts=4, num_experts_per_tok=ACTIVE, moe_intermediate_size=16
    )
    shared = {"model_dir": str(base), "group_size": 2}
    learner_config = LearnerConfig(
        **shared, sampling=REPLAYED, state_dir=tmp_path / "learner", groups_per_step=2, max_steps=2,
        backend={"lr": 1e-3},
    )  # fmt: skip
    site = {**shared, "state_dir": tmp_path / "site", "site": "eu-1", "engine": {"batch_rows": 4}, "heartbeat_s": 0.05}
    used = []
    use = RouterReplay.use
    monkeypatch.setattr(RouterReplay, "use", lambda self, routed: (used.append(routed), use(self, routed))[1])
    core = await open_coordinator(tmp_path)
    parts = assemble_learner(learner_config)
    assert parts.contract.routed_token_bytes == LAYERS * ACTIVE
    outbox = Outbox(tmp_path / "site")
    sampler = sampler_app.build(SamplerConfig(**site, sampling=REPLAYED), core, outbox, SystemClock(), random.Random(0))
    learning = learner_app.join(
        learner_config,
        Parts(backend=parts.backend, contract=parts.contract),
        api=core,
        clock=SystemClock(),
        rng=random.Random(0),
    ).run(asyncio.Event())

    result, _ = await asyncio.gather(learning, sampler.run(asyncio.Event()))

    assert result.is_finished
    # A pass of each step, and what ends it.
    assert [one is not None for one in used] == [True, False] * 2
    outbox.close()
    other = assemble_sampler(SamplerConfig(**site, sampling={"max_new_tokens": 6}))
    with pytest.raises(ContractMismatch, match="routed_token_bytes"):
        await core.register(
            Registration(
                site="eu-2", incarnation="b", contract=other.contract, engine="hf", dtype="fp32", max_delay_versions=0
            )
        )
    other.close()
    await core.close()
