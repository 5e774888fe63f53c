"""Which rollouts and tokens the masks leave out."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from heterorl.learner.loss.importance import has_not_drifted, within_second_moment
from heterorl.learner.loss.loss_config import M2poConfig
from tests.support.losses import groups_of, run_loss

F64 = torch.float64


def test_drifted_rollouts_are_left_out_only_if_they_are_worse_than_their_group():
    # mean(log q - log p): .6, .6, .4, -.6
    sampler = torch.zeros(4, 2, dtype=F64)
    learner = torch.tensor([[-0.4, -0.8], [-0.4, -0.8], [-0.4, -0.4], [0.6, 0.6]], dtype=F64)
    mask_BT = torch.ones(4, 2, dtype=torch.bool)

    kept = has_not_drifted(learner, sampler, mask_BT, torch.tensor([-1.0, 1.0, -1.0, -1.0], dtype=F64), limit=0.5)

    assert kept.tolist() == [False, True, True, True]


def test_a_limit_for_whole_completions_means_the_same_at_every_length():
    # .3 nats a token: .6 over two tokens, 1.2 over four; what stands in padding does not count.
    sampler = torch.zeros(3, 4, dtype=F64)
    learner = torch.full((3, 4), -0.3, dtype=F64)
    mask_BT = torch.tensor([[True, True, False, False], [True] * 4, [True] * 4])
    learner[0, 2:] = float("nan")

    kept = has_not_drifted(
        learner, sampler, mask_BT, torch.tensor([-1.0, -1.0, 1.0], dtype=F64), limit=1.0, is_total=True
    )

    assert kept.tolist() == [True, False, True]


def test_second_moment_selection_by_hand():
    # Harmful: .1 (A > 0), -.3 (A < 0), .5 (A > 0); squares .01, .09, .25. Means .01, .05, .117: two are left at .05.
    log_ratios = torch.tensor([0.1, -0.9, -0.3, 0.5, 2.0], dtype=F64)
    advantages = torch.tensor([1.0, 1.0, -1.0, 2.0, 0.0], dtype=F64)

    def kept(budget):
        return within_second_moment(log_ratios, advantages, budget=budget).tolist()

    assert kept(0.05) == [True, True, True, False, True]
    assert kept(0.049) == [True, True, False, False, True]
    assert kept(0.2) == [True] * 5
    assert kept(0.001) == [False, True, False, False, True]


values = st.lists(st.tuples(st.floats(-3, 3), st.sampled_from([-1.5, -0.1, 0.0, 0.2, 1.0])), min_size=1, max_size=9)


@given(values, st.floats(0.001, 4.0))
def test_second_moment_selection_keeps_as_many_tokens_as_the_budget_allows(pairs, budget):
    log_ratios = torch.tensor([d for d, _ in pairs], dtype=F64)
    advantages = torch.tensor([a for _, a in pairs], dtype=F64)

    kept = within_second_moment(log_ratios, advantages, budget=budget)

    harmful = [d * d for d, a in pairs if d * a > 0]
    chosen = [d * d for (d, a), keep in zip(pairs, kept.tolist(), strict=True) if d * a > 0 and keep]
    assert all(keep for (d, a), keep in zip(pairs, kept.tolist(), strict=True) if not d * a > 0)
    assert not chosen or sum(chosen) / len(chosen) <= budget * (1 + 1e-12)
    largest = max(
        size
        for size in range(len(harmful) + 1)
        for subset in itertools.combinations(harmful, size)
        if not subset or sum(subset) / size <= budget * (1 - 1e-12)
    )
    assert len(chosen) >= largest


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1, 0, 2], [2, 3, 1, 0]])
def test_second_moment_selection_does_not_depend_on_order(order):
    log_ratios = torch.tensor([0.1, 0.3, 0.5, 0.2], dtype=F64)
    ones = torch.ones(4, dtype=F64)

    kept = within_second_moment(log_ratios[order], ones, budget=0.05)

    assert kept.tolist() == within_second_moment(log_ratios, ones, budget=0.05)[order].tolist()


@pytest.mark.parametrize("reward", [0.5, 0.7])
def test_a_group_of_equal_rewards_makes_no_room_in_the_budget(reward):
    # (log r)^2 is .09 of the first two tokens, which are harmful, and 1e-4 of twelve tokens without advantage.
    groups = groups_of([[[-1.0], [-1.0]], [[-1.0] * 4] * 3], [[1.0, 0.0], [reward] * 3])

    outcome = run_loss(M2poConfig(m2_budget=0.04), [[-0.7], [-1.3], *[[-0.99] * 4] * 3], groups)

    assert outcome.row_sums == [0.0] * 5
