"""Exact variances, divergences and biases of two importance weights, in float64.

Two weights are compared for samples of a policy q that train a policy p: the ordinary w = p/q, and the weight with
one shared denominator w = p/E_q[q] (GEPO, arXiv 2508.17850, equation 3), with E_q[q] = sum q^2 known exactly.
Guarantees: nothing here is estimated; never draws a random number. Distributions are float64 arrays [..., N] over N
outcomes that sum to 1 along the last axis; leading axes are independent cases.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def kl(first: Array, second: Array) -> Array:
    """KL(first || second) = sum first log(first/second) in nats, with 0 log 0 = 0; [...]. Needs second > 0."""
    assert first.shape[-1] == second.shape[-1]
    # The logarithm of 0 is never taken: the outcome contributes nothing.
    ratio = np.where(first > 0, first, 1.0) / np.where(first > 0, second, 1.0)
    return np.asarray((first * np.log(ratio)).sum(-1))


def collision_probability(q: Array) -> Array:
    """E_q[q] = sum q^2, the chance that two samples coincide; [...]. It is the exact GEPO denominator."""
    return np.asarray(np.square(q).sum(-1))


def variance_ordinary(p: Array, q: Array) -> Array:
    """Var_q[p/q] = sum p^2/q - 1; [...]. Needs q > 0."""
    return np.asarray((np.square(p) / q).sum(-1) - 1.0)


def variance_shared(p: Array, q: Array) -> Array:
    """Var_q[p/E_q q] = (sum p^2 q - (sum p q)^2) / (sum q^2)^2; [...]."""
    centred = p - (p * q).sum(-1, keepdims=True)
    return np.asarray((q * np.square(centred)).sum(-1) / np.square(collision_probability(q)))


def weighted_variances(p: Array, q: Array, advantages: Array) -> tuple[Array, Array]:
    """Var_q[A p/q] and Var_q[A p/E_q q], the two things that a gradient feels; [...] each."""
    ordinary = advantages * p / q
    shared = advantages * p / collision_probability(q)[..., None]
    return _variance(ordinary, q), _variance(shared, q)


def bias_shared(p: Array, q: Array, advantages: Array) -> Array:
    """E_q[(p/E_q q) A] - E_p[A], what the shared denominator gets wrong on average; [...]."""
    tilt = q / collision_probability(q)[..., None] - 1.0
    return np.asarray((p * tilt * advantages).sum(-1))


def softmax(logits: Array) -> Array:
    """exp(z) / sum exp(z) along the last axis."""
    shifted = np.exp(logits - logits.max(-1, keepdims=True))
    return np.asarray(shifted / shifted.sum(-1, keepdims=True))


def gaussian_variance_shared(mean: Array, deviation: Array) -> Array:
    """Var_q[p/E_q q] of p = N(m, s^2), q = N(0, 1), where E_q[q] = integral q^2 = 1/(2 sqrt(pi)).

    2 exp(-m^2/(2+s^2)) / (s sqrt(2+s^2)) - 2 exp(-m^2/(1+s^2)) / (1+s^2): finite for each s, unbounded as s -> 0.
    """
    squared, shift = np.square(deviation), np.square(mean)
    second_moment = 2.0 * np.exp(-shift / (2.0 + squared)) / (deviation * np.sqrt(2.0 + squared))
    return np.asarray(second_moment - 2.0 * np.exp(-shift / (1.0 + squared)) / (1.0 + squared))


def _variance(values: Array, q: Array) -> Array:
    centred = values - (q * values).sum(-1, keepdims=True)
    return np.asarray((q * np.square(centred)).sum(-1))
