"""A site's speed: tokens of the last minute, groups over minutes of work."""

import pytest

from heterorl.sampler.rollout.prefetch import GroupRate, TokenRate


def test_tokens_are_those_of_the_last_minute():
    rate = TokenRate()
    assert rate.per_s(0.0) == 0.0
    rate.begin(0.0)
    rate.add(100, 10.0)
    assert rate.per_s(10.0) == 10.0
    rate.add(500, 65.0)
    assert rate.per_s(69.0) == 10.0
    assert rate.per_s(71.0) == pytest.approx(500 / 60)
    assert rate.per_s(200.0) == 0.0


def test_groups_are_counted_over_work_and_a_pause_changes_nothing():
    rate = GroupRate()
    assert rate.per_s is None
    for second in range(1000):
        rate.work(True, float(second))
        rate.add(2, float(second))
    before = rate.per_s
    assert before == pytest.approx(2.0, rel=0.01)
    rate.work(False, 1000.0)
    rate.work(True, 9000.0)
    assert rate.per_s == pytest.approx(before, rel=0.01)


def test_newer_speed_wins_over_minutes():
    rate = GroupRate()
    for second in range(2000):
        rate.work(True, float(second))
        rate.add(10 if second < 1000 else 1, float(second))

    assert 1.0 < rate.per_s < 1.5
