"""Losses against numbers computed elsewhere: torch autograd and 50-digit arithmetic, shared/algorithms.md 5.1."""

import math

import pytest
import torch

from services.learner.advantages import group_advantages
from services.learner.denominators import group_log_denominator, masked_mean
from services.learner.loss_config import GepoConfig, GrpoConfig, GspoConfig
from services.learner.loss_registry import log_denominators, policy_loss
from services.learner.losses import token_coefficients

TOLERANCE = 1e-9
SAMPLER = [[-0.10, -0.70, -0.05, -1.20, -0.30], [-0.40, -0.20, -0.90], [-0.02, -0.03, -2.50, -0.15], [-1.60, -0.80]]
LEARNER = [[-0.12, -0.50, -0.04, -1.00, -0.25], [-0.55, -0.25, -1.10], [-0.02, -0.05, -2.00, -0.10], [-1.90, -1.00]]
REWARDS = [1.0, 0.0, 1.0, 0.0]


def _padded(rows):
    width = max(len(row) for row in rows)
    values = torch.zeros(len(rows), width, dtype=torch.float64)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for number, row in enumerate(rows):
        values[number, : len(row)] = torch.tensor(row, dtype=torch.float64)
        mask[number, : len(row)] = True
    return values, mask


def _run(config, learner, sampler, rewards, max_tokens=8, advantages=None):
    learner_logprobs_BT, mask_BT = _padded(learner)
    sampler_logprobs_BT, _ = _padded(sampler)
    learner_logprobs_BT.requires_grad_()
    is_valid = mask_BT.any(1)
    if advantages is None:
        advantages = group_advantages(torch.tensor(rewards, dtype=torch.float64), is_valid, kind=config.advantage)
    terms = policy_loss(
        config,
        learner_logprobs_BT=learner_logprobs_BT,
        sampler_logprobs_BT=sampler_logprobs_BT,
        log_denominators_B=log_denominators(config, masked_mean(sampler_logprobs_BT, mask_BT), is_valid),
        mask_BT=mask_BT,
        advantages_B=advantages,
        coefficients_BT=token_coefficients(
            mask_BT,
            aggregation=config.aggregation,
            num_sequences=len(learner),
            num_tokens=int(mask_BT.sum()),
            max_tokens=max_tokens,
        ),
    )
    loss = terms.contributions_B.sum()
    loss.backward()
    return loss.item(), learner_logprobs_BT.grad, terms


CASES = {
    "gepo": (GepoConfig(), -0.061622094100582, [0, 0.122226573473352, -0.133848667573934, 0]),
    "gepo with std": (
        GepoConfig(advantage="mean_std"),
        -0.106714114424192,
        [0, 0.211665973668834, -0.231792545116955, 0],
    ),
    "gepo without clip": (
        GepoConfig(eps_low=1.0, eps_high=100.0),
        -0.114761323749157,
        [-0.157151422536395, 0.122226573473352, -0.133848667573934, 0.05401219288782],
    ),
    "gspo": (
        GspoConfig(advantage="mean"),
        -0.069811727384304,
        [-0.136498515253525, 0.109396664880368, -0.142709877011148, 0],
    ),
    "gspo with the paper's range": (
        GspoConfig(advantage="mean", eps_low=3e-4, eps_high=4e-4),
        -0.000175,
        [0, 0, 0, 0],
    ),
    "grpo": (
        GrpoConfig(),
        -0.099557635762428,
        [-0.131678869118691, 0.189819243200483, -0.164054699351916, 0.088614855334963],
    ),
    "grpo as dapo": (
        GrpoConfig(eps_high=0.28, aggregation="token_mean"),
        -0.343034878104986,
        [-0.339195904188536, 0.162702208457557, -0.187491084973618, 0.050637060191407],
    ),
    "grpo as dr. grpo": (
        GrpoConfig(advantage="mean", aggregation="max_length"),
        -0.084743606240125,
        [-0.047523749011984, 0.041104189906309, -0.047366715151293, 0.012792668016843],
    ),
}


