"""The samples of the theory page: random softmax policies, and a group of completions.

Guarantees: every draw comes from the generator in the arguments.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from heterorl_research.lab.theory import theorems
from heterorl_research.lab.theory.theorems import Array

GROUP_SIZE = 8
# exp of the mean log-probs -0.47, -0.5, -0.675, -1.2: a group of four completions of unequal confidence.
GROUP = tuple(float(value) for value in np.exp([-0.47, -0.5, -0.675, -1.2]))
# Edges of the divergence bins in nats.
KL_EDGES = (0.0, 0.01, 0.03, 0.1, 0.3, 1.0, float("inf"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Bin:
    """The pairs of one range of KL(p||q): how often the shared weight is better, and the median variances."""

    low: float
    high: float
    num_pairs: int
    share_varies_less: float
    share_smaller_error: float
    median_ordinary: float
    median_shared: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftmaxCases:
    """Divergences, variances of both weights, and errors of both estimates of E_p[A], of pairs of policies; [M] each.

    The error is the mean square of (1/G) sum w_i A_i - E_p[A] with G = 8: variance over G plus squared bias.
    """

    forward: Array
    reverse: Array
    ordinary: Array
    shared: Array
    ordinary_error: Array
    shared_error: Array

    def bins(self) -> list[Bin]:
        """One row per range of KL_EDGES that holds a pair."""
        rows = []
        for low, high in itertools.pairwise(KL_EDGES):
            inside = (self.forward >= low) & (self.forward < high)
            if inside.any():
                rows.append(
                    Bin(
                        low=low,
                        high=high,
                        num_pairs=int(inside.sum()),
                        share_varies_less=float((self.shared < self.ordinary)[inside].mean()),
                        share_smaller_error=float((self.shared_error < self.ordinary_error)[inside].mean()),
                        median_ordinary=float(np.median(self.ordinary[inside])),
                        median_shared=float(np.median(self.shared[inside])),
                    )
                )
        return rows


def softmax_cases(rng: np.random.Generator, *, num_cases: int, num_outcomes: int = 64) -> SoftmaxCases:
    """Pairs q = softmax(z), p = softmax((z + sigma e)/T).

    z and e are standard normal times 2 and 1; sigma is log-uniform in [0.01, 3] and log T uniform in [-0.4, 0.4]
    times min(1, sigma), so that close pairs exist. The reward is 1 for a random half of the outcomes, and A is the
    reward less its mean under q, as the group mean estimates it.
    """
    logits = 2.0 * rng.standard_normal((num_cases, num_outcomes))
    sigma = np.exp(rng.uniform(np.log(0.01), np.log(3.0), size=(num_cases, 1)))
    temperature = np.exp(rng.uniform(-0.4, 0.4, size=(num_cases, 1)) * np.minimum(1.0, sigma))
    noise = rng.standard_normal(logits.shape)
    q, p = theorems.softmax(logits), theorems.softmax((logits + sigma * noise) / temperature)
    rewards = (rng.random(logits.shape) < 0.5).astype(np.float64)
    advantages = rewards - (q * rewards).sum(-1, keepdims=True)
    ordinary, shared = theorems.weighted_variances(p, q, advantages)
    return SoftmaxCases(
        forward=theorems.kl(p, q),
        reverse=theorems.kl(q, p),
        ordinary=theorems.variance_ordinary(p, q),
        shared=theorems.variance_shared(p, q),
        ordinary_error=ordinary / GROUP_SIZE,
        shared_error=shared / GROUP_SIZE + np.square(theorems.bias_shared(p, q, advantages)),
    )
