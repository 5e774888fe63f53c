"""A run whose model ends turns and texts by different tokens: one list for the learner, the samplers and the judge."""

import asyncio
import contextlib
import json
import random

import pytest

from heterorl.common.errors import ContractMismatch
from heterorl.common.generation.tiny_model import write_tiny_model
from heterorl.common.process.clock import SystemClock
from heterorl.common.types.rollout import FinishReason, PushStatus
from heterorl.common.types.run import Registration
from heterorl.learner import learner_app
from heterorl.learner.learner_config import LearnerConfig
from heterorl.learner.learner_parts import Parts
from heterorl.learner.learner_parts import assemble as assemble_learner
from heterorl.sampler import sampler_app
from heterorl.sampler.outbox.outbox import Outbox
from heterorl.sampler.sampler_app import load_components as assemble_sampler
from heterorl.sampler.sampler_config import SamplerConfig
from tests.support.learner_world import open_coordinator

SHARED = {"group_size": 8, "sampling": {"max_new_tokens": 12}}
ENDS = (1, 7)


@pytest.fixture
def model_dir(tmp_path):
    directory = write_tiny_model(tmp_path / "model", seed=0, hidden_size=32, num_layers=2)
    path = directory / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": [*reversed(ENDS)]}))
    return str(directory)


@pytest.mark.slow
async def test_completions_end_by_any_token_of_the_list_and_another_list_is_refused(tmp_path, model_dir):
    learner = LearnerConfig(
        **SHARED, model_dir=model_dir, state_dir=tmp_path / "learner", groups_per_step=2, max_steps=2
    )
    config = SamplerConfig(
        **SHARED, model_dir=model_dir, state_dir=tmp_path / "site", site="eu-1", engine={"batch_rows": 16},
        heartbeat_s=0.05,
    )  # fmt: skip
    core = await open_coordinator(tmp_path)
    parts = assemble_learner(learner)
    assert parts.contract.end_token_ids == ENDS
    rollouts, outcomes = [], []

    class Watched:
        def __getattr__(self, name):
            return getattr(core, name)

        async def push_groups(self, groups):
            answers = await core.push_groups(groups)
            outcomes.extend(answers)
            return answers

        async def stream_groups(self, **wanted):
            async with contextlib.aclosing(core.stream_groups(**wanted)) as feed:
                async for queued in feed:
                    rollouts.extend(queued.group.rollouts)
                    yield queued

    outbox = Outbox(config.state_dir)
    sampler = sampler_app.build(config, Watched(), outbox, SystemClock(), random.Random(0))
    learning = learner_app.join(
        learner,
        Parts(backend=parts.backend, contract=parts.contract, verification=parts.verification),
        api=Watched(),
        clock=SystemClock(),
        rng=random.Random(0),
    ).run(asyncio.Event())

    result, _ = await asyncio.gather(learning, sampler.run(asyncio.Event()))

    assert result.is_finished
    assert PushStatus.DROPPED not in {outcome.status for outcome in outcomes}
    last = {int(one.token_ids[-1]) for one in rollouts if one.finish_reason is FinishReason.EOS}
    assert last == set(ENDS)
    assert all(one.sampler_logprobs.size == one.token_ids.size for one in rollouts)
    outbox.close()

    other = assemble_sampler(
        config.model_copy(update={"sampling": config.sampling.model_copy(update={"end_token_ids": (1,)})})
    )
    registration = Registration(
        site="eu-2", incarnation="c1946ac9", contract=other.contract, engine="hf", dtype="fp32", max_delay_versions=0
    )
    with pytest.raises(ContractMismatch, match=r"sampling.end_token_ids .*the run has \(1, 7\), this node \(1,\)"):
        await core.register(registration)
    other.close()
    await core.close()
