"""Delay models: exact numbers of the reference, and what a sampler may see when."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from heterorl.sampler.delay import (
    MIN_INTERVAL_S,
    DelayConfig,
    ExponentialDelay,
    FixedDelay,
    LognormalDelay,
    NoDelay,
    UniformDelay,
    Visibility,
    WeibullDelay,
    draw,
    group_delay_s,
    max_delay_versions,
)

LOGNORMAL = LognormalDelay(low=60, high=1920)


def test_lognormal_interval_gives_the_references_parameters():
    assert LOGNORMAL.mu == pytest.approx(5.827212514, abs=1e-9)
    assert LOGNORMAL.sigma == pytest.approx(0.617330640, abs=1e-9)


def test_lognormal_draws_have_their_distribution_and_stay_in_the_interval():
    values = sorted(draw(LOGNORMAL, seed=1, stream="version", index=index) for index in range(4000))

    assert values[0] >= 60
    assert values[-1] <= 1920
    # median exp(mu) = 339.4; the standard error of the log's median is 1.2533 * 0.617 / sqrt(4000) = 0.0122
    assert math.log(values[2000]) == pytest.approx(LOGNORMAL.mu, abs=5 * 0.0122)


def test_draws_differ_between_samplers_and_repeat_for_one():
    ours = [draw(LOGNORMAL, seed=1, stream="version", index=index) for index in range(20)]
    theirs = [draw(LOGNORMAL, seed=2, stream="version", index=index) for index in range(20)]

    assert ours == [draw(LOGNORMAL, seed=1, stream="version", index=index) for index in range(20)]
    assert ours != theirs


def test_transit_in_versions_shows_exactly_the_version_so_many_back():
    visible = Visibility(FixedDelay(unit="versions", value=64), seed=0)
    assert visible.target(0, current=-1) == (-1, None)
    seen, current = [], -1
    for head in range(200):
        visible.see(head, float(head))
        current, _ = visible.target(float(head), current=current)
        seen.append(head - current)

    assert seen[64:] == [64] * 136
    assert seen[:64] == list(range(64))


def test_transit_in_seconds_shows_each_version_when_it_has_arrived():
    visible = Visibility(FixedDelay(value=1800, time_scale=30), seed=0)
    visible.see(0, 0.0)
    assert visible.target(0.0, current=-1) == (0, None)
    visible.see(1, 10.0)
    visible.see(2, 20.0)

    assert visible.target(30.0, current=0) == (0, 70.0)
    assert visible.target(70.0, current=0) == (1, 80.0)
    assert visible.target(80.0, current=1) == (2, None)


def test_versions_that_an_outage_hid_arrive_in_turn():
    visible, current, lags = Visibility(FixedDelay(value=600), seed=0), -1, []
    # A version each minute; from the tenth minute to the twentieth the link is down.
    for minute in range(60):
        if not 10 < minute < 20:
            visible.see(minute, 60.0 * minute)
            current, _ = visible.target(60.0 * minute, current=current)
            lags.append(minute - current)

    assert max(lags) == 10


@pytest.mark.parametrize("version", [2**40, 2**62])
def test_head_that_jumps_far_costs_little(version):
    visible = Visibility(FixedDelay(value=600), seed=0)
    visible.see(0, 0.0)
    visible.see(version, 60.0)

    assert visible.target(660.0, current=0) == (version, None)
    assert len(visible._seen) < 10_000


def test_refresh_in_seconds_takes_the_newest_when_the_interval_is_over():
    visible = Visibility(FixedDelay(semantics="refresh_interval", value=60), seed=0)
    visible.see(0, 0.0)
    assert visible.target(0.0, current=-1) == (0, None)
    visible.see(5, 30.0)

    assert visible.target(59.0, current=0) == (0, 60.0)
    assert visible.target(60.0, current=0) == (5, None)


def test_refresh_takes_what_was_newest_when_the_interval_ended_however_rarely_it_is_asked():
    # Intervals end at 60, 120, ... 480, 540; version 5 appears at 500, so the refresh at 540 is the first to take it.
    def after(instants):
        visible, current = Visibility(FixedDelay(semantics="refresh_interval", value=60), seed=0), -1
        visible.see(0, 0.0)
        for now in instants:
            if now == 510:
                visible.see(5, 500.0)
            current, wake = visible.target(now, current=current)
        return current, wake

    assert after([0, 510]) == after(range(0, 511, 10)) == (0, 540.0)
    assert after([0, 510, 539]) == (0, 540.0)
    assert after([0, 510, 777]) == (5, None)


@given(st.lists(st.floats(0, 3000), min_size=1, max_size=30), st.integers(0, 99))
def test_lognormal_refreshes_do_not_depend_on_when_they_are_asked_for(instants, seed):
    config = LognormalDelay(semantics="refresh_interval", low=60, high=1920, time_scale=10)

    def final(asked):
        visible, current = Visibility(config, seed=seed), -1
        visible.see(0, 0.0)
        current, _ = visible.target(0.0, current=current)
        for version in range(1, 60):
            visible.see(version, version * 50.0)
        for now in asked:
            current, _ = visible.target(now, current=current)
        return current

    assert final([*sorted(instants), 3000.0]) == final([3000.0])


def test_refresh_interval_of_nothing_is_the_head_after_a_moment():
    visible = Visibility(FixedDelay(semantics="refresh_interval", value=0), seed=0)
    visible.see(0, 0.0)
    visible.target(0.0, current=-1)
    visible.see(1, 4.0)

    assert visible.target(4.0 + 2 * MIN_INTERVAL_S, current=0) == (1, None)


@pytest.mark.parametrize("unit", ["seconds", "versions"])
@pytest.mark.parametrize("semantics", ["transit", "refresh_interval"])
def test_memory_of_heads_stays_bounded(semantics, unit):
    visible, current = Visibility(FixedDelay(semantics=semantics, unit=unit, value=10), seed=0), -1
    for head in range(1000):
        visible.see(head, float(head))
        current, _ = visible.target(float(head), current=current)

    # Ten versions are on their way at any instant, and one may be due.
    assert len(visible._seen) <= 11


def test_refresh_in_versions_saw_tooths():
    visible = Visibility(FixedDelay(semantics="refresh_interval", unit="versions", value=4), seed=0)
    lags, current = [], -1
    for head in range(12):
        visible.see(head, 0.0)
        current, _ = visible.target(0.0, current=current)
        lags.append(head - current)

    assert lags == [0, 1, 2, 3] * 3


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(0, 99))
def test_lognormal_transit_in_versions_never_goes_back_nor_beyond_its_bound(steps, seed):
    config = LognormalDelay(unit="versions", low=2, high=9)
    visible, head, current = Visibility(config, seed=seed), 0, -1
    for step in steps:
        head += step
        visible.see(head, 0.0)
        target, _ = visible.target(0.0, current=current)
        assert current <= target <= head
        assert head - target <= max_delay_versions(config) == 9
        current = target


def test_no_delay_is_the_head():
    visible = Visibility(NoDelay(), seed=0)
    visible.see(7, 0.0)

    assert visible.target(0.0, current=3) == (7, None)
    assert group_delay_s(NoDelay(), seed=0, sequence=1) == 0


def test_groups_are_held_in_transit_by_seconds_only():
    assert group_delay_s(FixedDelay(value=60, time_scale=2), seed=0, sequence=1) == 30
    assert group_delay_s(FixedDelay(value=60, unit="versions"), seed=0, sequence=1) == 0
    assert group_delay_s(FixedDelay(value=60, semantics="refresh_interval"), seed=0, sequence=1) == 0
    assert max_delay_versions(FixedDelay(value=60)) == max_delay_versions(NoDelay()) == 0
    assert max_delay_versions(FixedDelay(value=64, unit="versions")) == 64


@pytest.mark.parametrize(
    "table",
    [{"kind": "weibul"}, {"kind": "fixed"}, {"kind": "fixed", "value": -1}, {"kind": "lognormal", "low": 5, "high": 5}],
)
def test_impossible_delays_are_refused(table):
    with pytest.raises(ValidationError):
        TypeAdapter(DelayConfig).validate_python(table)


RANDOM = [
    UniformDelay(low=60, high=1920),
    LOGNORMAL,
    WeibullDelay(low=60, high=1920),
    ExponentialDelay(low=60, high=1920),
]


def test_weibull_interval_gives_the_references_parameters():
    assert WeibullDelay(low=60, high=1920).shape == pytest.approx(2.244991927, abs=1e-9)
    assert WeibullDelay(low=60, high=1920).scale == pytest.approx(864.888494, abs=1e-6)


@pytest.mark.parametrize("delay", RANDOM[1:], ids=lambda delay: delay.kind)
def test_the_interval_holds_all_but_a_quarter_percent_at_either_end(delay):
    assert delay.quantile(0.0025) == pytest.approx(60, rel=1e-12)
    assert delay.quantile(0.9975) == pytest.approx(1920, rel=1e-12)


@pytest.mark.parametrize("delay", RANDOM, ids=lambda delay: delay.kind)
def test_draws_follow_the_distribution(delay):
    values = sorted(draw(delay, seed=3, stream="version", index=index) for index in range(4000))

    for share in (0.1, 0.5, 0.9):
        # At an exact quantile the share of 4000 draws below it has a standard error of at most 0.0079.
        below = sum(value < delay.quantile(share) for value in values) / 4000
        assert below == pytest.approx(share, abs=5 * 0.0079)
    assert 60 <= values[0] <= values[-1] <= 1920


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"kind": "weibull", "low": 60}, "high"),
        ({"kind": "lognormal", "low": 0, "high": 5}, "low"),
        ({"kind": "lognormal", "low": 60, "high": 1920, "mu": 3.0}, "mu"),
        ({"kind": "uniform", "low": 5, "high": 5}, "low: 5 must be below high = 5"),
        ({"kind": "exponential", "low": -1, "high": 3}, "low"),
        ({"kind": "normal", "low": 1, "high": 2}, "weibull"),
    ],
)
def test_a_distribution_that_is_none_is_refused_with_its_key(table, message):
    with pytest.raises(ValidationError, match=message):
        TypeAdapter(DelayConfig).validate_python(table)
