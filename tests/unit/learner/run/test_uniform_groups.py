"""Which groups are replaced; pure."""

import dataclasses

from heterorl.learner.run.training_loop import split_uniform
from tests.support.learner_world import queued


def with_rewards(sequence, *rewards):
    entry = queued(sequence)
    rollouts = tuple(
        dataclasses.replace(rollout, reward=reward)
        for rollout, reward in zip(entry.group.rollouts, rewards, strict=True)
    )
    return dataclasses.replace(entry, group=dataclasses.replace(entry.group, rollouts=rollouts))


def test_groups_of_equal_rewards_are_replaced_in_their_order_up_to_the_room():
    solved, mixed, failed = with_rewards(1, 1.0, 1.0), with_rewards(2, 1.0, 0.0), with_rewards(3, 0.0, 0.0)

    assert split_uniform([solved, mixed, failed], room=2) == ([mixed], [solved, failed])
    assert split_uniform([solved, mixed, failed], room=1) == ([mixed, failed], [solved])
    assert split_uniform([solved, mixed, failed], room=0) == ([solved, mixed, failed], [])


def test_a_difference_however_small_is_signal():
    group = with_rewards(1, 1.0, 1.0 - 1e-12)

    assert split_uniform([group], room=1) == ([group], [])
