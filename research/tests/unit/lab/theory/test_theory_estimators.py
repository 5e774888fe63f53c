"""The denominators of a group: exact expectation, limits."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heterorl_research.lab.theory import estimators
from heterorl_research.lab.theory.samples import GROUP

Q = np.array([0.4, 0.3, 0.15, 0.1, 0.05])


@pytest.mark.parametrize("kind", estimators.MEANS)
@pytest.mark.parametrize("num_samples", [1, 2, 4])
def test_exact_expectation_matches_every_ordered_group(kind: estimators.Mean, num_samples: int) -> None:
    expected = 0.0
    for group in itertools.product(Q.tolist(), repeat=num_samples):
        if kind == "contraharmonic":
            mean = sum(value**2 for value in group) / sum(group)
        elif kind == "arithmetic":
            mean = sum(group) / num_samples
        else:
            mean = math.prod(group) ** (1 / num_samples)
        expected += math.prod(group) * mean

    assert estimators.exact_expectation(Q, num_samples, kind=kind) == pytest.approx(expected, rel=1e-12)


def test_arithmetic_mean_is_unbiased_and_the_others_drift_apart_with_the_group() -> None:
    expected = float(np.square(Q).sum())

    for size in (1, 2, 8, 32):
        assert estimators.exact_expectation(Q, size, kind="arithmetic") == pytest.approx(expected, rel=1e-12)
    upper = [estimators.exact_expectation(Q, size, kind="contraharmonic") for size in (1, 2, 8, 32)]
    lower = [estimators.exact_expectation(Q, size, kind="geometric") for size in (1, 2, 8, 32)]
    assert upper[0] == pytest.approx(expected, rel=1e-12)
    assert lower[0] == pytest.approx(expected, rel=1e-12)
    assert upper == sorted(upper)
    assert lower == sorted(lower, reverse=True)
    assert upper[-1] < estimators.limit(Q, kind="contraharmonic")
    assert lower[-1] > estimators.limit(Q, kind="geometric")


def test_excess_of_the_contraharmonic_limit_is_the_squared_coefficient_of_variation() -> None:
    mean = float((Q * Q).sum())
    variance = float((Q * np.square(Q - mean)).sum())

    excess = estimators.limit(Q, kind="contraharmonic") / mean - 1

    assert excess == pytest.approx(variance / mean**2, rel=1e-12)


@given(st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=16))
def test_means_are_ordered(values: list[float]) -> None:
    group = np.array(values)

    contraharmonic, arithmetic, geometric = (
        float(estimators.group_mean(group, kind=kind)) for kind in estimators.MEANS
    )

    assert contraharmonic >= arithmetic * (1 - 1e-12)
    assert arithmetic >= geometric * (1 - 1e-12)


def test_on_policy_weights_of_the_reference_group_average_below_one() -> None:
    weights = estimators.on_policy_weights(GROUP)

    # Log-probs -.47, -.5, -.675, -1.2: the group denominator is .5428642023963629.
    expected = [math.exp(value) / 0.5428642023963629 for value in (-0.47, -0.5, -0.675, -1.2)]
    assert weights == pytest.approx(expected, rel=1e-12)
    assert float(weights.mean()) == pytest.approx(0.9403288849686572, rel=1e-12)
    assert float((weights * [0.5, -0.5, 0.5, -0.5]).sum()) == pytest.approx(0.2085547511383777, rel=1e-12)
