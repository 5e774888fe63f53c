"""Where TRL implements the same formula: our loss and gradient against TRL's own code."""

from types import SimpleNamespace

import pytest
import torch
from trl.trainer.grpo_trainer import GRPOTrainer

from heterorl.learner.loss.loss_config import CispoConfig, DapoConfig, DrGrpoConfig, GrpoConfig, GspoConfig, OpsmConfig
from heterorl.learner.loss.objectives import reference_kl_estimates
from tests.support.losses import groups_of, run_loss

LENGTHS = [[4, 2, 5], [1, 6, 3, 3]]
MAX_TOKENS = 9

# TRL's settings and ours for the same formula. TRL's cispo caps the weight at epsilon_high itself, ours at 1 + eps_high.
CASES = {
    "grpo": ({"loss_type": "grpo"}, GrpoConfig()),
    "dr_grpo": ({"loss_type": "dr_grpo"}, DrGrpoConfig()),
    "dapo": ({"loss_type": "dapo", "epsilon_high": 0.28}, DapoConfig()),
    "bnpo, which there is a mean over tokens": ({"loss_type": "bnpo"}, GrpoConfig(aggregation="token_mean")),
    "cispo": ({"loss_type": "cispo", "epsilon_high": 1.2}, CispoConfig()),
    "gspo": ({"loss_type": "grpo", "importance_sampling_level": "sequence"}, GspoConfig()),
    "luspo": ({"loss_type": "luspo", "importance_sampling_level": "sequence"}, GspoConfig(aggregation="sequence_sum")),
    "grpo with two-sided clip": ({"loss_type": "grpo", "delta": 1.4}, GrpoConfig(dual_clip=1.4)),
    "gspo with two-sided clip": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "delta": 1.25},
        GspoConfig(dual_clip=1.25),
    ),
    "opsm": ({"loss_type": "grpo", "off_policy_mask_threshold": 0.05}, OpsmConfig(opsm_threshold=0.05)),
}


def _trl(settings, learner_BT, sampler_BT, mask_BT, advantages_B, reference_BT=None):
    """GRPOTrainer._compute_loss on given log-probs; the trainer is a bag of the attributes that it reads."""
    accelerator = SimpleNamespace(
        num_processes=1, gather=lambda x: x, gather_for_metrics=lambda x: x, reduce=lambda x, reduction: x
    )
    options = {
        "beta": 0.0,
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "importance_sampling_level": "token",
        "off_policy_mask_threshold": None,
        **settings,
    }
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (learner_BT, torch.zeros_like(learner_BT), None),
        get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
        _entropy_bonus_enabled=False,
        _metrics={"train": _Metrics()},
        accelerator=accelerator,
        args=SimpleNamespace(delta=settings.get("delta"), steps_per_generation=1, use_bias_correction_kl=False),
        aux_loss_enabled=False,
        current_gradient_accumulation_steps=1,
        max_completion_length=MAX_TOKENS,
        model=SimpleNamespace(training=True),
        top_entropy_quantile=1.0,
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        **options,
    )
    inputs = {
        "prompt_ids": torch.zeros(mask_BT.shape[0], 1, dtype=torch.long),
        "prompt_mask": torch.ones(mask_BT.shape[0], 1, dtype=torch.long),
        "completion_ids": torch.zeros(mask_BT.shape, dtype=torch.long),
        "completion_mask": mask_BT.long(),
        "advantages": advantages_B,
        "old_per_token_logps": sampler_BT,
        "ref_per_token_logps": reference_BT,
        "num_items_in_batch": mask_BT.sum(),
    }
    return GRPOTrainer._compute_loss(trainer, None, inputs)


class _Metrics(dict):
    def __missing__(self, key):
        self[key] = []
        return self[key]


def _case(seed):
    generator = torch.Generator().manual_seed(seed)
    flat = [length for group in LENGTHS for length in group]
    mask_BT = torch.arange(max(flat))[None] < torch.tensor(flat)[:, None]
    sampler_BT = torch.where(mask_BT, -2.0 * torch.rand(mask_BT.shape, dtype=torch.float64, generator=generator), 0.0)
    noise = 0.4 * torch.randn(mask_BT.shape, dtype=torch.float64, generator=generator)
    learner_BT = torch.where(mask_BT, sampler_BT + noise, 0.0).requires_grad_()
    advantages_B = torch.randn(len(flat), dtype=torch.float64, generator=generator)
    return flat, mask_BT, sampler_BT, learner_BT, advantages_B


@pytest.mark.parametrize(("settings", "config"), CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_loss_and_gradient_equal_those_of_trl(settings, config, seed):
    flat, mask_BT, sampler_BT, learner_BT, advantages_B = _case(seed)

    theirs = _trl(settings, learner_BT, sampler_BT, mask_BT, advantages_B)
    theirs.backward()
    rows = [row[:length] for row, length in zip(sampler_BT.tolist(), flat, strict=True)]
    ours = run_loss(
        config,
        [row[:length] for row, length in zip(learner_BT.tolist(), flat, strict=True)],
        groups_of([rows[:3], rows[3:]], [[0.0] * 3, [0.0] * 4]),
        max_tokens=MAX_TOKENS,
        advantages=advantages_B.tolist(),
    )

    assert ours.value == pytest.approx(theirs.item(), abs=1e-12)
    for row, (gradient, length) in enumerate(zip(ours.gradients, flat, strict=True)):
        torch.testing.assert_close(gradient, learner_BT.grad[row, :length], rtol=0, atol=1e-12)
    assert learner_BT.grad.abs().max() > 1e-3


def test_distance_from_a_reference_is_that_of_trl():
    flat, mask_BT, sampler_BT, learner_BT, advantages_B = _case(1)
    noise = torch.randn(mask_BT.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    reference_BT = torch.where(mask_BT, sampler_BT + 0.5 * noise, 0.0)

    arguments = (learner_BT, sampler_BT, mask_BT, advantages_B, reference_BT)
    theirs = _trl({"loss_type": "grpo", "beta": 0.3}, *arguments) - _trl({"loss_type": "grpo"}, *arguments)
    theirs.backward()
    own_BT = learner_BT.detach().requires_grad_()
    counts_B1 = torch.tensor(flat, dtype=torch.float64)[:, None]
    ours = 0.3 * (reference_kl_estimates(own_BT, reference_BT, mask_BT) * mask_BT / counts_B1).sum() / len(flat)
    ours.backward()

    assert ours.item() == pytest.approx(theirs.item(), abs=1e-12)
    torch.testing.assert_close(own_BT.grad, learner_BT.grad, rtol=0, atol=1e-12)
    assert learner_BT.grad.abs().max() > 1e-3
