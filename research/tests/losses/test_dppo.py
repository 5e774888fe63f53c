"""Tokens left out by the distance of their probabilities."""

import math

import pytest
import torch

from heterorl_research.losses.dppo import signed_shifts
from heterorl_research.losses.kinds import DppoConfig
from research.tests.support.every_loss import LOSSES
from research.tests.support.loss_checks import assert_acts, assert_equals_loops, assert_teaches_nothing, equal_rewards
from tests.support.loss_reference import advantage
from tests.support.losses import groups_of, run_loss

F64 = torch.float64
LIMITS = {"tv": (0.06, 0.04), "kl": (0.02, 0.01)}


def distance(name, p, q):
    return abs(p - q) if name == "tv" else q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))


def objective(name):
    low, high = LIMITS[name]

    def terms(reference, i):
        a, result = advantage(reference.case, i, "mean"), []
        for lp, sg, lq in zip(reference.lp[i], reference.sg[i], reference.lq[i], strict=True):
            p, q = math.exp(sg), math.exp(lq)
            far_up = p > q and distance(name, p, q) > high
            far_down = p < q and distance(name, p, q) > low
            is_left_out = (a > 0 and far_up) or (a < 0 and far_down)
            result.append((0.0 if is_left_out else math.exp(lp - lq) * a) - 0.05 * (lp - lq) ** 2)
        return result

    return terms


@pytest.mark.parametrize("name", LIMITS)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_loss_and_gradient_equal_loops(name, seed):
    assert_equals_loops(LOSSES[f"dppo-{name}"], objective(name), seed=seed, aggregation="token_mean")


@pytest.mark.parametrize("name", LIMITS)
def test_the_mask_acts_on_the_cases(name):
    assert_acts(LOSSES[f"dppo-{name}"])


@pytest.mark.parametrize("reward", [0.0, 0.5])
def test_equal_rewards_teach_nothing_but_to_stay_near_the_sampler(reward):
    assert_teaches_nothing(equal_rewards(DppoConfig(square_coefficient=0.0).learner_loss(), reward))
    assert_teaches_nothing(equal_rewards(LOSSES["dppo-tv"], reward, is_on_policy=True))
    assert equal_rewards(LOSSES["dppo-tv"], reward).value > 0


def test_a_rare_token_may_change_by_any_ratio_and_a_likely_one_may_not():
    """Ratios of 10 and 1.5: PPO's clip leaves out both, this mask the second alone."""
    sampler = [math.log(0.001), math.log(0.5)]
    learner = [math.log(0.01), math.log(0.75)]
    groups = groups_of([[sampler, sampler]], [[1.0, 0.0]])

    outcome = run_loss(DppoConfig(square_coefficient=0.0).learner_loss(), [learner, sampler], groups)

    assert outcome.gradients[0].bool().tolist() == [True, False]


@pytest.mark.parametrize(("p", "q"), [(0.2, 0.6), (0.6, 0.2), (0.999, 0.5), (1e-12, 0.9)])
def test_distances_by_hand(p, q):
    logs = torch.tensor([[p], [q]], dtype=F64).log()

    for name in ("tv", "kl"):
        shift = float(signed_shifts(logs[:1], logs[1:], divergence=name))
        assert shift == pytest.approx(math.copysign(distance(name, p, q), p - q), rel=1e-9)


@pytest.mark.parametrize(("learner", "sampler"), [(0.0, -1.0), (-1.0, 0.0), (0.0, 0.0), (-1e30, -1.0), (-1.0, -1e30)])
def test_distances_of_certain_tokens_are_finite(learner, sampler):
    shift = signed_shifts(torch.tensor([[learner]], dtype=F64), torch.tensor([[sampler]], dtype=F64), divergence="kl")

    assert shift.isfinite().all()
    assert math.copysign(1.0, float(shift)) == math.copysign(1.0, learner - sampler) or learner == sampler