@pytest.mark.parametrize(("config", "loss", "row_gradients"), CASES.values(), ids=CASES.keys())
def test_loss_equals_golden_value_and_gradient(config, loss, row_gradients):
    value, gradient, _ = _run(config, LEARNER, SAMPLER, REWARDS)

    assert value == pytest.approx(loss, abs=TOLERANCE)
    assert gradient.sum(1).tolist() == pytest.approx(row_gradients, abs=TOLERANCE)


def test_gepo_spreads_its_gradient_evenly_over_a_rollout():
    _, gradient, _ = _run(GepoConfig(), LEARNER, SAMPLER, REWARDS)

    assert gradient[1, :3].tolist() == pytest.approx([0.0407421911578] * 3, abs=TOLERANCE)
    assert gradient[2, :4].tolist() == pytest.approx([-0.0334621668935] * 4, abs=TOLERANCE)


@pytest.mark.parametrize(
    ("config", "weights"),
    [
        (GepoConfig(), [1.25721138029115826668, 0.977812587786816919649, 1.07078934059147382785, 0.43209754310255703]),
        (GspoConfig(), [1.0919881220281975, 0.8751733190429474, 1.1416790160891845, 0.7788007830714049]),
    ],
)
def test_weights_equal_golden_values(config, weights):
    _, _, terms = _run(config, LEARNER, SAMPLER, REWARDS)

    assert terms.weights.tolist() == pytest.approx(weights, abs=1e-12)


def test_clip_mask_marks_the_rollouts_that_gepo_gives_no_gradient():
    # w = (1.257, .978, 1.071, .432), A = (+, -, +, -): the first is above 1.2 and good, the last below .8 and bad.
    _, _, terms = _run(GepoConfig(), LEARNER, SAMPLER, REWARDS)

    assert terms.is_clipped.tolist() == [True, False, False, True]


def test_gepo_equals_golden_value_on_probabilities():
    sampler, learner = [0.8, 0.6, 0.4, 0.2], [0.9, 0.5, 0.5, 0.1]
    advantages = torch.tensor([0.5, 0.5, -0.5, -0.5], dtype=torch.float64)

    loss, gradient, terms = _run(
        GepoConfig(), [[math.log(p)] for p in learner], [[math.log(q)] for q in sampler], None, advantages=advantages
    )

    # E = (.64 + .36 + .16 + .04) / 2 = .6; w = p / .6
    assert terms.weights.tolist() == pytest.approx([1.5, 5 / 6, 5 / 6, 1 / 6], abs=TOLERANCE)
    assert loss == pytest.approx(-0.05, abs=TOLERANCE)
    assert gradient[:, 0].tolist() == pytest.approx([0, -5 / 48, 5 / 48, 0], abs=TOLERANCE)


def test_denominator_equals_golden_value_where_probabilities_underflow():
    sampler = torch.tensor([-1200.0, -1201.0, -1205.0, -1300.0], dtype=torch.float64)
    learner = torch.tensor([-1190.0, -1203.0, -1204.0, -1290.0], dtype=torch.float64)

    log_mean = group_log_denominator(sampler, torch.ones(4, dtype=torch.bool), kind="contraharmonic")

    assert log_mean == pytest.approx(-1200.19120743087851, abs=TOLERANCE)
    assert (learner - log_mean).tolist() == pytest.approx(
        [10.1912074309, -2.80879256912, -3.80879256912, -89.8087925691], abs=1e-9
    )


@pytest.mark.parametrize(
    ("config", "weights"),
    [
        (GepoConfig(), [1.0098608, 0.9849273, 1.0149228, 1.0048241]),
        (GspoConfig(), [1.0050125, 0.9900498, 1.0, 1.0202013]),
    ],
)
def test_weights_equal_golden_values_on_long_rollouts(config, weights):
    lengths = [16384, 16000, 12000, 8192]
    sampler = [[mean] * length for mean, length in zip([-0.70, -0.71, -0.69, -0.72], lengths, strict=True)]
    learner = [[mean] * length for mean, length in zip([-0.695, -0.72, -0.69, -0.70], lengths, strict=True)]

    _, _, terms = _run(config, learner, sampler, REWARDS)

    # The golden weights are given to seven decimals.
    assert terms.weights.tolist() == pytest.approx(weights, abs=5e-8)
