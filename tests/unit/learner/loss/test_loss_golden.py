"""Losses against numbers computed elsewhere: torch autograd and 50-digit arithmetic."""

import math

import pytest
import torch

from heterorl.learner.loss.group import beta_weights, group_log_denominator
from heterorl.learner.loss.loss_config import (
    CispoConfig,
    DapoConfig,
    DeltaLConfig,
    DrGrpoConfig,
    DsGspoConfig,
    EqpConfig,
    GepoConfig,
    GmpoConfig,
    GrpoConfig,
    GspoConfig,
    TisConfig,
    ToprConfig,
)
from tests.support.losses import GOLDEN_LEARNER, GOLDEN_REWARDS, GOLDEN_SAMPLER, groups_of, run_loss

TOLERANCE = 1e-9

CASES = {
    "gepo": (GepoConfig(), -0.061622094100582, [0, 0.122226573473352, -0.133848667573934, 0]),
    "gepo with std": (
        GepoConfig(advantage="mean_std"),
        -0.106714114424192,
        [0, 0.211665973668834, -0.231792545116955, 0],
    ),
    "gepo without clip": (
        GepoConfig(clip="none"),
        -0.114761323749157,
        [-0.157151422536395, 0.122226573473352, -0.133848667573934, 0.05401219288782],
    ),
    "gepo with a range that never binds": (
        GepoConfig(eps_low=1.0, eps_high=100.0),
        -0.114761323749157,
        [-0.157151422536395, 0.122226573473352, -0.133848667573934, 0.05401219288782],
    ),
    "gepo preserving gradients": (
        GepoConfig(clip="preserve"),
        -0.061622094100582,
        [-0.15, 0.122226573473352, -0.133848667573934, 0.1],
    ),
    "gspo": (
        GspoConfig(advantage="mean"),
        -0.069811727384304,
        [-0.136498515253525, 0.109396664880368, -0.142709877011148, 0],
    ),
    "gspo with the paper's range": (GspoConfig(advantage="mean", eps_low=3e-4, eps_high=4e-4), -0.000175, [0, 0, 0, 0]),
    "ds_gspo": (
        DsGspoConfig(advantage="mean"),
        -0.069579630871761,
        [-0.136435762905489, 0.109464985634557, -0.142608853600829, 0],
    ),
    "eqp": (
        EqpConfig(),
        -0.061552535808640,
        [0.004419052729691, 0.124830444855487, -0.129981424479298, 0.00073192689412],
    ),
    "grpo": (
        GrpoConfig(),
        -0.099557635762428,
        [-0.131678869118691, 0.189819243200483, -0.164054699351916, 0.088614855334963],
    ),
    "dapo": (
        DapoConfig(),
        -0.343034878104986,
        [-0.339195904188536, 0.162702208457557, -0.187491084973618, 0.050637060191407],
    ),
    "dr_grpo": (
        DrGrpoConfig(),
        -0.084743606240125,
        [-0.047523749011984, 0.041104189906309, -0.047366715151293, 0.012792668016843],
    ),
    "delta_l of 3/4": (
        DeltaLConfig(length_power=0.75),
        -0.037327219668352,
        [-0.033721487471722, 0.042782748873773, -0.039733041170237, 0.018047297017527],
    ),
    "delta_l of 1": (
        DeltaLConfig(),
        -0.022398539053596,
        [-0.029625194189288, 0.04270565185071, -0.03690912868932, 0.019936625480795],
    ),
    "gmpo": (
        GmpoConfig(advantage="mean"),
        -0.068938110082548,
        [-0.136498515253525, 0.109396664880368, -0.104389768194988, 0.097350097883926],
    ),
    "cispo": (
        CispoConfig(advantage="mean"),
        0.034174811462826,
        [-0.194339997741677, 0.093952434071563, -0.151123920345814, 0.055698177634275],
    ),
    "tis": (
        TisConfig(),
        0.067372907128559,
        [-0.195868766181689, 0.093952434071563, -0.167149680013675, 0.055698177634275],
    ),
    "topr": (ToprConfig(), 0.130931624920706, [-0.625, 0.251370017263365, -0.5, 0.151632664928158]),
}


def _run(config, **changes):
    return run_loss(config, GOLDEN_LEARNER, groups_of([GOLDEN_SAMPLER], [GOLDEN_REWARDS]), **changes)


@pytest.mark.parametrize(("config", "loss", "row_gradients"), CASES.values(), ids=CASES.keys())
def test_loss_equals_golden_value_and_gradient(config, loss, row_gradients):
    outcome = _run(config)

    assert outcome.value == pytest.approx(loss, abs=TOLERANCE)
    assert outcome.row_sums == pytest.approx(row_gradients, abs=TOLERANCE)


