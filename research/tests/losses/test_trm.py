"""Rollouts left out by their largest and their mean KL."""

import math

import pytest

from heterorl_research.losses.kinds import TrmConfig
from research.tests.support.every_loss import LOSSES
from research.tests.support.loss_checks import assert_acts, assert_equals_loops, assert_teaches_nothing, equal_rewards
from tests.support.loss_reference import advantage
from tests.support.losses import groups_of, run_loss

LIMITS = {"max": (0.1, 0.0), "mean": (0.0, 0.05), "both": (0.15, 0.05)}


def objective(name):
    largest, mean = LIMITS[name]

    def terms(reference, i):
        kls = [r - 1 - math.log(r) for r in reference.fixed_ratios(i)]
        for kl in kls:
            if largest and kl > largest:
                return reference.rows(i, 0.0)
        if mean and sum(kls) / len(kls) > mean:
            return reference.rows(i, 0.0)
        a = advantage(reference.case, i, "mean_std")
        return [r * a for r in reference.ratios(i)]

    return terms


@pytest.mark.parametrize("name", LIMITS)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_loss_and_gradient_equal_loops(name, seed):
    assert_equals_loops(LOSSES[f"trm-{name}"], objective(name), seed=seed)


@pytest.mark.parametrize("name", LIMITS)
def test_the_mask_acts_on_the_cases(name):
    assert_acts(LOSSES[f"trm-{name}"])


@pytest.mark.parametrize("reward", [0.0, 0.5])
def test_equal_rewards_teach_nothing(reward):
    assert_teaches_nothing(equal_rewards(LOSSES["trm-both"], reward))


def test_one_token_that_drifted_leaves_out_its_whole_rollout_good_or_bad():
    # One token of three nats among 99 that stayed: its KL is e^-3 - 1 + 3 = 2.05, the mean .0205.
    drifted, still = [-4.0] + [-1.0] * 99, [-1.0] * 100
    for rewards in ([1.0, 0.0], [0.0, 1.0]):
        groups = groups_of([[[-1.0] * 100, [-1.0] * 100]], [rewards])
        limits = [TrmConfig(max_kl=2.0), TrmConfig(max_kl=0.0, mean_kl=0.021), TrmConfig(max_kl=0.0, mean_kl=0.020)]
        by_max, by_mean, by_less = (
            run_loss(limit.learner_loss(), [drifted, still], groups, max_tokens=100).gradients for limit in limits
        )
        assert by_max[1].all()
        assert by_mean[0].all()
        assert not by_max[0].any()
        assert not by_less[0].any()


def test_limits_of_zero_mask_nothing():
    groups = groups_of([[[-1.0], [-1.0]]], [[1.0, 0.0]])

    outcome = run_loss(TrmConfig(max_kl=0.0).learner_loss(), [[-9.0], [-0.1]], groups)

    assert all(gradient.all() for gradient in outcome.gradients)
