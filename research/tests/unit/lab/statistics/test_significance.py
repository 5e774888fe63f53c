"""Tests and correlations agree with published numbers."""

import pytest

from heterorl_research.lab.statistics.correlation import pearson, spearman
from heterorl_research.lab.statistics.intervals import interval
from heterorl_research.lab.statistics.significance import holm, sign_flip_test, t_test, wilcoxon_test

# Darwin's maize, eighths of an inch, crossed minus self-fertilised: Fisher, The Design of Experiments, sections 17
# and 21: t = 2.148 with 14 degrees of freedom; 863 of the 2^15 sign patterns have a sum of 314 or more.
DARWIN = [49, -67, 8, 16, 6, 23, 28, 41, 14, 29, 56, 24, 75, 60, -48]


def test_tests_equal_fishers_numbers_for_darwins_maize():
    found = interval(DARWIN)

    assert found.mean == pytest.approx(314 / 15)
    assert found.half == pytest.approx(20.90, abs=0.005)
    assert t_test(DARWIN) == pytest.approx(0.0497, abs=5e-5)
    assert sign_flip_test(DARWIN) == 2 * 863 / 2**15
    # The exact p that textbooks and statistics packages give for these data: W = 24.
    assert wilcoxon_test(DARWIN) == 0.041259765625


def test_tests_of_equal_differences_and_of_zeros():
    assert t_test([0.1] * 5) == 0.0
    assert t_test([0.0] * 5) == 1.0
    # All five have one sign: two patterns of 2^5.
    assert sign_flip_test([0.1] * 5) == wilcoxon_test([0.1] * 5) == 2 / 32
    assert sign_flip_test([0.0] * 5) == wilcoxon_test([0.0] * 5) == 1.0
    assert t_test([0.1]) is sign_flip_test([0.1]) is wilcoxon_test([0.1]) is None


def test_wilcoxon_leaves_zeros_out_and_shares_ranks_of_ties():
    # Ranks of 1, -1, 2, 3, 4 are 1.5, -1.5, 3, 4, 5: the sum is 12. Of 32 patterns, those with -1.5, +-1.5 or less on
    # the negative side reach 12: negatives {}, {1.5}, {1.5} give 15, 12, 12; twice that for both sides.
    assert wilcoxon_test([0.0, 1, -1, 2, 3, 4]) == 6 / 32
    # Ranks 1, 2, 3, -4: negatives sum to 4 of 10, and only a sum of 5 ({1, 4} and {2, 3}) is nearer to the middle.
    assert wilcoxon_test([0.0, 1, 2, 3, -4]) == 14 / 16
    assert wilcoxon_test([0.0, 0.0, 5.0]) == 1.0


def test_sign_flips_beyond_sixteen_pairs_are_sampled_and_repeatable():
    many = [0.1 * (-1) ** i + 0.02 for i in range(20)]

    p = sign_flip_test(many)

    assert p == sign_flip_test(many)
    # z = 20 * 0.02 / sqrt(20 * 0.0104) = 0.877, so p is near 0.38; sums come in steps, hence the width.
    assert 0.3 < p < 0.65


def test_holm_multiplies_by_the_number_left_and_never_decreases():
    # Sorted .01, .03, .04: times 3, 2, 1 gives .03, .06, .04; the last is raised to .06.
    assert holm([0.01, None, 0.04, 0.03]) == [pytest.approx(0.03), None, pytest.approx(0.06), pytest.approx(0.06)]
    assert holm([0.9, 0.8]) == [1.0, 1.0]


def test_correlations_of_known_lists():
    assert pearson([1, 2, 3], [2, 4, 6.0]) == pytest.approx(1)
    # x - 2 = (-1, 0, 1), y - 2 = (-1, 1, 0): 1 / 2.
    assert pearson([1, 2, 3], [1, 3, 2]) == pytest.approx(0.5)
    assert spearman([1, 2, 3], [1, 10, 1000]) == pytest.approx(1)
    assert pearson([1, 2], [1, 2]) is pearson([1, 1, 1], [1, 2, 3]) is None


def test_interval_of_five_seeds_is_the_t_interval():
    found = interval([0.1, 0.2, 0.3, 0.4, 0.5])

    # s = sqrt(0.025), s / sqrt(5) = sqrt(0.005), times 2.776445.
    assert found.mean == pytest.approx(0.3)
    assert found.half == pytest.approx(2.77644510520 * 0.005**0.5)
    assert found.sd == pytest.approx(0.025**0.5)
    assert (found.lowest, found.highest, found.num) == (0.1, 0.5, 5)
    assert (found.low, found.high) == (pytest.approx(0.3 - found.half), pytest.approx(0.3 + found.half))


def test_interval_of_one_value_has_no_width_and_of_none_is_none():
    assert interval([0.4]).half is None
    assert interval([]) is None
