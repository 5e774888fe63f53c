"""The theorems: counterexamples in numbers, no violation where a proof exists, and the same counts per seed."""

from __future__ import annotations

import numpy as np
import pytest

from heterorl_research.lab.theory import checks, claims, theorems

TRIALS = 12_000


def generator() -> np.random.Generator:
    return np.random.default_rng(11)


def test_theorem_one_holds_also_with_the_sharper_constant() -> None:
    found = checks.check_theorem_one(generator(), num_trials=TRIALS)

    assert found.stated == checks.TrialCount(violations=0, trials=TRIALS)
    assert found.sharper == checks.TrialCount(violations=0, trials=TRIALS)
    # (1 + n^2/4)/(n^2 + 1) is 0.4 at n = 2 and less above; the trials come close to it.
    assert 0.399 < found.worst <= 0.4
    for num_outcomes, ratio in found.worst_by_outcomes:
        assert ratio <= (1 + num_outcomes**2 / 4) / (num_outcomes**2 + 1) + 1e-12


def test_sharper_constant_of_theorem_one_is_attained_by_two_outcomes() -> None:
    p, q = np.array([1.0, 0.0]), np.array([0.5, 0.5])

    difference = float(theorems.variance_ordinary(p, q) - theorems.variance_shared(p, q))

    # Var[p/q] = Var[p/E_q q] = 1 and exp(KL) = 2, so C must be at least 2 = 1 + 2^2/4.
    assert difference == pytest.approx(0.0, abs=1e-15)
    assert float(np.exp(theorems.kl(p, q))) == pytest.approx(checks.sharper_constant(2.0), rel=1e-15)


def test_theorem_two_fails_for_bounded_and_holds_for_centred_advantages() -> None:
    found = checks.check_theorem_two(generator(), num_trials=TRIALS)

    assert found.bounded.violations > 0
    assert 0.1 < found.constant.rate < 0.3
    assert found.centred_learner == checks.TrialCount(violations=0, trials=TRIALS)
    assert found.centred_sampler.violations > 0


def test_theorem_two_counterexample_has_bias_of_almost_one() -> None:
    p, q = np.full(1000, 1e-3), np.concatenate([[1 - 999e-9], np.full(999, 1e-9)])

    bias, bound = checks.bias_and_bound(p, q, np.ones(1000))

    # E_p A = 1; E_q[(p/E_q q) A] = 0.001/S with S near 1; ||p||/||q|| = 1/sqrt(1000).
    assert float(bias) == pytest.approx(0.999, abs=1e-5)
    assert float(bound) == pytest.approx(0.0316228, abs=1e-5)


def test_centring_makes_the_mean_zero_and_the_largest_one() -> None:
    p = checks.random_policies(generator(), num_outcomes=6, num_cases=50)

    centred = checks.centre(np.random.default_rng(2).uniform(-1, 1, size=p.shape), p)

    assert (p * centred).sum(-1) == pytest.approx(np.zeros(50), abs=1e-12)
    assert np.abs(centred).max(-1) == pytest.approx(np.ones(50), rel=1e-15)


@pytest.mark.parametrize(
    ("example", "left", "right", "tolerance"),
    [
        (claims.published_counterexample(), -2.375, -1.597, 5e-4),
        # 1/q - 1 - q(1-q)/S^2 = 2 - 1 - (1/4)/(9/64) = -7/9; 2 - 8/3 = -2/3.
        (claims.simple_counterexample(), -7 / 9, -2 / 3, 1e-12),
        # S = 2(.04) + 30(.0004) = .092: 5/2 - .1/S^2 and 5/2 - 1/S.
        (claims.centred_counterexample(), 2.5 - 0.1 / 0.092**2, 2.5 - 1 / 0.092, 1e-12),
    ],
    ids=["published", "simple", "centred"],
)
def test_theorem_three_fails_and_its_repair_holds(example: tuple, left: float, right: float, tolerance: float) -> None:
    sides = [float(side) for side in checks.third_sides(*example, is_repaired=False)]
    repaired = [float(side) for side in checks.third_sides(*example, is_repaired=True)]

    assert sides == pytest.approx([left, right], abs=tolerance)
    assert sides[0] < sides[1]
    assert repaired[0] > repaired[1]


def test_theorem_three_fails_at_exactly_the_point_masses_that_the_page_names() -> None:
    q = checks.random_policies(generator(), num_outcomes=6, num_cases=400)
    collision, first = np.square(q).sum(-1), q[:, 0]
    point = np.zeros_like(q)
    point[:, 0] = 1.0

    left, right = checks.third_sides(point, q, np.ones_like(q), is_repaired=False)

    # Left is 1/q - 1 - q(1-q)/S^2, right 1/q - 1/S: it fails where q(1-q) > S(1-S).
    named = (first > collision) & (first < 1 - collision)
    assert 50 < named.sum() < 350
    assert (left < right).tolist() == named.tolist()


def test_centred_counterexample_is_centred_under_both_policies() -> None:
    p, q, advantages = claims.centred_counterexample()

    assert float((p * advantages).sum()) == 0.0
    assert float((q * advantages).sum()) == pytest.approx(0.0, abs=1e-15)
    assert float(q.sum()) == pytest.approx(1.0, rel=1e-12)


def test_directed_search_breaks_theorem_three_and_never_its_repair() -> None:
    found = checks.check_theorem_three(generator(), num_trials=TRIALS)

    assert found.directed.rate > 0.3
    assert found.directed.rate > found.random.rate
    assert found.repaired == checks.TrialCount(violations=0, trials=TRIALS)


def test_count_below_sees_a_failure_beyond_rounding_only() -> None:
    left, right = np.array([1.0, 1.0, 1.0]), np.array([1.0, 1.0 + 1e-13, 1.0 + 1e-9])

    assert checks.count_below(left, right) == checks.TrialCount(violations=1, trials=3)


def test_random_policies_are_positive_and_sum_to_one() -> None:
    policies = checks.random_policies(generator(), num_outcomes=30, num_cases=2000)

    assert float(policies.min()) > 0
    assert policies.sum(-1) == pytest.approx(np.ones(2000), rel=1e-12)


def test_same_seed_gives_the_same_counts() -> None:
    first, again = (checks.check_theorem_three(generator(), num_trials=600) for _ in range(2))
    other = checks.check_theorem_three(np.random.default_rng(12), num_trials=600)

    assert first == again
    assert first != other
