"""Which rollouts and tokens the masks leave out."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from heterorl.learner.loss.masks import has_not_drifted, within_quantile, within_second_moment

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


def test_quantile_gate_by_hand():
    # Six bad rollouts with ratios 8, 1, 1, 1, 1, 0: 144 / (6 x 68) = .353 of 6 is 2.1, so three stay, and ties with them.
    logs = torch.log(torch.tensor([8.0, 1.0, 9.0, 1.0, 1.0, 1.0, 1e-30], dtype=F64))
    advantages = torch.tensor([-1.0, -0.1, 1.0, -1.0, -1.0, -1.0, -1.0], dtype=F64)

    assert within_quantile(logs, advantages, least=0.1).tolist() == [True] * 6 + [False]
    assert within_quantile(logs, advantages, least=0.9).tolist() == [True] * 7


def test_quantile_gate_keeps_the_least_share_where_one_ratio_outweighs_all():
    logs = torch.arange(10, dtype=F64) * 50.0
    ones = torch.ones(10, dtype=F64)

    assert within_quantile(logs, -ones, least=0.3).tolist() == [False] * 7 + [True] * 3
    assert within_quantile(logs, ones, least=0.3).all()
    # .28 x 25 is 7 and a rounding.
    many = torch.arange(25, dtype=F64) * 50.0
    assert int(within_quantile(many, -torch.ones(25, dtype=F64), least=0.28).sum()) == 7
    # The good ones neither leave nor count.
    mixed = torch.where(torch.arange(10) % 2 == 0, ones, -ones)
    assert within_quantile(logs, mixed, least=0.4).tolist() == [True, False] * 3 + [True, True] * 2


@given(values, st.floats(0.05, 1.0), st.floats(-1000, 1000))
def test_quantile_gate_sees_no_common_shift(pairs, least, shift):
    logs = torch.tensor([d for d, _ in pairs], dtype=F64).round(decimals=3)
    advantages = torch.tensor([a for _, a in pairs], dtype=F64)

    kept = within_quantile(logs, advantages, least=least)

    bad = [z for z, a in zip(logs.tolist(), advantages.tolist(), strict=True) if a < 0]
    assert kept[advantages >= 0].all()
    assert int(kept[advantages < 0].sum()) >= least * len(bad) - 1e-6
    if len(set(bad)) == len(bad):
        # Rounding of shifted values may move a share that is an exact number of rollouts.
        shifted = within_quantile(logs + shift, advantages, least=least)
        assert abs(int(shifted.sum()) - int(kept.sum())) <= 1
    if len(set(bad)) <= 1:
        assert kept.all()
