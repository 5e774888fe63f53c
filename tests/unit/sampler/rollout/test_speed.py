"""A site's speed: an exponential mean over work."""

import pytest

from heterorl.sampler.rollout.prefetch import GROUPS_S, TOKENS_S, Rate


def test_units_are_counted_over_work_and_a_pause_changes_nothing():
    rate = Rate(GROUPS_S)
    assert rate.per_s(0.0) == 0.0
    for second in range(1000):
        rate.work(True, float(second))
        rate.add(2, float(second))
    before = rate.per_s(1000.0)
    assert before == pytest.approx(2.0, rel=0.01)
    rate.work(False, 1000.0)
    rate.work(True, 9000.0)
    assert rate.per_s(9000.0) == pytest.approx(before, rel=0.01)


def test_newer_speed_wins_over_minutes():
    rate = Rate(GROUPS_S)
    for second in range(2000):
        rate.work(True, float(second))
        rate.add(10 if second < 1000 else 1, float(second))

    assert 1.0 < rate.per_s(2000.0) < 1.5


def test_tokens_of_a_first_minute_count_from_its_begin_and_fade_in_minutes():
    rate = Rate(TOKENS_S)
    rate.work(True, 0.0)
    rate.add(600, 20.0)
    assert rate.per_s(20.0) == pytest.approx(30.0, rel=0.2)
    assert rate.per_s(600.0) < 0.01
