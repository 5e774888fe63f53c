"""Intervals agree with published numbers and with a slow reference."""

import mpmath
import pytest

from heterorl.common.evaluation.summary import LARGE_DF, t_central, t_quantile


@pytest.mark.parametrize(
    ("df", "expected"),
    # Student's table, 97.5 % point.
    [(1, 12.7062047362), (2, 4.30265272991), (4, 2.77644510520), (9, 2.26215716280), (30, 2.04227245630)],
)
def test_t_quantile_equals_the_table(df, expected):
    assert t_quantile(0.95, df=df) == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("df", [1, 2, 3, 4, 5, 6, 7, 20, 33])
@pytest.mark.parametrize("t", [0.0, 0.3, 1.0, 2.5, 12.0])
def test_t_central_equals_the_incomplete_beta_function(df, t):
    expected = float(mpmath.betainc(0.5, df / 2, 0, t * t / (df + t * t), regularized=True))

    assert t_central(t, df=df) == pytest.approx(expected, abs=1e-12)


def test_t_quantile_of_many_degrees_of_freedom_is_the_same_and_costs_nothing():
    for df in (LARGE_DF + 1, 5000):
        assert t_central(t_quantile(0.95, df=df), df=df) == pytest.approx(0.95, abs=1e-9)
    assert t_quantile(0.95, df=1 << 40) == pytest.approx(1.959963984540054, abs=1e-11)
