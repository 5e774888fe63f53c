"""Log ratios fitted to optimal advantages."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from heterorl_research.losses.kinds import OaplConfig
from heterorl_research.losses.oapl import optimal_advantages
from research.tests.support.every_loss import LOSSES
from research.tests.support.loss_checks import assert_equals_loops, assert_teaches_nothing, equal_rewards
from tests.support.losses import groups_of, run_loss

F64 = torch.float64
LOSS = LOSSES["oapl"]


def objective(reference, i):
    """Minus the square, once for a rollout."""
    case = reference.case
    value = 0.5 * math.log(sum(math.exp(case.rewards[j] / 0.5) for j in case.members(i)) / len(case.members(i)))
    z = sum(lp - lq for lp, lq in zip(reference.lp[i], reference.lq[i], strict=True))
    return reference.rows(i, -((0.3 * z - (case.rewards[i] - value)) ** 2))


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_loss_and_gradient_equal_loops(seed):
    assert_equals_loops(LOSS, objective, seed=seed)


def test_the_policy_of_the_closed_form_has_no_loss_and_no_gradient():
    """p = q e^((r - V) / beta), for two answers of .5 with rewards 1 and 0: both betas are .5."""
    loss = OaplConfig(value_beta=0.5, policy_beta=0.5).learner_loss()
    good = math.exp(1 / 0.5) / (math.exp(1 / 0.5) + 1)
    half = math.log(0.5)

    fitted = run_loss(loss, [[math.log(good)], [math.log(1 - good)]], groups_of([[[half], [half]]], [[1.0, 0.0]]))

    assert fitted.value == pytest.approx(0.0, abs=1e-15)
    assert fitted.row_sums == pytest.approx([0.0, 0.0], abs=1e-12)


@pytest.mark.parametrize("reward", [0.0, 0.5, 1.0])
def test_equal_rewards_teach_nothing_on_policy_and_pull_to_the_sampler_off_it(reward):
    assert_teaches_nothing(equal_rewards(LOSS, reward, is_on_policy=True))

    off = equal_rewards(LOSS, reward)
    assert off.value > 0
    # The reward itself is nothing to the pull.
    assert off.value == pytest.approx(equal_rewards(LOSS, 0.25).value, abs=1e-15)


def test_what_a_site_states_counts_for_no_more_than_the_largest_weight_at_each_token():
    def gradients(stated):
        groups = groups_of([[[stated, -1.0], [-1.0, -1.0]]], [[1.0, 0.0]])
        return run_loss(LOSS, [[-1.0, -1.0]] * 2, groups).row_sums

    assert gradients(-1e30) == gradients(-4.5) != gradients(-3.0)


@given(st.lists(st.floats(-2, 2), min_size=1, max_size=8), st.floats(-5, 5))
def test_optimal_advantages_lie_between_the_best_and_the_mean_and_see_no_shift(rewards, shift):
    r = torch.tensor(rewards, dtype=F64)

    advantages = optimal_advantages(r, beta=0.7)

    assert float((r - advantages).max()) <= max(rewards) + 1e-9
    assert float((r - advantages).min()) >= sum(rewards) / len(rewards) - 1e-9
    torch.testing.assert_close(optimal_advantages(r + shift, beta=0.7), advantages, rtol=0, atol=1e-9)


def test_the_value_tends_to_the_best_reward_and_to_the_mean():
    r = torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=F64)

    assert optimal_advantages(r, beta=1e-4).tolist() == pytest.approx([0.0, -1.0, -1.0, -1.0], abs=1e-3)
    assert optimal_advantages(r, beta=1e6).tolist() == pytest.approx([0.75, -0.25, -0.25, -0.25], abs=1e-6)
