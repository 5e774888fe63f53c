"""A run whose rewards teach nothing is told to its operator, once."""

import dataclasses
import logging

import pytest

from heterorl.common.process import metrics
from heterorl.learner.run.training_loop import NUM_STEPS, RewardSignal
from tests.support.learner_world import queued


def _flat(sequence, reward=0.0):
    entry = queued(sequence)
    rollouts = tuple(dataclasses.replace(rollout, reward=reward) for rollout in entry.group.rollouts)
    return dataclasses.replace(entry, group=dataclasses.replace(entry.group, rollouts=rollouts))


def _warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_operator_is_told_once_for_each_stretch_without_a_signal(caplog):
    signal = RewardSignal()

    for _ in range(NUM_STEPS - 1):
        signal.note([_flat(1), _flat(2, reward=1.0)])
    assert _warnings(caplog) == []
    for _ in range(NUM_STEPS):
        signal.note([_flat(1), _flat(2, reward=1.0)])

    (warning,) = _warnings(caplog)
    assert "NO GRADIENT FROM REWARDS" in warning
    assert "rewards were 0 to 1" in warning
    assert "4 of 4 completions were cut at max_new_tokens" in warning
    assert "use_chat_template" in warning
    assert metrics.STEPS_WITHOUT_SIGNAL._value.get() == 2 * NUM_STEPS - 1


def test_stretch_ends_with_a_signal_and_the_next_is_told_again(caplog):
    signal = RewardSignal()
    for _ in range(2):
        for _ in range(NUM_STEPS):
            signal.note([_flat(1)])
        signal.note([_flat(1), queued(2)])

    assert len(_warnings(caplog)) == 2
    assert metrics.STEPS_WITHOUT_SIGNAL._value.get() == 0


@pytest.mark.parametrize("num_steps", [1, NUM_STEPS - 1])
def test_few_steps_without_a_signal_are_nothing(caplog, num_steps):
    signal = RewardSignal()
    for _ in range(3):
        for _ in range(num_steps):
            signal.note([_flat(1)])
        signal.note([queued(2)])

    assert _warnings(caplog) == []
