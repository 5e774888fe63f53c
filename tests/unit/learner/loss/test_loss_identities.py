"""Identities of the weights, for any probabilities."""

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from heterorl.learner.loss.group import group_log_denominator
from heterorl.learner.loss.loss_config import DsGspoConfig, EqpConfig, GepoConfig, GepoPlusConfig, GspoConfig
from heterorl.learner.loss.objectives import MAX_LOG_WEIGHT
from tests.support.losses import groups_of, run_loss

F64 = torch.float64
logprob = st.floats(min_value=-30.0, max_value=0.0)
means = st.lists(logprob, min_size=1, max_size=8)
pairs = st.lists(st.tuples(st.floats(-3.0, -0.01), st.floats(-3.0, -0.01)), min_size=2, max_size=6)


def _log_mean(values, kind="contraharmonic"):
    values = torch.tensor(values, dtype=F64)
    return group_log_denominator(values, kind=kind)


def _two_valued(sampler):
    return groups_of([[[q] for q in sampler]], [[float(number % 2) for number in range(len(sampler))]])


def _weights(config, learner, sampler):
    outcome = run_loss(config, [[p] for p in learner], _two_valued(sampler))
    return outcome.terms[0].weights.numpy()


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


@given(means)
def test_mean_on_policy_gepo_weight_is_the_effective_sample_share(values):
    # mean_i q_i / E = (sum q)^2 / (G sum q^2)
    weights = np.exp(np.array(values) - _log_mean(values))
    share = np.exp(np.array(values) - max(values))

    assert weights.mean() == pytest.approx(share.sum() ** 2 / (len(values) * (share**2).sum()), rel=1e-9)


@given(pairs)
def test_gepo_weight_is_the_gspo_weight_times_q_over_the_denominator(rows):
    learner, sampler = zip(*rows, strict=True)

    ratio = _weights(GepoConfig(), learner, sampler) / _weights(GspoConfig(), learner, sampler)

    assert ratio == pytest.approx(np.exp(np.array(sampler) - _log_mean(sampler)), rel=1e-9)


@given(pairs)
def test_gepo_weight_is_positive_and_at_most_one_over_the_denominator(rows):
    learner, sampler = zip(*rows, strict=True)

    weights = _weights(GepoConfig(), learner, sampler)

    assert (weights > 0).all()
    assert (weights <= np.exp(min(-_log_mean(sampler), MAX_LOG_WEIGHT)) * (1 + 1e-12)).all()


@given(pairs)
def test_gspo_equals_gepo_on_groups_of_equal_probabilities(rows):
    learner = [p for p, _ in rows]
    sampler = [rows[0][1]] * len(rows)

    one = run_loss(GepoConfig(), [[p] for p in learner], _two_valued(sampler))
    other = run_loss(GspoConfig(advantage="mean"), [[p] for p in learner], _two_valued(sampler))

    assert one.value == pytest.approx(other.value, abs=1e-12)


@given(pairs, st.floats(0.01, 0.5))
def test_defensive_weights_are_at_most_one_over_the_fraction(rows, fraction):
    learner, sampler = zip(*rows, strict=True)

    config = DsGspoConfig(defensive_fraction=fraction)
    assert (_weights(config, learner, sampler) <= (1 + 1e-12) / fraction).all()


@given(pairs)
def test_gepo_plus_lies_between_gspo_and_gepo(rows):
    # Log-probs that differ in their last bits have a divergence of 0 in floating point.
    assume(all(p == q or abs(p - q) > 1e-6 for p, q in rows))
    learner, sampler = zip(*rows, strict=True)
    gepo, gspo = _weights(GepoConfig(), learner, sampler), _weights(GspoConfig(), learner, sampler)

    assert _weights(GepoPlusConfig(kl_threshold=1e9), learner, sampler) == pytest.approx(gspo, rel=1e-12)
    assert _weights(GepoPlusConfig(kl_threshold=1e-300), learner, sampler) == pytest.approx(
        np.where(np.array(learner) == np.array(sampler), gspo, gepo), rel=1e-9
    )


@given(pairs)
def test_eqp_gradients_of_an_unclipped_group_cancel_when_all_advantages_are_equal(rows):
    # sum_i w_i = sum p / sum q^ p: with weights q^ the mean weight is exactly 1, so its gradient is 0.
    learner, sampler = zip(*rows, strict=True)
    shares = np.exp(sampler) / np.exp(sampler).sum()

    weights = _weights(EqpConfig(), learner, sampler)

    assert float((shares * weights).sum()) == pytest.approx(1.0, abs=1e-12)
