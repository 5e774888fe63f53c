"""Numbers of a whole group: log denominators and advantages."""

import math

import mpmath
import pytest
import torch

from heterorl.common.errors import ConfigError
from heterorl.learner.loss.group import (
    beta_weights,
    expected_learner_log_denominator,
    group_advantages,
    group_log_denominator,
    masked_mean,
)

F64 = torch.float64
MEANS = torch.tensor([-0.47, -0.5, -0.675, -1.2], dtype=F64)


@pytest.mark.parametrize(
    ("kind", "mean"),
    [
        ("contraharmonic", 0.542864202396362880582360061867),
        ("arithmetic", 0.5104708901287713),
        ("geometric", 0.4910300261511777),
    ],
)
def test_denominator_equals_golden_mean(kind, mean):
    assert math.exp(group_log_denominator(MEANS, kind=kind)) == pytest.approx(mean, abs=1e-14)


def test_denominator_equals_fifty_digit_arithmetic_where_floats_underflow():
    values = [-20000.0, -20001.5, -19999.25]
    with mpmath.workdps(50):
        q = [mpmath.exp(mpmath.mpf(value)) for value in values]
        expected = float(mpmath.log(mpmath.fsum(x * x for x in q) / mpmath.fsum(q)))

    assert group_log_denominator(torch.tensor(values, dtype=F64), kind="contraharmonic") == pytest.approx(
        expected, abs=1e-10
    )


def test_masked_mean_of_an_empty_row_is_zero():
    mask = torch.tensor([[True, True], [False, False]])

    assert masked_mean(torch.tensor([[1.0, 3.0], [float("nan"), 7.0]]), mask).tolist() == [2.0, 0.0]


def test_advantages_centre_rewards():
    advantages = group_advantages(torch.tensor([1.0, 0.0, 1.0, 0.0], dtype=F64), kind="mean")

    assert advantages.tolist() == [0.5, -0.5, 0.5, -0.5]


def test_advantages_divide_by_deviation_with_floor():
    # std (ddof 1) of (1, 0, 1, 0) is sqrt(1 / 3); .5 / (.57735 + 1e-4)
    advantages = group_advantages(torch.tensor([1.0, 0.0, 1.0, 0.0], dtype=F64), kind="mean_std")

    assert advantages.tolist() == pytest.approx([0.8658754297607, -0.8658754297607] * 2, abs=1e-12)


@pytest.mark.parametrize("kind", ["mean", "mean_std"])
@pytest.mark.parametrize("size", [1, 3, 4, 6])
def test_advantages_are_exactly_zero_when_nothing_differs(kind, size):
    # The rounded mean of three or six times .7 is another number than .7.
    advantages = group_advantages(torch.full((size,), 0.7, dtype=F64), kind=kind)

    assert advantages.tolist() == [0.0] * size


@pytest.mark.parametrize("kind", ["mean", "mean_std"])
def test_a_reward_that_is_the_mean_has_no_advantage(kind):
    # In double precision the mean is 0.20000000000000004.
    low, middle, high = group_advantages(torch.tensor([0.1, 0.2, 0.3], dtype=F64), kind=kind).tolist()

    assert low < middle == 0.0 < high


@pytest.mark.parametrize("means", [[0.5], [0.4, 0.4, 0.4], []])
def test_beta_weights_are_one_where_prompts_determine_no_density(means):
    assert beta_weights(torch.tensor(means, dtype=F64)).tolist() == [1.0] * len(means)


def test_beta_weights_are_finite_where_the_density_vanishes():
    weights = beta_weights(torch.tensor([0.0, 0.5, 0.6, 1.0], dtype=F64))

    # m = .525, v = .1692 (ddof 1): m (1 - m) / v - 1 = .474, so the exponents are .083 and .075: 0 at both ends.
    assert weights[[0, 3]].tolist() == [1e6, 1e6]
    assert weights.isfinite().all()


def test_beta_weights_of_a_density_that_would_be_u_shaped_are_one():
    # p = (0, 1): m (1 - m) / v - 1 = .25 / .5 - 1 < 0, so both exponents are held at 0.
    assert beta_weights(torch.tensor([0.0, 1.0], dtype=F64)).tolist() == [1.0, 1.0]


def test_beta_weights_refuse_what_has_no_density():
    with pytest.raises(ConfigError, match=r"loss\.advantage: beta needs rewards in"):
        beta_weights(torch.tensor([0.5, 1.5], dtype=F64))


def test_expected_learner_denominator_equals_the_weighted_mean():
    learner = torch.log(torch.tensor([0.9, 0.5, 0.1], dtype=F64))
    sampler = torch.log(torch.tensor([0.6, 0.2, 0.2], dtype=F64))

    # (.6 * .9 + .2 * .5 + .2 * .1) / 1
    assert math.exp(expected_learner_log_denominator(learner, sampler)) == pytest.approx(0.66, abs=1e-12)
