"""The three theorems of arXiv 2508.17850 put to the test: random trials, exact counterexamples, repaired constants.

Guarantees: a trial is a violation only when it fails by more than rounding; the same seed gives the same numbers.
Notation: p the learner policy, q the sampler policy over n outcomes, S = ||q||_2^2 = sum q^2, A an advantage.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from heterorl_research.lab.theory.theorems import (
    Array,
    bias_shared,
    collision_probability,
    kl,
    variance_ordinary,
    variance_shared,
    weighted_variances,
)

NUM_OUTCOMES = (2, 3, 5, 10, 30, 100)
# Relative to the size of the two sides; a double carries 2e-16 and a sum of 100 terms a hundred times that.
ROUNDING = 1e-11
# A tighter floor would only test the rounding of p^2/q.
SMALLEST_PROBABILITY = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialCount:
    """How often an inequality failed.

    Example:
        TrialCount(violations=0, trials=1000)
    """

    violations: int
    trials: int

    @property
    def rate(self) -> float:
        """Violations per trial."""
        return self.violations / self.trials

    def __add__(self, other: TrialCount) -> TrialCount:
        """The count over both sets of trials."""
        return TrialCount(violations=self.violations + other.violations, trials=self.trials + other.trials)


NONE = TrialCount(violations=0, trials=0)


def random_policies(rng: np.random.Generator, *, num_outcomes: int, num_cases: int) -> Array:
    """Dirichlet distributions whose concentration is itself log-uniform in [0.03, 30]: [num_cases, N], all > 0."""
    concentration = np.exp(rng.uniform(np.log(0.03), np.log(30.0), size=(num_cases, 1)))
    weights = rng.standard_gamma(concentration, size=(num_cases, num_outcomes))
    # A row of tiny concentration can underflow to zeros only.
    weights = np.maximum(weights, weights.max(-1, keepdims=True) * SMALLEST_PROBABILITY + 1e-300)
    return np.asarray(weights / weights.sum(-1, keepdims=True))


def count_below(left: Array, right: Array, *, scale: Array | float = 0.0) -> TrialCount:
    """In how many cases left >= right is false by more than rounding; `scale` is the size of cancelled terms."""
    slack = ROUNDING * (1.0 + np.abs(left) + np.abs(right) + scale)
    return TrialCount(violations=int((left < right - slack).sum()), trials=left.size)


@dataclass(frozen=True, slots=True, kw_only=True)
class TheoremOne:
    """Var_q[p/q] - Var_q[p/E_q q] >= exp(KL(p||q)) - C with C = n^2 + 1, and with the sharper C = 1 + n^2/4.

    `worst_by_outcomes` pairs n with the largest (exp(KL) - difference) / (n^2 + 1) seen; the theorem says at most 1.
    """

    stated: TrialCount
    sharper: TrialCount
    worst_by_outcomes: tuple[tuple[int, float], ...]

    @property
    def worst(self) -> float:
        """The largest ratio over every n."""
        return max(ratio for _, ratio in self.worst_by_outcomes)


def sharper_constant(num_outcomes: Array | float) -> Array | float:
    """C = 1 + n^2/4: Var_q[p/q] >= exp(KL) - 1 by Jensen, Var_q[p/E_q q] <= 1/(4 S^2) <= n^2/4 by Popoviciu."""
    return 1.0 + num_outcomes**2 / 4.0


def check_theorem_one(rng: np.random.Generator, *, num_trials: int) -> TheoremOne:
    """Random p and q, a tenth of the p almost a point mass, which is where the inequality is tightest."""
    stated, sharper = NONE, NONE
    worst = dict.fromkeys(NUM_OUTCOMES, -np.inf)
    for n, p, q in _pairs(rng, num_trials):
        p[: len(p) // 10] = _near_point_mass(p[: len(p) // 10])
        ordinary, shared, exponential = variance_ordinary(p, q), variance_shared(p, q), np.exp(kl(p, q))
        difference = ordinary - shared
        stated += count_below(difference, exponential - (n**2 + 1), scale=ordinary)
        sharper += count_below(difference, exponential - sharper_constant(float(n)), scale=ordinary)
        worst[n] = max(worst[n], float(((exponential - difference) / (n**2 + 1)).max()))
    return TheoremOne(stated=stated, sharper=sharper, worst_by_outcomes=tuple(worst.items()))


@dataclass(frozen=True, slots=True, kw_only=True)
class TheoremTwo:
    """|E_p A - E_q[(p/E_q q) A]| < ||p||_2/||q||_2, for four kinds of advantage with |A| <= 1.

    bounded: uniform in [-1, 1]; constant: A = 1; centred_learner: E_p A = 0; centred_sampler: E_q A = 0.
    """

    bounded: TrialCount
    constant: TrialCount
    centred_learner: TrialCount
    centred_sampler: TrialCount


def check_theorem_two(rng: np.random.Generator, *, num_trials: int) -> TheoremTwo:
    """Random p, q and A."""
    bounded, constant, centred_learner, centred_sampler = NONE, NONE, NONE, NONE
    for _, p, q in _pairs(rng, num_trials):
        draws = rng.uniform(-1.0, 1.0, size=p.shape)
        bounded += _count_bias(p, q, draws)
        constant += _count_bias(p, q, np.ones_like(p))
        centred_learner += _count_bias(p, q, centre(draws, p))
        centred_sampler += _count_bias(p, q, centre(draws, q))
    return TheoremTwo(
        bounded=bounded, constant=constant, centred_learner=centred_learner, centred_sampler=centred_sampler
    )


def bias_and_bound(p: Array, q: Array, advantages: Array) -> tuple[Array, Array]:
    """Both sides of theorem 2: |bias| and ||p||_2/||q||_2; [...]."""
    bound = np.sqrt(collision_probability(p) / collision_probability(q))
    return np.abs(bias_shared(p, q, advantages)), np.asarray(bound)


def centre(advantages: Array, distribution: Array) -> Array:
    """Subtract the mean under a distribution, then divide by the largest magnitude so that |A| <= 1."""
    shifted = advantages - (distribution * advantages).sum(-1, keepdims=True)
    return np.asarray(shifted / np.abs(shifted).max(-1, keepdims=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class TheoremThree:
    """Var_q[A p/q] - Var_q[A p/E_q q] >= A_min^2 exp(KL(p||q)) - C.

    C = A_max^2/S as stated, on random trials and on trials where p is almost a point mass at the likeliest outcome
    of q and A = 1; and C = A_max^2 (1 + 1/S^2) as repaired, on both together.
    """

    random: TrialCount
    directed: TrialCount
    repaired: TrialCount


def check_theorem_three(rng: np.random.Generator, *, num_trials: int) -> TheoremThree:
    """Half of the trials random, half directed."""
    random, directed, repaired = NONE, NONE, NONE
    for _, p, q in _pairs(rng, num_trials // 2):
        magnitudes = rng.uniform(rng.uniform(size=(len(p), 1)), 1.0, size=p.shape)
        advantages = magnitudes * rng.choice([-1.0, 1.0], size=p.shape)
        random += _count_third(p, q, advantages, is_repaired=False)
        repaired += _count_third(p, q, advantages, is_repaired=True)
    for _, p, q in _pairs(rng, num_trials // 2):
        peaked = _near_point_mass(q)
        directed += _count_third(peaked, q, np.ones_like(p), is_repaired=False)
        repaired += _count_third(peaked, q, np.ones_like(p), is_repaired=True)
    return TheoremThree(random=random, directed=directed, repaired=repaired)


def third_sides(p: Array, q: Array, advantages: Array, *, is_repaired: bool) -> tuple[Array, Array]:
    """Left and right side of theorem 3; [...] each. C is A_max^2/S, or the repaired A_max^2 (1 + 1/S^2)."""
    ordinary, shared = weighted_variances(p, q, advantages)
    squares = np.square(advantages)
    collision = collision_probability(q)
    constant = squares.max(-1) * (1.0 + collision**-2.0 if is_repaired else 1.0 / collision)
    return ordinary - shared, np.asarray(squares.min(-1) * np.exp(kl(p, q)) - constant)


def _pairs(rng: np.random.Generator, num_trials: int) -> Iterator[tuple[int, Array, Array]]:
    # In slices, so that memory stays small; n takes its values in turn.
    slice_size = 5000
    share = max(1, num_trials // len(NUM_OUTCOMES))
    for n in NUM_OUTCOMES:
        for start in range(0, share, slice_size):
            count = min(slice_size, share - start)
            yield (
                n,
                random_policies(rng, num_outcomes=n, num_cases=count),
                random_policies(rng, num_outcomes=n, num_cases=count),
            )


def _near_point_mass(policies: Array) -> Array:
    peaked = policies * 1e-4
    np.put_along_axis(peaked, policies.argmax(-1)[:, None], 1.0, axis=-1)
    return np.asarray(peaked / peaked.sum(-1, keepdims=True))


def _count_bias(p: Array, q: Array, advantages: Array) -> TrialCount:
    bias, bound = bias_and_bound(p, q, advantages)
    return count_below(bound, bias)


def _count_third(p: Array, q: Array, advantages: Array, *, is_repaired: bool) -> TrialCount:
    left, right = third_sides(p, q, advantages, is_repaired=is_repaired)
    ordinary, _ = weighted_variances(p, q, advantages)
    return count_below(left, right, scale=ordinary)
