"""Token rules that look at the prefix."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from heterorl_research.losses.kinds import CppoConfig, MinproConfig, PnpoConfig
from heterorl_research.losses.prefix import prefix_means, ratios_by_least, within_prefix_budget
from research.tests.support.every_loss import LOSSES
from research.tests.support.loss_checks import assert_acts, assert_equals_loops, assert_teaches_nothing, equal_rewards
from tests.support.loss_reference import advantage
from tests.support.losses import groups_of, run_loss

F64 = torch.float64


def pnpo(reference, i):
    a, ratios = advantage(reference.case, i, "mean_std"), reference.fixed_ratios(i)
    result = []
    for t in range(len(ratios)):
        product = 1.0
        for j in range(t + 1):
            product *= ratios[j]
        result.append(min(product ** (1 / (t + 1)), 1.05) * a * reference.lp[i][t])
    return result


def minpro(reference, i):
    a, ratios = advantage(reference.case, i, "mean_std"), reference.fixed_ratios(i)
    result = []
    for t in range(len(ratios)):
        weight = ratios[t] if t == 0 else ratios[t] * min(ratios[:t])
        result.append(min(weight, 1.05) * a * reference.lp[i][t])
    return result


def ninth_decile(values):
    """numpy's and torch's default: linear between the two neighbours."""
    ordered = sorted(values)
    place = 0.9 * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def kept_by_cppo(shifts, delta, least, budget):
    """The mask as its authors write it: a running sum of weighted shifts and one of weights."""
    length = len(shifts)
    mean_budget = min(max(ninth_decile(shifts), budget), 2 * budget)
    spent, weights, kept = 0.0, 0.0, []
    for t, shift in enumerate(shifts):
        weight = 1 - (1 - least) * t / max(length - 1, 1)
        kept.append(weight * shift <= min(delta, delta + mean_budget * weights - spent))
        spent += weight * shift
        weights += weight
    return kept


def cppo(reference, i):
    a, ratios = advantage(reference.case, i, "mean_std"), reference.fixed_ratios(i)
    shifts = [abs(math.exp(sg) - math.exp(lq)) for sg, lq in zip(reference.sg[i], reference.lq[i], strict=True)]
    kept = kept_by_cppo(shifts, 0.1, 0.8, 0.01)
    return [
        r * a if is_kept or a * (fixed - 1) <= 0 else 0.0
        for r, fixed, is_kept in zip(reference.ratios(i), ratios, kept, strict=True)
    ]


OBJECTIVES = {"pnpo": pnpo, "minpro": minpro, "cppo": cppo}


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_loss_and_gradient_equal_loops(name, seed):
    assert_equals_loops(LOSSES[name], OBJECTIVES[name], seed=seed)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_bound_or_mask_acts_on_the_cases(name):
    assert_acts(LOSSES[name])


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("reward", [0.0, 0.5])
def test_equal_rewards_teach_nothing(name, reward):
    assert_teaches_nothing(equal_rewards(LOSSES[name], reward))


def test_prefix_ratios_by_hand():
    logs = torch.tensor([[2.0, 0.5, 4.0], [0.5, 4.0, 1.0]], dtype=F64).log()

    assert prefix_means(logs).exp().tolist() == [
        pytest.approx([2.0, 1.0, 4 ** (1 / 3)]),
        pytest.approx([0.5, 2**0.5, 2 ** (1 / 3)]),
    ]
    assert ratios_by_least(logs).exp().tolist() == [pytest.approx([2.0, 1.0, 2.0]), pytest.approx([0.5, 2.0, 0.5])]


@pytest.mark.parametrize("name", ["pnpo", "minpro"])
def test_a_later_token_does_not_change_the_weight_of_an_earlier_one(name):
    loss = {"pnpo": PnpoConfig(), "minpro": MinproConfig()}[name].learner_loss()
    groups = groups_of([[[-1.0] * 4, [-1.0] * 4]], [[1.0, 0.0]])

    one, other = (run_loss(loss, [[-1.3, -0.9, -1.1, last], [-1.0] * 4], groups).gradients[0] for last in (-1.0, -8.0))

    assert one[:3].tolist() == other[:3].tolist()
    assert one[3] != other[3]


def test_a_token_behind_a_prefix_that_drifted_is_left_out_and_one_that_returns_is_not():
    """Four tokens of good and bad rollouts, all .3 down but the last: budget spent, the last may not move .12."""
    far, near = [math.log(0.2)] * 3, math.log(0.62)
    groups = groups_of([[[math.log(0.5)] * 4, [math.log(0.5)] * 4]], [[1.0, 0.0]])

    outcome = run_loss(CppoConfig().learner_loss(), [[*far, near], [*far, near]], groups)

    # Of the good one the first three return to the sampler, the last goes away from it behind a spent budget.
    assert outcome.gradients[0].bool().tolist() == [True, True, True, False]
    # The bad one's first three go further away, its last returns.
    assert outcome.gradients[1].bool().tolist() == [False, False, False, True]
    alone = run_loss(CppoConfig().learner_loss(), [[math.log(0.5)] * 3 + [near]] * 2, groups).gradients[0]
    assert alone.bool().all()


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=12), st.integers(0, 5))
def test_the_budget_equals_the_loop_at_any_padding(shifts, padding):
    row = torch.tensor([shifts + [0.5] * padding], dtype=F64)
    mask = torch.tensor([[True] * len(shifts) + [False] * padding])

    kept = within_prefix_budget(row, mask, delta=0.2, least_weight=0.8, budget=0.02)[0, : len(shifts)].tolist()

    # A sum in another order may differ at an equality alone.
    if kept != kept_by_cppo(shifts, 0.2, 0.8, 0.02):
        assert kept in (kept_by_cppo(shifts, 0.2 + e, 0.8, 0.02) for e in (-1e-12, 1e-12))