def test_gepo_spreads_its_gradient_evenly_over_a_rollout():
    gradients = _run(GepoConfig()).gradients

    assert gradients[1].tolist() == pytest.approx([0.0407421911578] * 3, abs=TOLERANCE)
    assert gradients[2].tolist() == pytest.approx([-0.0334621668935] * 4, abs=TOLERANCE)


GEPO_WEIGHTS = [1.25721138029115826668, 0.977812587786816919649, 1.07078934059147382785, 0.43209754310255703]
GSPO_WEIGHTS = [1.0919881220281975, 0.8751733190429474, 1.1416790160891845, 0.7788007830714049]


@pytest.mark.parametrize(("config", "weights"), [(GepoConfig(), GEPO_WEIGHTS), (GspoConfig(), GSPO_WEIGHTS)])
def test_weights_equal_golden_values(config, weights):
    [terms] = _run(config).terms

    assert terms.weights.tolist() == pytest.approx(weights, abs=1e-12)


def test_clip_mask_marks_the_rollouts_that_gepo_gives_no_gradient():
    # w = (1.257, .978, 1.071, .432), A = (+, -, +, -): the first is above 1.2 and good, the last below .8 and bad.
    [terms] = _run(GepoConfig()).terms

    assert terms.is_clipped.tolist() == [True, False, False, True]


def test_gepo_equals_golden_value_on_probabilities():
    sampler, learner = [0.8, 0.6, 0.4, 0.2], [0.9, 0.5, 0.5, 0.1]
    groups = groups_of([[[math.log(q)] for q in sampler]], [[0.0] * 4])

    outcome = run_loss(GepoConfig(), [[math.log(p)] for p in learner], groups, advantages=[0.5, 0.5, -0.5, -0.5])

    # E = (.64 + .36 + .16 + .04) / 2 = .6; w = p / .6
    assert outcome.terms[0].weights.tolist() == pytest.approx([1.5, 5 / 6, 5 / 6, 1 / 6], abs=TOLERANCE)
    assert outcome.value == pytest.approx(-0.05, abs=TOLERANCE)
    assert outcome.row_sums == pytest.approx([0, -5 / 48, 5 / 48, 0], abs=TOLERANCE)


def test_denominator_equals_golden_value_where_probabilities_underflow():
    sampler = torch.tensor([-1200.0, -1201.0, -1205.0, -1300.0], dtype=torch.float64)
    learner = torch.tensor([-1190.0, -1203.0, -1204.0, -1290.0], dtype=torch.float64)

    log_mean = group_log_denominator(sampler, kind="contraharmonic")

    assert log_mean == pytest.approx(-1200.19120743087851, abs=TOLERANCE)
    assert (learner - log_mean).tolist() == pytest.approx(
        [10.1912074309, -2.80879256912, -3.80879256912, -89.8087925691], abs=1e-9
    )


LENGTHS = [16384, 16000, 12000, 8192]
LONG_SAMPLER, LONG_LEARNER = [-0.70, -0.71, -0.69, -0.72], [-0.695, -0.72, -0.69, -0.70]


@pytest.mark.parametrize(
    ("config", "weights"),
    [
        (GepoConfig(), [1.0098608, 0.9849273, 1.0149228, 1.0048241]),
        (GspoConfig(), [1.0050125, 0.9900498, 1.0, 1.0202013]),
    ],
)
def test_weights_equal_golden_values_on_long_rollouts(config, weights):
    sampler = [[mean] * length for mean, length in zip(LONG_SAMPLER, LENGTHS, strict=True)]
    learner = [[mean] * length for mean, length in zip(LONG_LEARNER, LENGTHS, strict=True)]

    outcome = run_loss(config, learner, groups_of([sampler], [GOLDEN_REWARDS]))

    # The golden weights are given to seven decimals.
    assert outcome.terms[0].weights.tolist() == pytest.approx(weights, abs=5e-8)


@pytest.mark.parametrize(
    ("power", "shares"),
    [(1.0, [0.185552, 0.190005, 0.253340, 0.371103]), (0.75, [0.201499, 0.205115, 0.254508, 0.338879])],
)
def test_delta_l_counts_rollouts_by_golden_shares(power, shares):
    # On policy every token has ratio 1, so a row's gradient is -A share T / max_tokens, and max_tokens is 1.
    sampler = [[-0.7] * length for length in LENGTHS]

    outcome = run_loss(DeltaLConfig(length_power=power), sampler, groups_of([sampler], [GOLDEN_REWARDS]), max_tokens=1)

    advantages = [0.5, -0.5, 0.5, -0.5]
    actual = [-total / a / n for total, a, n in zip(outcome.row_sums, advantages, LENGTHS, strict=True)]
    assert actual == pytest.approx(shares, abs=5e-7)


def test_beta_weights_equal_golden_values():
    weights = beta_weights(torch.tensor([0.25, 0.5, 0.625, 0.875], dtype=torch.float64))

    assert weights.tolist() == pytest.approx([0.9724993064, 0.8069381251, 0.8071809894, 1.0425625029], abs=1e-9)
