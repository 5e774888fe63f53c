"""Every statistic equals scipy's, on seeds of many numbers and spreads."""

import math

import numpy as np
import pytest
from scipy import stats

from heterorl.common.evaluation.summary import wilson
from heterorl_research.lab.statistics.correlation import pearson, spearman
from heterorl_research.lab.statistics.intervals import interval
from heterorl_research.lab.statistics.power import detectable_difference, power
from heterorl_research.lab.statistics.significance import equivalence_test, holm, sign_flip_test, t_test, wilcoxon_test


def drawn(num, *, mean=0.03, sd=0.05):
    return [float(value) for value in np.random.default_rng(num).normal(mean, sd, num)]


@pytest.mark.parametrize("num", [2, 3, 5, 10, 16, 33])
def test_paired_t_test_and_interval(num):
    values = drawn(num)
    expected = stats.ttest_1samp(values, 0.0)
    low, high = expected.confidence_interval(0.95)
    found = interval(values)

    assert t_test(values) == pytest.approx(expected.pvalue, rel=1e-9)
    assert (found.low, found.high) == (pytest.approx(low, rel=1e-9), pytest.approx(high, rel=1e-9))


@pytest.mark.parametrize("num", [2, 5, 9, 13])
def test_sign_flips_of_all_patterns(num):
    values = drawn(num)
    expected = stats.permutation_test(
        (values,), np.sum, permutation_type="samples", n_resamples=np.inf, vectorized=False
    )

    assert sign_flip_test(values) == pytest.approx(expected.pvalue, abs=1e-12)


def test_sign_flips_that_are_sampled_are_near_all_of_them():
    values = drawn(18, mean=0.02)
    patterns = (np.arange(2**18)[:, None] >> np.arange(18) & 1) * 2 - 1
    exact = np.mean(np.abs(patterns @ values) >= abs(sum(values)) - 1e-12)

    # Four standard errors of 65 536 draws.
    assert sign_flip_test(values) == pytest.approx(exact, abs=4 * math.sqrt(exact / 65_536))


def test_sampled_sign_flips_are_never_zero():
    assert sign_flip_test([0.1] * 40) == pytest.approx(1 / 65_537)


@pytest.mark.parametrize("num", [5, 10, 15])
def test_wilcoxon(num):
    values = drawn(num)

    assert wilcoxon_test(values) == pytest.approx(stats.wilcoxon(values, method="exact").pvalue, abs=1e-12)


@pytest.mark.parametrize("mean", [0.0, 0.03, 0.2])
def test_equivalence_is_the_larger_of_two_one_sided_tests(mean):
    values = drawn(12, mean=mean)
    expected = max(
        stats.ttest_1samp(values, -0.05, alternative="greater").pvalue,
        stats.ttest_1samp(values, 0.05, alternative="less").pvalue,
    )

    assert equivalence_test(values, margin=0.05) == pytest.approx(expected, rel=1e-9)


def test_equivalence_of_equal_differences_and_of_one():
    assert equivalence_test([0.01] * 4, margin=0.05) == 0.0
    assert equivalence_test([0.06] * 4, margin=0.05) == 1.0
    assert equivalence_test([0.01], margin=0.05) is None


def test_holm_rejects_what_its_definition_rejects():
    p_values = sorted(float(p) for p in np.random.default_rng(0).uniform(0, 0.05, 12))
    for level in (0.01, 0.05, 0.2):
        # Step down: reject while p of rank k is at most level / (m - k).
        rejected = 0
        while rejected < 12 and p_values[rejected] <= level / (12 - rejected):
            rejected += 1

        assert sum(p <= level for p in holm(p_values)) == rejected


@pytest.mark.parametrize("num", [2, 3, 5, 16, 64, 300])
@pytest.mark.parametrize("difference", [0.0, 0.02, 0.05, 0.2])
def test_power_is_the_noncentral_ts(num, difference):
    critical = stats.t.ppf(0.975, num - 1)
    shift = difference / 0.05 * math.sqrt(num)
    # Far on the other side scipy's lower tail is sometimes NaN in place of 0.
    lower = np.nan_to_num(stats.nct.cdf(-critical, num - 1, shift))
    expected = stats.nct.sf(critical, num - 1, shift) + lower

    assert power(difference, sd=0.05, num=num) == pytest.approx(expected, abs=2e-6)


def test_detectable_difference_has_the_power():
    found = detectable_difference(sd=0.06, num=16)

    assert power(found, sd=0.06, num=16) == pytest.approx(0.8, abs=1e-6)
    assert detectable_difference(sd=0.0, num=16) == 0.0
    assert detectable_difference(sd=0.1, num=1) is None


@pytest.mark.parametrize(("num", "of"), [(0, 5), (1, 5), (5, 5), (3, 16), (16, 16), (40, 100)])
def test_wilson(num, of):
    expected = stats.binomtest(num, of).proportion_ci(0.95, method="wilson")

    assert wilson(num, of) == (pytest.approx(expected.low, abs=1e-12), pytest.approx(expected.high, abs=1e-12))


def test_correlations():
    x, y = drawn(20), drawn(21)[:20]
    y[3] = y[4]

    assert pearson(x, y) == pytest.approx(stats.pearsonr(x, y).statistic)
    assert spearman(x, y) == pytest.approx(stats.spearmanr(x, y).statistic)
