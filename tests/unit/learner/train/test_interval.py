"""How many steps a version holds: the bandit's rule, by numbers computed by hand and on runs of known outcome."""

import math
import random

import pytest
from pydantic import TypeAdapter, ValidationError

from heterorl.learner.train.interval import (
    FixedInterval,
    FixedIntervalConfig,
    PublishIntervalConfig,
    UcbInterval,
    UcbIntervalConfig,
    largest,
    make_interval,
)


def test_a_fixed_interval_learns_nothing():
    interval = make_interval(FixedIntervalConfig(), steps_per_version=3)
    interval.note([1.0, 0.0, 0.5])

    assert interval == FixedInterval(3)
    assert largest(FixedIntervalConfig(), steps_per_version=3) == 3


def test_the_rule_by_hand():
    config = UcbIntervalConfig(intervals=(1, 2), trial_steps=2, price=0.1, exploration=1.0)
    interval = UcbInterval(config)
    assert interval.steps == 1
    interval.note([0.1])
    assert interval.steps == 1, "the trial has two steps"
    interval.note([0.3])
    # The first trial has none before it: it says where the reward starts, and 1 is still untried.
    assert interval.steps == 1
    interval.note([0.4])
    interval.note([0.4])
    # 0.4 - 0.2 less 0.1 x 2 / 2.
    assert interval._utilities == {1: [pytest.approx(0.1)], 2: []}
    assert interval.steps == 2, "each is tried before any is tried again"
    interval.note([0.3, 0.3])
    # 0.3 - 0.4 less 0.1 x 1 / 2, two trials: both widths are sqrt(2 ln 2), so the better mean is next.
    assert interval._utilities[2] == [pytest.approx(-0.15)]
    assert interval.steps == 1
    for reward in (0.3, 0.3):
        interval.note([reward])
    # Means 0.1 and -0.1 of two trials at 1 = 0.0; 2 has the wider bound: -0.15 + sqrt(2 ln 3) > 0 + sqrt(ln 3).
    assert interval._utilities[1][1] == pytest.approx(-0.1)
    assert -0.15 + math.sqrt(2 * math.log(3)) > math.sqrt(math.log(3))
    assert interval.steps == 2


def play(config, gain, *, trials, seed=0):
    """Intervals of each version, where a step at an interval raises the mean reward by gain(interval)."""
    interval, reward, chosen = UcbInterval(config), 0.0, []
    noise = random.Random(seed)
    while len(chosen) < trials:
        steps = interval.steps
        rewards = []
        for _ in range(steps):
            reward += gain(steps)
            rewards.append(reward + noise.gauss(0.0, 1e-4))
        chosen.append(steps)
        interval.note(rewards)
    return chosen


def test_what_costs_nothing_is_chosen_by_what_it_gains_and_what_gains_alike_by_what_it_costs():
    fresh = UcbIntervalConfig(intervals=(1, 4), trial_steps=8, price=0.0, exploration=0.003)
    dear = UcbIntervalConfig(intervals=(1, 4), trial_steps=8, price=0.05, exploration=0.003)

    chosen = play(fresh, lambda steps: 0.004 / steps, trials=400)[200:]
    assert sum(steps for steps in chosen if steps == 1) > 3 * sum(steps for steps in chosen if steps == 4)
    chosen = play(dear, lambda steps: 0.001, trials=400)[200:]
    assert sum(steps for steps in chosen if steps == 4) > 3 * sum(steps for steps in chosen if steps == 1)


def test_no_steps_are_no_version():
    interval = UcbInterval(UcbIntervalConfig(intervals=(1, 2), trial_steps=2))
    interval.note([])

    assert (interval.steps, interval._num_versions) == (1, 0)
    assert largest(interval.config, steps_per_version=1) == 2


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"kind": "ucb", "intervals": [2]}, "intervals"),
        ({"kind": "ucb", "intervals": [1, 1]}, "different"),
        ({"kind": "ucb", "intervals": [0, 1]}, "at least 1"),
        ({"kind": "ucb", "intervals": [1, 8], "trial_steps": 4}, "trial_steps is below"),
        ({"kind": "cmdp"}, "ucb"),
    ],
)
def test_intervals_that_are_none_are_refused(table, message):
    with pytest.raises(ValidationError, match=message):
        TypeAdapter(PublishIntervalConfig).validate_python(table)
