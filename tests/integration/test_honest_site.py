"""A site that computes what was published is never quarantined, however far the learner's masters are from that."""

import asyncio
import random

import numpy as np
import pytest
import torch

from heterorl.common.generation.tiny_model import write_tiny_model
from heterorl.common.process.clock import SystemClock
from heterorl.learner import learner_app
from heterorl.learner.learner_config import LearnerConfig
from heterorl.learner.learner_parts import Parts
from heterorl.learner.learner_parts import assemble as assemble_learner
from heterorl.learner.train.model import learner_logprobs
from heterorl.sampler import sampler_app
from heterorl.sampler.outbox.outbox import Outbox
from heterorl.sampler.sampler_config import SamplerConfig
from tests.support.learner_world import open_coordinator

SHARED = {"group_size": 2, "sampling": {"max_new_tokens": 4}}
BOUND = 1e-4
"""Nats; two fp32 forward passes of this model are 1e-6 apart, its masters and their bf16 rounding 1e-3."""


@pytest.mark.parametrize(
    "options",
    [
        {"forward_weights": "published"},
        pytest.param({"forward_weights": "masters"}, marks=pytest.mark.slow),
        pytest.param({"forward_weights": "published", "compute_dtype": "bf16"}, marks=pytest.mark.slow),
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
async def test_masters_further_off_than_the_bound_quarantine_nobody(tmp_path, options):
    model = str(write_tiny_model(tmp_path / "model", seed=0, hidden_size=32, num_layers=2))
    learner = LearnerConfig(
        **SHARED, model_dir=model, state_dir=tmp_path / "learner", groups_per_step=2, max_steps=4,
        backend={"lr": 1e-3, "published_dtype": "bf16", **options},
    )  # fmt: skip
    core = await open_coordinator(tmp_path, canary_threshold=BOUND, groups_per_version=2, max_outstanding_groups=4)
    parts = assemble_learner(learner)
    stated, verdicts, masters = [], [], []
    score, report_canary = parts.canary.score, core.report_canary

    def watched_score(weights):
        with torch.no_grad():
            own, _ = learner_logprobs(parts.backend.torch_model, parts.canary.batch, temperature=1.0)
        stated.append(score(weights))
        masters.append(float(np.median(np.abs(own.numpy() - stated[-1]))))
        return stated[-1]

    class Watched:
        def __getattr__(self, name):
            return getattr(core, name)

        async def report_canary(self, report):
            verdict = await report_canary(report)
            # Here, because a run whose only site is in quarantine never ends.
            assert not verdict.quarantine
            verdicts.append((report.version, verdict))
            return verdict

    parts.canary.score = watched_score
    config = SamplerConfig(
        **SHARED, model_dir=model, state_dir=tmp_path / "site", site="eu-1", engine={"batch_rows": 4}, heartbeat_s=0.05
    )
    outbox = Outbox(config.state_dir)
    sampler = sampler_app.build(config, Watched(), outbox, SystemClock(), random.Random(0))
    learning = learner_app.join(
        learner,
        Parts(backend=parts.backend, contract=parts.contract, canary=parts.canary),
        api=core,
        clock=SystemClock(),
        rng=random.Random(0),
    ).run(asyncio.Event())

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(learning)
        tasks.create_task(sampler.run(asyncio.Event()))

    status = await core.get_status()
    assert status.head_version == 4
    # The masters of every trained version would have been refused.
    assert len(masters) == 5
    assert min(masters[1:]) > BOUND
    assert len({version for version, _ in verdicts}) >= 3
    assert all(verdict.difference < BOUND / 10 for _, verdict in verdicts), verdicts
    (site,) = status.sites
    assert (site.quarantine, site.groups_failed) == ("", 0)
    assert site.groups_accepted >= 8
    outbox.close()
    await core.close()
