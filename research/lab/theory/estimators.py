"""The three group denominators as they are used: estimated from G samples, with their exact expectation.

The arithmetic mean of q_i is the unbiased Monte-Carlo estimate of E_q[q]. The contraharmonic mean sum q^2 / sum q
(arXiv 2508.17850, equation 2) weights every sample by its probability a second time and so tends to
E_q[q^2]/E_q[q] >= E_q[q]; the geometric mean tends to exp(E_q[log q]) <= E_q[q].
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np

from heterorl_research.lab.theory.theorems import Array

Mean = Literal["contraharmonic", "arithmetic", "geometric"]
MEANS: tuple[Mean, ...] = get_args(Mean)


def group_mean(values: Array, *, kind: Mean) -> Array:
    """The mean of the positive numbers q_i of each group: [..., G] -> [...]."""
    if kind == "arithmetic":
        return np.asarray(values.mean(-1))
    if kind == "geometric":
        return np.asarray(np.exp(np.log(values).mean(-1)))
    return np.asarray(np.square(values).sum(-1) / values.sum(-1))


def limit(q: Array, *, kind: Mean) -> float:
    """What the mean of G samples of q tends to as G grows, for a distribution q > 0 of shape [N]."""
    if kind == "arithmetic":
        return float(np.square(q).sum())
    if kind == "geometric":
        return math.exp(float((q * np.log(q)).sum()))
    return float((q**3).sum() / np.square(q).sum())


def exact_expectation(q: Array, num_samples: int, *, kind: Mean) -> float:
    """E of the group mean over G independent samples of q [N], by summing over every possible count vector.

    There are (G+N-1 choose N-1) of them, each with its multinomial probability.
    """
    num_outcomes = q.shape[0]
    slots = num_samples + num_outcomes - 1
    # Stars and bars: the positions of N-1 bars among the slots give N counts that sum to G.
    bars = np.array(list(itertools.combinations(range(slots), num_outcomes - 1)), dtype=np.int64)
    bars = bars.reshape(math.comb(slots, num_outcomes - 1), num_outcomes - 1)
    edges = np.pad(bars, ((0, 0), (1, 1)), constant_values=((0, 0), (-1, slots)))
    counts = np.diff(edges, axis=1) - 1
    log_factorial = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, num_samples + 1)))])
    log_probability = log_factorial[num_samples] - log_factorial[counts].sum(1) + (counts * np.log(q)).sum(1)
    first = (counts * q).sum(1)
    if kind == "contraharmonic":
        values = (counts * np.square(q)).sum(1) / first
    elif kind == "arithmetic":
        values = first / num_samples
    else:
        values = np.exp((counts * np.log(q)).sum(1) / num_samples)
    return float((np.exp(log_probability) * values).sum())


def on_policy_weights(values: Sequence[float]) -> Array:
    """c_i = q_i / (sum q^2 / sum q), the GEPO weights of a group when learner and sampler are the same policy; [G].

    Their mean is (sum q)^2 / (G sum q^2), the effective sample size of q over G, at most 1.
    """
    group = np.asarray(values, dtype=np.float64)
    return np.asarray(group / group_mean(group, kind="contraharmonic"))
