"""Every algorithm's loss on stacked runs against the learner's own way from groups to a loss."""

import pytest
import torch
from pydantic import TypeAdapter

from heterorl.learner.loss.loss_spec import ALGORITHMS, loss_spec_of
from heterorl_research.lab.fast import losses as fast
from heterorl_research.lab.fast.layout import Sizes
from heterorl_research.lab.measure import step_extras
from heterorl_research.losses.kinds import LabLoss, learner_loss
from research.tests.support.fast_lab import random_rollouts

SIZES = Sizes(num_prompts=5, group_size=4, prompt_length=3, max_new_tokens=4, vocab_size=19)
OPTIONS = [
    {"kind": "gepo", "denominator": "arithmetic"},
    {"kind": "gepo", "denominator": "geometric", "clip": "preserve"},
    {"kind": "gepo", "normalisation": "raw", "advantage": "mean_std"},
    {"kind": "gepo", "positive_weight": "one", "opsm_threshold": 0.1, "step_size": "ess"},
    {"kind": "gspo", "clip_on": "gepo", "m2_budget": 0.05},
    {"kind": "dapo", "drop_uniform_groups": True},
    {"kind": "decoupled_ppo", "proximal": "loglinear"},
    {"kind": "grpo", "sampler_kl": 0.0, "max_log_weight": 20.0, "dual_clip": 3.0},
    {"kind": "gepo", "denominator": "leave_one_out", "positive_weight": "one_clipped"},
]
MOVED = [
    "gepo_quantile", "gepo_tempered", "ds_gepo", "gspo_token", "vcpo",
    "oapl", "trm", "pnpo", "minpro", "cppo", "dppo", "maxrl",
]  # fmt: skip
CONFIGS = [
    learner_loss(TypeAdapter(LabLoss).validate_python(keys))
    for keys in [*({"kind": kind} for kind in [*ALGORITHMS, *MOVED]), *OPTIONS]
]


def one_step(num_runs):
    rollouts = [random_rollouts(SIZES, seed, version=seed) for seed in range(num_runs)]
    step = fast.gather_step(rollouts, head_version=7, device=torch.device("cpu"))
    noise = torch.randn(step.sampler_RBT.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    learner = (step.sampler_RBT + 0.4 * noise).clamp(max=-1e-3).requires_grad_()
    return step, learner, torch.rand(learner.shape, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.kind)
def test_a_loss_of_stacked_runs_is_the_learners_own(config):
    if loss_spec_of(config).needs_reference:
        pytest.skip("a reference model is not laid out")
    step, learner, entropies = one_step(3)
    total, samples = fast.losses([config] * 3, step, learner, entropies)
    (gradient,) = torch.autograd.grad(total, learner)

    for number in range(3):
        expected, sample = fast._apart(config, number, step, learner, entropies)
        (one,) = torch.autograd.grad(expected, learner)
        # Padding has no gradient on either way.
        assert torch.allclose(gradient[number], one[number], rtol=1e-9, atol=1e-12)
        assert samples[number].loss == pytest.approx(sample.loss, rel=1e-9, abs=1e-12)
        assert torch.allclose(samples[number].weights_M, sample.weights_M)
        assert torch.equal(samples[number].is_clipped_M, sample.is_clipped_M)
        assert torch.allclose(samples[number].kl_B, sample.kl_B)
        assert torch.equal(samples[number].entropies_N, sample.entropies_N)
        theirs = step_extras(sample.sequences)
        assert step_extras(samples[number].sequences) == pytest.approx(theirs, rel=1e-9, abs=1e-12)
    if not getattr(config, "drop_uniform_groups", False):
        assert gradient.abs().sum() > 0


def test_runs_of_several_rules_keep_their_places():
    configs = [CONFIGS[0], CONFIGS[4], CONFIGS[0]]
    step, learner, entropies = one_step(3)
    total, samples = fast.losses(configs, step, learner, entropies)

    apart = [fast._apart(config, number, step, learner, entropies) for number, config in enumerate(configs)]
    assert [sample.loss for sample in samples] == pytest.approx([sample.loss for _, sample in apart])
    assert float(total.detach()) == pytest.approx(sum(float(part.detach()) for part, _ in apart))


def test_what_is_called_together_and_what_apart():
    together = {config.kind for config in CONFIGS if fast.is_separable(loss_spec_of(config))}
    assert {"gepo", "gspo", "grpo", "topr", "cispo", "bnpo", "delta_l", "gmpo"} <= together
    assert {"reinforce", "impala", "mois", "gepo_1s", "gepo_product", "gepo_whole"} <= together
    assert not {"eqp", "m2po", "custom"} & together
