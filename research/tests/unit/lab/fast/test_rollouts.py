"""Rollouts of the vectorised lab: the mismatch of sampler and learner."""

import math
from dataclasses import replace

import numpy as np
import pytest

from heterorl.common.errors import ConfigError
from heterorl_research.lab.fast.layout import Sizes
from heterorl_research.lab.fast.rollouts import as_reported
from heterorl_research.lab.world import run_cell
from research.tests.support.fast_lab import cell_of, random_rollouts

SIZES = Sizes(num_prompts=8, group_size=8, prompt_length=2, max_new_tokens=400, vocab_size=19)


def test_noise_is_of_the_stated_kl_and_leaves_the_mean_ratio_at_one():
    rollouts = random_rollouts(SIZES, 0)
    whole = replace(rollouts.drawn, lengths_RGM=np.full((8, 8), 400))
    before = replace(rollouts, drawn=whole)
    after = as_reported(before, cell_of(sampler_noise=0.01), step=3)
    noise = (after.drawn.logprobs_RGMT.astype(float) - whole.logprobs_RGMT).ravel()

    spread = math.sqrt(0.02 / noise.size)
    assert noise.mean() == pytest.approx(0.01, abs=4 * spread)
    assert noise.var() == pytest.approx(0.02, rel=0.05)
    assert np.exp(-noise).mean() == pytest.approx(1.0, abs=4 * spread)


def test_noise_is_of_seed_and_step_and_of_tokens_only():
    rollouts = random_rollouts(SIZES, 0)
    cells = [cell_of(sampler_noise=0.01, seed=seed) for seed in (3, 3, 4)]
    rows = [
        as_reported(rollouts, cell, step=step).drawn.logprobs_RGMT for cell, step in zip(cells, (1, 1, 1), strict=True)
    ]
    is_token = np.arange(400) < rollouts.drawn.lengths_RGM[..., None]

    assert np.array_equal(rows[0], rows[1])
    assert not np.array_equal(rows[0], rows[2])
    assert not np.array_equal(rows[0], as_reported(rollouts, cells[0], step=2).drawn.logprobs_RGMT)
    assert not rows[0][~is_token].any()
    assert as_reported(rollouts, cell_of(), step=1) is rollouts


def test_the_services_refuse_a_mismatch_they_do_not_compute(tmp_path):
    with pytest.raises(ConfigError, match="sampler_noise.*--engine fast"):
        run_cell(cell_of(sampler_noise=0.01), model_dir=tmp_path, directory=tmp_path)
