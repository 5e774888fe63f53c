"""Lags in versions and the offset of drawn delays: numbers of the published runs, exact lags, no way back."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from heterorl.sampler.delay import (
    DelayConfig,
    ExponentialDelay,
    FixedDelay,
    LognormalDelay,
    NoDelay,
    SawtoothDelay,
    UniformDelay,
    UniformLagDelay,
    Visibility,
    WeibullDelay,
    draw,
    group_delay_s,
    max_delay_s,
    max_delay_versions,
    max_group_delay_s,
)

NUM_DRAWS = 4000


def version_lags(config, *, seed, count):
    """Versions behind at heads below `count`, for a sampler that hears each."""
    visible, current, lags = Visibility(config, seed=seed), -1, []
    for head in range(count):
        visible.see(head, 0.0)
        current, _ = visible.target(0.0, current=current)
        lags.append(head - current)
    return lags


def draws(config):
    return np.array([draw(config, seed=1, stream="interval", index=index) for index in range(NUM_DRAWS)])


@pytest.mark.parametrize(
    ("config", "median", "share_at_floor"),
    [
        # exp(mu) - default, and the share of draws below low + default.
        (LognormalDelay(low=60, high=1920, default=60), 279.411, 0.0461),
        (LognormalDelay(low=400, high=3600, default=400), 800.0, 0.1501),
        (WeibullDelay(low=60, high=1920, default=60), 674.612, 0.0118),
    ],
    ids=["60/1920/60", "400/3600/400", "weibull"],
)
def test_default_is_taken_off_before_the_cut_as_in_the_published_runs(config, median, share_at_floor):
    assert config.quantile(0.5) - config.default == pytest.approx(median, abs=1e-3)

    values = draws(config)
    # 5 standard errors of shares of 4000 draws.
    assert np.mean(values < median) == pytest.approx(0.5, abs=5 * 0.5 / math.sqrt(NUM_DRAWS))
    error = math.sqrt(share_at_floor * (1 - share_at_floor) / NUM_DRAWS)
    assert np.mean(values == config.low) == pytest.approx(share_at_floor, abs=5 * error)
    assert values.max() <= config.high


@pytest.mark.parametrize("kind", [UniformDelay, LognormalDelay, WeibullDelay, ExponentialDelay])
def test_without_a_default_draws_are_what_they_were(kind):
    plain, shifted = kind(low=60, high=1920), kind(low=60, high=1920, default=100)

    assert plain.default == 0.0
    # Draws beyond the interval are cut after the offset, not before.
    before, after = draws(plain), draws(shifted)
    within = (before > 60) & (before < 1920)
    assert after[within] == pytest.approx(np.maximum(before[within] - 100, 60))


def test_sawtooth_grows_to_its_end_and_falls():
    config = SawtoothDelay(high=57)
    lags = version_lags(config, seed=3, count=58 * 20)

    assert lags[:58] == list(range(58))
    assert lags == list(range(58)) * 20
    assert lags == version_lags(config, seed=4, count=58 * 20), "all samplers are in step"


def test_uniform_lags_are_uniform():
    high, count = 9, 40_000
    lags = version_lags(UniformLagDelay(high=high), seed=7, count=count)
    shares = Counter(lags)

    assert set(shares) == set(range(high + 1))
    # A fall comes every few versions, so draws hang together: the effective number is smaller by about that factor.
    error = math.sqrt(0.1 * 0.9 / (count / (high + 1)))
    for lag in range(high + 1):
        assert shares[lag] / count == pytest.approx(0.1, abs=5 * error), lag
    assert lags != version_lags(UniformLagDelay(high=high), seed=8, count=count)


LAGGED = st.builds(SawtoothDelay, high=st.integers(1, 40)) | st.builds(UniformLagDelay, high=st.integers(1, 40))


@given(LAGGED, st.integers(0, 99))
def test_a_lag_never_leads_back_to_an_older_version_nor_beyond_its_end(config, seed):
    lags = version_lags(config, seed=seed, count=200)
    versions = [head - lag for head, lag in enumerate(lags)]

    assert versions == sorted(versions)
    assert versions[0] == 0
    assert max(lags) <= max_delay_versions(config) == config.high


@given(LAGGED, st.integers(0, 99), st.sets(st.integers(0, 199), min_size=1))
def test_the_lag_at_a_head_does_not_depend_on_which_heads_were_heard_of(config, seed, heads):
    lags = version_lags(config, seed=seed, count=200)
    visible = Visibility(config, seed=seed)
    for head in sorted(heads):
        visible.see(head, 0.0)
        target, wake = visible.target(0.0, current=0)
        assert (target, wake) == (head - lags[head], None)


def test_a_sampler_that_used_a_newer_version_keeps_it():
    visible = Visibility(SawtoothDelay(high=9), seed=0)
    visible.see(5, 0.0)

    assert visible.target(0.0, current=3) == (3, None)


@pytest.mark.parametrize("config", [SawtoothDelay(high=3), UniformLagDelay(high=3)])
def test_lags_hold_no_groups_and_take_no_seconds(config):
    assert group_delay_s(config, seed=0, sequence=1) == max_group_delay_s(config) == max_delay_s(config) == 0.0


@pytest.mark.parametrize(
    ("config", "lags"),
    [
        (NoDelay(), [0, 0, 0, 0, 0]),
        (FixedDelay(unit="versions", value=3), [0, 1, 2, 3, 3]),
        (FixedDelay(unit="versions", value=2.5), [0, 1, 2, 3, 3]),
        (FixedDelay(unit="versions", semantics="refresh_interval", value=2), [0, 1, 0, 1, 0]),
    ],
)
def test_lags_of_the_other_delays_in_versions(config, lags):
    assert version_lags(config, seed=0, count=5) == lags


@pytest.mark.parametrize(
    "table",
    [
        {"kind": "sawtooth"},
        {"kind": "sawtooth", "high": 0},
        {"kind": "sawtooth", "high": 3, "unit": "seconds"},
        {"kind": "uniform_lag", "high": 3, "semantics": "refresh_interval"},
        {"kind": "fixed", "value": 3, "default": 1},
        {"kind": "lognormal", "low": 1, "high": 3, "default": -1},
    ],
)
def test_lags_that_are_none_are_refused(table):
    with pytest.raises(ValidationError):
        TypeAdapter(DelayConfig).validate_python(table)
