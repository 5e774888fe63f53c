"""Advantages over the success rate."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from heterorl_research.losses.maxrl import over_success_rate
from research.tests.support.every_loss import LOSSES
from research.tests.support.loss_checks import assert_acts, assert_equals_loops, assert_teaches_nothing, equal_rewards
from tests.support.loss_reference import mean, ppo
from tests.support.losses import groups_of, run_loss

F64 = torch.float64
LOSS = LOSSES["maxrl"]


def objective(reference, i):
    rewards = [reference.case.rewards[j] for j in reference.case.members(i)]
    # Groups of equal rewards are not weighed; the others of the cases have a 0.
    rate = mean(rewards)
    a = 0.0 if len(set(rewards)) == 1 else (reference.case.rewards[i] - rate) / rate
    return [ppo(r, a, 0.8, 1.2) for r in reference.ratios(i)]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_loss_and_gradient_equal_loops(seed):
    assert_equals_loops(LOSS, objective, seed=seed)


def test_the_clip_acts_on_the_cases():
    assert_acts(LOSS)


# The mean of .1 and .1 and .1 is not .1.
@pytest.mark.parametrize("reward", [0.0, 0.1, 0.7, 1.0])
def test_equal_rewards_teach_nothing(reward):
    assert_teaches_nothing(equal_rewards(LOSS, reward))


@given(st.integers(1, 15), st.integers(1, 15))
def test_advantages_of_right_and_wrong_answers_are_those_of_the_paper(num_right, num_wrong):
    rewards = torch.tensor([1.0] * num_right + [0.0] * num_wrong, dtype=F64)
    rate = num_right / (num_right + num_wrong)

    advantages = over_success_rate(rewards - rewards.mean())

    expected = [(1 - rate) / rate] * num_right + [-1.0] * num_wrong
    assert advantages.tolist() == pytest.approx(expected, rel=1e-9)


def test_on_policy_the_gradient_is_that_of_right_answers_over_their_number_less_that_of_all():
    rewards = [1.0, 1.0, 0.0, 0.0, 0.0]
    rows = [[-0.5]] * 5

    outcome = run_loss(LOSS, rows, groups_of([rows], [rewards]))

    assert outcome.row_sums == pytest.approx([-(r / 2 - 1 / 5) for r in rewards], abs=1e-12)
