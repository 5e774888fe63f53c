"""A curve is flat when its rise over the last quarter is known to be small."""

import pytest

from heterorl_research.lab.protocol.flat import is_flat, late_rise, rise


def curve_of(slope, *, noise=0.0, until=400):
    """Accuracy every 20 steps: a line with a slope per 100 steps and a saw of a period of two evaluations."""
    return {step: slope * step / 100 + noise * (step // 20 % 2) for step in range(0, until + 1, 20)}


def test_rise_of_a_line_is_a_quarter_of_its_steps():
    # Steps 360, 380, 400 against 260, 280, 300.
    assert late_rise(curve_of(0.1)) == pytest.approx(0.1)
    assert late_rise(curve_of(-0.1)) == pytest.approx(-0.1)


def test_three_evaluations_are_averaged_at_either_end():
    curve = dict.fromkeys(range(0, 401, 20), 0.0) | {400: 0.3, 300: 0.6}

    assert late_rise(curve) == pytest.approx(0.1 - 0.2)


@pytest.mark.parametrize("curve", [{}, {0: 0.1}, {0: 0.1, 10: 0.2, 20: 0.2}])
def test_a_curve_that_is_too_short_is_unknown(curve):
    assert late_rise(curve) is None


def test_flat_needs_the_whole_interval_within_the_tolerance():
    assert is_flat(rise([curve_of(0.01), curve_of(0.011), curve_of(0.009)]))
    # A curve that falls has not come to its end either.
    assert is_flat(rise([curve_of(-0.01), curve_of(-0.011), curve_of(-0.009)]))
    assert not is_flat(rise([curve_of(-0.3), curve_of(-0.31)]))
    assert not is_flat(rise([curve_of(0.05), curve_of(0.051), curve_of(0.049)]))
    # The mean is 0.01, but two seeds this far apart do not say so.
    assert not is_flat(rise([curve_of(0.0), curve_of(0.02)]))
    assert not is_flat(rise([curve_of(0.0)]))
    assert not is_flat(rise([]))
