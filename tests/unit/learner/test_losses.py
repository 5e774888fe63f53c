"""Properties of the losses that hold for any input."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.learner.denominators import group_log_denominator, masked_mean
from services.learner.losses import (
    MAX_LOG_WEIGHT,
    kl_estimates,
    sequence_ratio_loss,
    token_coefficients,
    token_ratio_loss,
)

F64 = torch.float64
RANGE = {"eps_low": 0.2, "eps_high": 0.2}
logprob = st.floats(min_value=-30.0, max_value=0.0)
means = st.lists(logprob, min_size=1, max_size=8)


def _case(seed, lengths):
    generator = torch.Generator().manual_seed(seed)
    shape = (len(lengths), max(lengths))
    mask_BT = torch.arange(shape[1])[None, :] < torch.tensor(lengths)[:, None]
    sampler = -2.0 * torch.rand(shape, dtype=F64, generator=generator)
    learner = sampler + 0.3 * torch.randn(shape, dtype=F64, generator=generator)
    advantages = torch.randn(len(lengths), dtype=F64, generator=generator)
    return learner, sampler, mask_BT, advantages


def _coefficients(mask_BT, aggregation="sequence_mean"):
    return token_coefficients(
        mask_BT,
        aggregation=aggregation,
        num_sequences=int(mask_BT.any(1).sum()),
        num_tokens=int(mask_BT.sum()),
        max_tokens=16,
    )


def _sequence_loss(learner, sampler, mask_BT, advantages, log_denominators=None):
    if log_denominators is None:
        log_denominators = masked_mean(sampler, mask_BT)
    return sequence_ratio_loss(
        learner_logprobs_BT=learner,
        log_denominators_B=log_denominators,
        mask_BT=mask_BT,
        advantages_B=advantages,
        coefficients_BT=_coefficients(mask_BT),
        **RANGE,
    )


def _token_loss(learner, sampler, mask_BT, advantages):
    return token_ratio_loss(
        learner_logprobs_BT=learner,
        sampler_logprobs_BT=sampler,
        mask_BT=mask_BT,
        advantages_B=advantages,
        coefficients_BT=_coefficients(mask_BT),
        **RANGE,
    )


LOSSES = {"sequence": _sequence_loss, "token": _token_loss}


def _log_mean(values, kind="contraharmonic"):
    values = torch.tensor(values, dtype=F64)
    return group_log_denominator(values, torch.ones(len(values), dtype=torch.bool), kind=kind)


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
def test_gradient_equals_finite_differences(loss):
    learner, sampler, mask_BT, advantages = _case(3, [5, 2, 4])

    assert torch.autograd.gradcheck(
        lambda logprobs: loss(logprobs, sampler, mask_BT, advantages).contributions_B, learner.requires_grad_()
    )


def test_kl_gradient_equals_finite_differences():
    learner, sampler, mask_BT, _ = _case(4, [3, 2])

    assert torch.autograd.gradcheck(lambda logprobs: kl_estimates(logprobs, sampler, mask_BT), learner.requires_grad_())


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
def test_gradient_reaches_learner_logprobs_only(loss):
    learner, sampler, mask_BT, advantages = _case(5, [5, 2, 4])
    for tensor in (learner, sampler, advantages):
        tensor.requires_grad_()

    total = loss(learner, sampler, mask_BT, advantages).contributions_B.sum()
    (total + kl_estimates(learner, sampler, mask_BT).sum()).backward()

    assert learner.grad is not None
    assert sampler.grad is None
    assert advantages.grad is None
    assert torch.equal(learner.grad[~mask_BT], torch.zeros_like(learner.grad[~mask_BT]))


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
def test_clip_mask_is_exactly_where_the_gradient_vanishes(loss):
    # One or two tokens a rollout: over many, the mean log ratio hardly leaves the clip range.
    learner, sampler, mask_BT, advantages = _case(6, [2] * 40)
    learner.requires_grad_()

    terms = loss(learner, sampler, mask_BT, advantages)
    terms.contributions_B.sum().backward()

    has_gradient = learner.grad != 0 if terms.is_clipped.dim() == 2 else (learner.grad != 0).all(1)
    assert torch.equal(has_gradient, ~terms.is_clipped)
    assert terms.is_clipped.any()


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
def test_loss_ignores_what_stands_in_padding(loss):
    learner, sampler, mask_BT, advantages = _case(7, [5, 2, 4])
    garbage = learner.masked_fill(~mask_BT, float("nan")).requires_grad_()

    clean = loss(learner, sampler, mask_BT, advantages).contributions_B
    dirty = loss(garbage, sampler.masked_fill(~mask_BT, float("inf")), mask_BT, advantages).contributions_B
    dirty.sum().backward()

    assert torch.equal(clean, dirty)
    assert garbage.grad.isfinite().all()


def test_row_without_tokens_is_not_clipped_even_where_its_weight_would_be():
    # Its mean log-prob is 0, so under a denominator of e^-5 its weight would be 148.
    mask_BT = torch.tensor([[True], [False]])
    zeros, ones = torch.zeros(2, 1, dtype=F64), torch.ones(2, dtype=F64)

    terms = _sequence_loss(zeros, zeros, mask_BT, ones, torch.full((2,), -5.0, dtype=F64))

    assert terms.is_clipped.tolist() == [True, False]


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
def test_row_without_tokens_contributes_nothing_and_is_not_counted(loss):
    learner, sampler, mask_BT, advantages = _case(8, [5, 2, 4])
    mask_BT[1] = False

    terms = loss(learner, sampler, mask_BT, advantages)

    assert terms.contributions_B[1] == 0.0
    assert not terms.is_counted[1].any()
    assert not terms.is_clipped[1].any()


@pytest.mark.parametrize("aggregation", ["sequence_mean", "token_mean", "max_length"])
@pytest.mark.parametrize("is_token_loss", [False, True])
def test_contributions_of_parts_add_up_to_the_whole(aggregation, is_token_loss):
    learner, sampler, mask_BT, advantages = _case(9, [5, 2, 4, 1])
    coefficients = _coefficients(mask_BT, aggregation)

    def contributions(rows):
        width = int(mask_BT[rows].sum(1).max())
        own = {"sampler_logprobs_BT": sampler[rows, :width]}
        if not is_token_loss:
            own = {"log_denominators_B": masked_mean(sampler, mask_BT)[rows]}
        return (token_ratio_loss if is_token_loss else sequence_ratio_loss)(
            learner_logprobs_BT=learner[rows, :width],
            mask_BT=mask_BT[rows, :width],
            advantages_B=advantages[rows],
            coefficients_BT=coefficients[rows, :width],
            **own,
            **RANGE,
        ).contributions_B.sum()

    parts = contributions([0]) + contributions([3, 1]) + contributions([2])

    assert parts.item() == pytest.approx(contributions([0, 1, 2, 3]).item(), abs=1e-14)


@given(means)
def test_gepo_equals_gspo_when_all_sampler_probabilities_are_equal(values):
    equal = [values[0]] * len(values)

    assert _log_mean(equal) == pytest.approx(values[0], abs=1e-12)


@given(means, st.randoms())
def test_denominator_does_not_depend_on_order(values, random):
    shuffled = random.sample(values, len(values))

    assert _log_mean(shuffled) == pytest.approx(_log_mean(values), abs=1e-12)


@given(means, st.floats(min_value=-1000.0, max_value=1000.0))
def test_shift_of_both_logprobs_leaves_gepo_weights_unchanged(values, shift):
    moved = _log_mean([value + shift for value in values])

    assert moved - shift == pytest.approx(_log_mean(values), abs=1e-10)


@given(means)
def test_means_are_ordered_contraharmonic_arithmetic_geometric(values):
    contraharmonic, arithmetic, geometric = (
        _log_mean(values, k) for k in ("contraharmonic", "arithmetic", "geometric")
    )

    assert contraharmonic >= arithmetic - 1e-12
    assert arithmetic >= geometric - 1e-12
    assert max(values) >= contraharmonic - 1e-12


@given(means, st.integers(min_value=0, max_value=1000))
def test_gepo_weight_is_positive_and_at_most_one_over_the_denominator(values, seed):
    log_mean = _log_mean(values)
    learner = -10.0 * torch.rand(len(values), 3, dtype=F64, generator=torch.Generator().manual_seed(seed))
    mask_BT = torch.ones(len(values), 3, dtype=torch.bool)
    denominators = torch.full((len(values),), log_mean, dtype=F64)

    terms = _sequence_loss(learner, learner, mask_BT, torch.ones(len(values), dtype=F64), denominators)

    assert (terms.weights > 0).all()
    assert (terms.weights <= np.exp(min(-log_mean, MAX_LOG_WEIGHT)) * (1 + 1e-12)).all()


@given(means)
def test_mean_on_policy_gepo_weight_is_the_effective_sample_share(values):
    # mean_i q_i / E = (sum q)^2 / (G sum q^2)
    weights = np.exp(np.array(values) - _log_mean(values))
    share = np.exp(np.array(values) - max(values))

    assert weights.mean() == pytest.approx(share.sum() ** 2 / (len(values) * (share**2).sum()), rel=1e-9)


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize(("learner_sum", "sampler_sum"), [(-20000.0, -16000.0), (-16000.0, -20000.0), (-100.0, -2e7)])
def test_loss_and_gradient_are_finite_on_16k_tokens(loss, advantage, learner_sum, sampler_sum):
    mask_BT = torch.ones(2, 16384, dtype=torch.bool)
    learner = torch.full((2, 16384), learner_sum / 16384, dtype=F64, requires_grad=True)
    sampler = torch.full((2, 16384), sampler_sum / 16384, dtype=F64)

    terms = loss(learner, sampler, mask_BT, torch.full((2,), advantage, dtype=F64))
    (terms.contributions_B.sum() + kl_estimates(learner, sampler, mask_BT).sum()).backward()

    assert terms.contributions_B.isfinite().all()
    assert terms.weights.isfinite().all()
    assert learner.grad.isfinite().all()


def test_kl_estimate_counts_a_token_that_the_learner_dropped_linearly():
    # log r = -15: e^-15 - 1 + 15; the mis-directed form would give e^15 - 16 = 3.27e6.
    value = kl_estimates(torch.tensor([[-16.0]]), torch.tensor([[-1.0]]), torch.ones(1, 1, dtype=torch.bool))

    assert value.item() == pytest.approx(14.0000003, abs=1e-5)


@settings(max_examples=30)
@given(st.integers(min_value=0, max_value=10_000))
def test_kl_estimate_is_unbiased_for_kl_of_sampler_to_learner(seed):
    # The expectation over q is taken exactly, over a vocabulary of 7.
    generator = torch.Generator().manual_seed(seed)
    learner, sampler = torch.log_softmax(torch.randn(2, 7, dtype=F64, generator=generator), -1)
    learner.requires_grad_()

    estimates = kl_estimates(learner[None], sampler[None], torch.ones(1, 7, dtype=torch.bool))[0]

    exact = (sampler.exp() * (sampler - learner)).sum()
    expected = (sampler.exp() * estimates).sum()
    assert (estimates >= 0).all()
    assert expected.item() == pytest.approx(exact.item(), abs=1e-12)


def test_kl_gradient_pulls_the_learner_towards_the_sampler_from_both_sides():
    learner = torch.tensor([[-1.0, -3.0]], requires_grad=True)

    kl_estimates(learner, torch.tensor([[-2.0, -2.0]]), torch.ones(1, 2, dtype=torch.bool)).sum().backward()

    assert learner.grad[0, 0] > 0
    assert learner.grad[0, 1] < 0


def test_kl_estimate_has_no_gradient_beyond_its_cap():
    learner = torch.tensor([[-0.1]], requires_grad=True)

    value = kl_estimates(learner, torch.tensor([[-1000.0]]), torch.ones(1, 1, dtype=torch.bool))
    value.sum().backward()

    assert value.isfinite().all()
    assert learner.grad.item() == 0.0


def test_loss_refuses_misaligned_tensors():
    learner, sampler, mask_BT, advantages = _case(1, [3, 2])

    with pytest.raises(AssertionError):
        _token_loss(learner, sampler[:, :2], mask_BT, advantages)
    with pytest.raises(AssertionError):
        _sequence_loss(learner, sampler, mask_BT, advantages[:1])
