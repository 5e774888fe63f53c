"""Advantages that know the whole group's learner log-probs: the baseline of least variance, and trajectory balance."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from heterorl_research.losses.kinds import GepoTemperedConfig, VcpoConfig
from heterorl_research.losses.tba import drift_compensated
from heterorl_research.losses.vcpo import optimal_baseline, score_square_norm
from tests.support.losses import groups_of, run_loss

F64 = torch.float64
members = st.lists(
    st.tuples(st.floats(-2, 2), st.floats(-3, 3), st.floats(0.01, 5.0)), min_size=2, max_size=8, unique=True
)


def _columns(rows):
    return (torch.tensor(column, dtype=F64) for column in zip(*rows, strict=True))


@given(members, st.floats(-3, 3))
def test_optimal_baseline_has_the_least_second_moment(rows, other):
    advantages, logs, norms = _columns(rows)

    def moment(baseline):
        return float(((2 * logs).exp() * norms * (advantages - baseline) ** 2).sum())

    best = float(optimal_baseline(advantages, logs, norms))

    assert moment(best) <= moment(other) * (1 + 1e-9)


def test_optimal_baseline_is_the_mean_on_policy_and_the_reward_of_what_outweighs_all():
    advantages = torch.tensor([1.0, -0.25, 0.0], dtype=F64)
    ones = torch.ones(3, dtype=F64)

    assert float(optimal_baseline(advantages, 0 * ones, 2 * ones)) == pytest.approx(0.25, abs=1e-15)
    far = torch.tensor([-9000.0, -8000.0, -9000.0], dtype=F64)
    assert float(optimal_baseline(advantages, far, ones)) == pytest.approx(-0.25, abs=1e-15)
    # A member whose every token has probability 1 cannot change, and does not count.
    assert float(optimal_baseline(advantages, 0 * ones, torch.tensor([0.0, 1.0, 1.0], dtype=F64))) == pytest.approx(
        -0.125, abs=1e-15
    )


@given(st.integers(0, 10_000))
def test_norm_by_the_own_log_probs_is_within_a_factor_of_two(seed):
    logits = 3 * torch.randn(4, 6, dtype=F64, generator=torch.Generator().manual_seed(seed))
    logits.requires_grad_()
    logprobs = torch.log_softmax(logits, 1)[:, 2]
    logprobs.sum().backward()

    exact = float(logits.grad.square().sum())

    assert float(score_square_norm(logprobs.detach())) <= exact * (1 + 1e-12)
    assert exact <= 2 * float(score_square_norm(logprobs.detach())) * (1 + 1e-12)


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(-9, 0), st.floats(-9, 0)), min_size=2, max_size=8))
def test_compensated_advantages_give_the_gradient_of_trajectory_balance(rows):
    rewards, learner, reference = _columns(rows)
    learner.requires_grad_()
    beta = 0.2
    gaps = learner - reference
    log_z = (rewards / beta - gaps).mean().detach()
    (log_z + gaps - rewards / beta).square().mean().backward()

    balanced = drift_compensated(rewards - rewards.mean(), gaps.detach(), beta=beta)

    torch.testing.assert_close(learner.grad, -2 / (beta * len(rows)) * balanced, rtol=0, atol=1e-9)


def test_baseline_is_that_of_the_loss_whose_rollouts_are_means_over_tokens():
    """A long rollout's gradient is divided by its length, hence its weight by the square of it."""
    config = VcpoConfig(advantage="mean").learner_loss()

    outcome = run_loss(config, [[-1.0], [-1.0] * 4], groups_of([[[-1.0], [-1.0] * 4]], [[1.0, 0.0]]))

    # Norms 1 and 4 over lengths of 1 and 16, advantages .5 and -.5; each token has -A / (2 T).
    baseline = (0.5 - 0.5 / 4) / (1 + 1 / 4)
    assert outcome.gradients[0].tolist() == pytest.approx([-(0.5 - baseline) / 2], abs=1e-12)
    assert outcome.gradients[1].tolist() == pytest.approx([(0.5 + baseline) / 8] * 4, abs=1e-12)


@pytest.mark.parametrize("config", [VcpoConfig(cap=100.0), GepoTemperedConfig()], ids=lambda config: config.kind)
def test_what_a_site_states_counts_for_no_more_than_the_largest_weight(config):
    def gradients(stated):
        groups = groups_of([[[stated] * 2, [-1.0] * 2, [-1.5] * 2]], [[0.0, 1.0, 0.5]])
        outcome = run_loss(config.learner_loss(), [[-1.0] * 2] * 3, groups, head_version=3)
        # The first rollout's own weight is bounded apart.
        return torch.cat(outcome.gradients[1:]).tolist()

    # Two tokens at -1 and 1.5 nats each make e^3.
    assert gradients(-1e30)[2:] == gradients(-2.5)[2:]
    if config.kind == "vcpo":
        assert gradients(-1e30) == gradients(-2.5) != gradients(-1.5)
