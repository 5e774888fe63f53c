"""Small cells and random rollouts for the tests of the vectorised lab."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from heterorl.common.tasks.task import Prompt
from heterorl_research.lab.cell import Cell, list_cells
from heterorl_research.lab.config import ExperimentConfig
from heterorl_research.lab.fast.generate import Drawn
from heterorl_research.lab.fast.layout import Sizes, extend
from heterorl_research.lab.fast.rollouts import Rollouts
from heterorl_research.lab.fast.work import Work

TASK = {"name": "add1", "task": {"name": "arithmetic", "digits": 1}, "max_new_tokens": 3, "hidden_size": 16}
REGIME = {
    "max_steps": 8, "groups_per_step": 4, "group_size": 4, "evaluate_every": 4, "num_evaluation": 16,
    "probe_every": 4, "num_samplers": 1, "lr": 3e-3, "warmup_steps": 2,
}  # fmt: skip
EOS = 1
VERSIONS = {"kind": "fixed", "unit": "versions", "value": 3}


def cell_of(delay: Any = VERSIONS, *, loss: Any = None, seed: int = 3, **regime: Any) -> Cell:
    """One small cell."""
    experiment = ExperimentConfig.model_validate(
        {
            "algorithms": [{"name": "x", "loss": loss or {"kind": "gepo"}}],
            "delays": [delay],
            "tasks": [TASK],
            "seeds": [seed],
            "regime": {**REGIME, **regime},
        }
    )
    return list_cells(experiment)[0]


def random_rollouts(sizes: Sizes, seed: int, *, version: int = 0) -> Rollouts:
    """Groups of a few short completions, some of them equal, with log-probs that no policy explains."""
    rng = np.random.default_rng(seed)
    shape = (sizes.num_prompts, sizes.group_size)
    tokens = rng.choice([EOS, 2, 3], (*shape, sizes.max_new_tokens), p=[0.2, 0.5, 0.3])
    ends = tokens == EOS
    lengths = np.where(ends.any(-1), ends.argmax(-1) + 1, sizes.max_new_tokens)
    is_token = np.arange(sizes.max_new_tokens) < lengths[..., None]
    tokens = np.where(is_token, tokens, 0)
    logprobs = np.where(is_token, -rng.exponential(1.0, tokens.shape), 0.0).astype(np.float32)
    first, parents = np.zeros_like(tokens), np.zeros(shape, np.int64)
    for position in range(sizes.max_new_tokens):
        parents = extend(parents, tokens[..., position], sizes.vocab_size)
        first[..., position] = parents
    prompts = rng.integers(1, sizes.vocab_size, (sizes.num_prompts, sizes.prompt_length))
    work = Work(
        prompts=[Prompt(index=number, text="", answer="") for number in range(sizes.num_prompts)],
        tokens_GP=prompts,
        noise_GMTV=torch.zeros(0),
    )
    drawn = Drawn(tokens_RGMT=tokens, logprobs_RGMT=logprobs, lengths_RGM=lengths, first_RGMT=first)
    return Rollouts(work=work, drawn=drawn, rewards_GM=rng.integers(0, 2, shape).astype(float), version=version)
