"""Closed forms against goldens, quadrature and fractions."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from heterorl_research.lab.theory import theorems

# p = (a, 1-a), q = (b, 1-b): KL(p||q), Var_q[p/q], Var_q[p/E_q q].
BERNOULLI = [
    (0.9, 0.1, 1.757779661969, 64 / 9, 0.085663295657),
    (0.99, 0.01, 4.503217453131, 97.010101010101, 0.009895959596),
    (0.2, 0.8, 0.831776616672, 2.25, 0.124567474048),
    (0.5, 0.6, 0.020410997261, 1 / 24, 0.0),
    (0.6, 0.5, 0.020135513551, 0.04, 0.04),
]


def bernoulli(probability: float) -> np.ndarray:
    return np.array([probability, 1.0 - probability])


@pytest.mark.parametrize(("a", "b", "divergence", "ordinary", "shared"), BERNOULLI)
def test_bernoulli_matches_golden(a: float, b: float, divergence: float, ordinary: float, shared: float) -> None:
    p, q = bernoulli(a), bernoulli(b)

    assert float(theorems.kl(p, q)) == pytest.approx(divergence, abs=1e-9)
    assert float(theorems.variance_ordinary(p, q)) == pytest.approx(ordinary, abs=1e-9)
    assert float(theorems.variance_shared(p, q)) == pytest.approx(shared, abs=1e-9)


@pytest.mark.parametrize(("a", "b"), [("9/10", "1/10"), ("99/100", "1/100"), ("1/5", "4/5"), ("1/2", "3/5")])
def test_bernoulli_matches_fractions_written_out(a: str, b: str) -> None:
    x, y = Fraction(a), Fraction(b)
    # Var_q[p/q] = (a-b)^2/(b(1-b)); p is x or 1-x with chance y, so its variance is y(1-y)(2x-1)^2.
    ordinary = (x - y) ** 2 / (y * (1 - y))
    shared = y * (1 - y) * (2 * x - 1) ** 2 / (y**2 + (1 - y) ** 2) ** 2
    p, q = bernoulli(float(x)), bernoulli(float(y))

    assert float(theorems.variance_ordinary(p, q)) == pytest.approx(float(ordinary), rel=1e-12)
    assert float(theorems.variance_shared(p, q)) == pytest.approx(float(shared), rel=1e-12, abs=1e-15)


def test_kl_is_one_way_and_takes_zeros() -> None:
    p, q = np.array([1.0, 0.0, 0.0]), np.array([0.5, 0.25, 0.25])

    assert float(theorems.kl(p, q)) == pytest.approx(math.log(2.0), rel=1e-15)
    assert float(theorems.kl(q, q)) == 0.0


@pytest.mark.parametrize(("mean", "deviation"), [(0.0, 0.5), (0.7, 1.0), (1.5, 1.3), (-2.0, 0.8), (0.0, 1.39)])
def test_gaussian_form_matches_quadrature(mean: float, deviation: float) -> None:
    # Trapezoids are exact to rounding for smooth integrands that vanish at both ends.
    x = np.linspace(-120.0, 120.0, 480_001)
    width = float(x[1] - x[0])
    log_p = -np.square((x - mean) / deviation) / 2 - math.log(deviation * math.sqrt(2 * math.pi))
    log_q = -np.square(x) / 2 - math.log(math.sqrt(2 * math.pi))
    p, q = np.exp(log_p), np.exp(log_q)
    expected_q = float((q * q).sum() * width)
    shared = (float((p * p * q).sum() * width) - float((p * q).sum() * width) ** 2) / expected_q**2
    m, s = np.array(mean), np.array(deviation)

    assert float(theorems.gaussian_variance_shared(m, s)) == pytest.approx(shared, rel=1e-9)


def test_gaussian_shared_variance_grows_as_root_two_over_width() -> None:
    value = theorems.gaussian_variance_shared(np.array(0.0), np.array(1e-6))

    # The second term tends to 2.
    assert float(value) + 2.0 == pytest.approx(math.sqrt(2.0) / 1e-6, rel=1e-9)


def test_weighted_variances_and_bias_match_sums_over_outcomes() -> None:
    p, q, advantages = [0.2, 0.3, 0.5], [0.5, 0.1, 0.4], [1.0, -2.0, 0.5]
    collision = sum(y * y for y in q)
    expected = []
    for weights in ([a / b for a, b in zip(p, q, strict=True)], [a / collision for a in p]):
        terms = [w * a for w, a in zip(weights, advantages, strict=True)]
        mean = sum(y * t for y, t in zip(q, terms, strict=True))
        expected.append(sum(y * (t - mean) ** 2 for y, t in zip(q, terms, strict=True)))
    bias = mean - sum(x * a for x, a in zip(p, advantages, strict=True))
    arrays = np.array(p), np.array(q), np.array(advantages)

    assert [float(v) for v in theorems.weighted_variances(*arrays)] == pytest.approx(expected, rel=1e-12)
    assert float(theorems.bias_shared(*arrays)) == pytest.approx(bias, rel=1e-12)


def test_on_policy_shared_weight_samples_the_policy_at_half_temperature() -> None:
    logits = np.array([1.0, 0.2, -0.7, -2.0])
    policy = theorems.softmax(logits)
    values = np.array([3.0, -1.0, 0.5, 2.0])

    halved = theorems.softmax(logits / 0.5)
    weighted = float((policy * policy / theorems.collision_probability(policy) * values).sum())

    assert policy * policy / theorems.collision_probability(policy) == pytest.approx(halved, rel=1e-12)
    assert weighted == pytest.approx(float((halved * values).sum()), rel=1e-12)


def test_small_weight_variance_does_not_bound_the_weighted_advantage() -> None:
    p, q, advantages = np.array([0.5, 0.5]), np.array([0.9, 0.1]), np.array([1.0, 0.0])

    ordinary, shared = theorems.weighted_variances(p, q, advantages)

    # w is 5/9 or 5, and 0.5/0.82 always; A keeps the first outcome alone: w^2 times 0.09.
    assert float(theorems.variance_shared(p, q)) == pytest.approx(0.0, abs=1e-15)
    assert float(theorems.variance_ordinary(p, q)) == pytest.approx(16 / 9, rel=1e-12)
    assert float(ordinary) == pytest.approx((5 / 9) ** 2 * 0.09, rel=1e-12)
    assert float(shared) == pytest.approx((0.5 / 0.82) ** 2 * 0.09, rel=1e-12)
