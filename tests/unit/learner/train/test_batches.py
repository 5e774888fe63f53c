"""From groups to micro-batches."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from heterorl.common.errors import ConfigError
from heterorl.common.types.rollout import Span
from heterorl.learner.loss.loss_config import (
    BnpoConfig,
    DapoConfig,
    DecoupledPpoConfig,
    GepoConfig,
    GrpoConfig,
    GspoConfig,
)
from heterorl.learner.train.batch import TrainingSequence, build_batch, collate, split
from tests.support.training import group, random_groups, rollout


def _sequence(num_prompt, num_tokens):
    scored = TrainingSequence.scored(
        np.arange(10, 10 + num_prompt, dtype=np.int32), np.arange(20, 20 + num_tokens, dtype=np.int32)
    )
    logprobs = np.full(num_tokens, -0.5, np.float32)
    return dataclasses.replace(scored, sampler_logprobs=logprobs, advantage=0.5, log_denominator=-0.25)


def test_batch_gives_all_members_their_groups_denominator():
    # q = (e^-.5, e^-1): E = (e^-1 + e^-2) / (e^-.5 + e^-1)
    value = group([rollout([5, 6], [-0.25, -0.75], 1.0), rollout([7], [-1.0], 0.0)])

    batch = build_batch([value], loss=GepoConfig())

    expected = np.log((np.exp(-1) + np.exp(-2)) / (np.exp(-0.5) + np.exp(-1)))
    assert [sequence.log_denominator for sequence in batch.sequences] == pytest.approx([expected] * 2, abs=1e-12)
    assert [sequence.advantage for sequence in batch.sequences] == [0.5, -0.5]
    assert (batch.num_sequences, batch.num_tokens) == (2, 3)


def test_batch_gives_gspo_each_members_own_denominator():
    value = group([rollout([5, 6], [-0.25, -0.75], 1.0), rollout([7], [-1.0], 0.0)])

    batch = build_batch([value], loss=GspoConfig())

    assert [sequence.log_denominator for sequence in batch.sequences] == [-0.5, -1.0]


def test_batch_does_not_mix_groups():
    groups = [queued.group for queued in random_groups(2, seed=4)]

    together = build_batch(groups, loss=GepoConfig()).sequences
    apart = build_batch(groups[:1], loss=GepoConfig()).sequences + build_batch(groups[1:], loss=GepoConfig()).sequences

    assert [s.log_denominator for s in together] == [s.log_denominator for s in apart]
    assert [s.advantage for s in together] == [s.advantage for s in apart]


def test_batch_refuses_an_empty_prompt():
    with pytest.raises(ValueError, match="prompt is empty"):
        build_batch([group([rollout([5], [-1.0], 1.0)], prompt=[])], loss=GepoConfig())


def test_batch_leaves_a_rollout_without_drawn_tokens_out():
    """Counted as q = 1 it would move its group's denominator."""
    whole = [rollout([5], [-1.0], 1.0), rollout([6], [-2.0], 0.0)]
    (first, second) = build_batch([group([*whole, rollout([], [], 1.0)])], loss=GepoConfig()).sequences
    (alone, other) = build_batch([group(whole)], loss=GepoConfig()).sequences

    assert (first.log_denominator, first.advantage) == (alone.log_denominator, alone.advantage)
    assert (second.log_denominator, second.advantage) == (other.log_denominator, other.advantage)


def test_batch_refuses_a_token_without_logprob():
    with pytest.raises(ValueError, match="differ in number"):
        build_batch([group([rollout([5, 6], [-1.0], 1.0)])], loss=GepoConfig())


@pytest.mark.parametrize("batching", ["padded", "packed"])
@given(
    shapes=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=30),
    max_tokens=st.integers(1, 60),
)
def test_split_keeps_every_sequence_once_and_the_budget(batching, shapes, max_tokens):
    sequences = [_sequence(*shape) for shape in shapes]

    parts = split(sequences, max_tokens=max_tokens, batching=batching)

    assert sorted(map(id, sequences)) == sorted(id(sequence) for part in parts for sequence in part)
    for part in parts:
        used = collate(part, batching=batching).input_ids_RS.numel()
        assert used <= max_tokens or len(part) == 1


def test_split_of_nothing_is_nothing():
    assert split([], max_tokens=8, batching="padded") == []


def test_padded_layout_points_at_the_predictor_of_each_token():
    micro_batch = collate([_sequence(2, 3), _sequence(1, 2)], batching="padded")

    # Inputs end before the last token: [10 11 20 21] and [10 20 . .]
    assert micro_batch.input_ids_RS.tolist() == [[10, 11, 20, 21], [10, 20, 0, 0]]
    assert micro_batch.position_ids_RS.tolist() == [[0, 1, 2, 3]] * 2
    assert micro_batch.sources_N.tolist() == [1, 2, 3, 4, 5]
    assert micro_batch.targets_N.tolist() == [20, 21, 22, 20, 21]
    assert micro_batch.loss_inputs.mask_BT.tolist() == [[True, True, True], [True, True, False]]


def test_packed_layout_starts_positions_again_with_each_sequence():
    micro_batch = collate([_sequence(2, 3), _sequence(1, 2)], batching="packed")

    assert micro_batch.input_ids_RS.tolist() == [[10, 11, 20, 21, 10, 20]]
    assert micro_batch.position_ids_RS.tolist() == [[0, 1, 2, 3, 0, 1]]
    assert micro_batch.sources_N.tolist() == [1, 2, 3, 4, 5]
    assert micro_batch.targets_N.tolist() == [20, 21, 22, 20, 21]


@pytest.mark.parametrize("batching", ["padded", "packed"])
def test_collate_keeps_numbers_with_their_sequence(batching):
    one, other = _sequence(2, 3), dataclasses.replace(_sequence(1, 2), advantage=-2.0, log_denominator=-3.0)

    micro_batch = collate([one, other], batching=batching)

    assert micro_batch.loss_inputs.advantages_B.tolist() == [0.5, -2.0]
    assert micro_batch.loss_inputs.log_denominators_B.tolist() == [-0.25, -3.0]
    assert micro_batch.loss_inputs.sampler_BT.tolist() == [[-0.5] * 3, [-0.5, -0.5, 0.0]]
    assert micro_batch.loss_inputs.sampler_BT.dtype == torch.float64


def _group_of(rewards, *, prompt=(1, 2), sequence=1):
    return group([rollout([5], [-1.0], reward) for reward in rewards], prompt=prompt, sequence=sequence)


def test_uniform_groups_leave_the_step_only_if_asked_for():
    groups = [_group_of([1.0, 0.0]), _group_of([1.0, 1.0], sequence=2)]

    assert build_batch(groups, loss=DapoConfig()).num_sequences == 4
    assert build_batch(groups, loss=DapoConfig(drop_uniform_groups=True)).num_sequences == 2


def test_bnpo_divides_by_the_density_of_the_steps_prompts():
    # Means .25, .5, .625, .875 have the golden weights .9725, .8069, .8072, 1.0426.
    rewards = [[0.5, 0.0], [1.0, 0.0], [1.0, 0.25], [1.0, 0.75]]
    groups = [_group_of(values, prompt=[number + 1]) for number, values in enumerate(rewards)]

    advantages = [sequence.advantage for sequence in build_batch(groups, loss=BnpoConfig()).sequences]

    weights = [0.9724993064, 0.8069381251, 0.8071809894, 1.0425625029]
    expected = [sign * w * (v[0] - v[1]) / 2 for w, v in zip(weights, rewards, strict=True) for sign in (1, -1)]
    assert advantages == pytest.approx(expected, abs=1e-9)


def test_bnpo_fits_the_density_without_the_groups_that_the_loss_drops():
    groups = [_group_of([1.0, 0.0, 0.0, 0.0], prompt=[1]), _group_of([1.0, 1.0, 0.0, 0.0], prompt=[2])]
    dropped = _group_of([1.0, 1.0, 1.0, 1.0], prompt=[3])
    loss = BnpoConfig(drop_uniform_groups=True)

    found = [
        [(sequence.group, sequence.advantage) for sequence in build_batch(step, loss=loss).sequences]
        for step in ([*groups, dropped], groups)
    ]

    assert found[0] == found[1]


def test_bnpo_counts_a_prompt_once_however_many_groups_it_has():
    once = [_group_of([0.5, 0.0], prompt=[1]), _group_of([1.0, 0.0], prompt=[2]), _group_of([1.0, 0.75], prompt=[3])]
    twice = [*once, _group_of([0.5, 0.0], prompt=[1], sequence=9)]

    first = [sequence.advantage for sequence in build_batch(once, loss=BnpoConfig()).sequences]
    second = [sequence.advantage for sequence in build_batch(twice, loss=BnpoConfig()).sequences]

    assert second == pytest.approx([*first, *first[:2]], abs=1e-12)


def test_bnpo_refuses_rewards_outside_the_unit_interval():
    with pytest.raises(ConfigError, match=r"rewards in \[0, 1\]"):
        build_batch([_group_of([2.0, 3.0])], loss=BnpoConfig())


def test_staleness_of_a_token_is_that_of_its_own_version():
    member = rollout([5, 6, 7], [-1.0] * 3, 1.0)
    spans = (Span(version=3, start=0, end=1), Span(version=8, start=1, end=3))
    mixed = group([dataclasses.replace(member, spans=spans), rollout([5], [-1.0], 0.0, version=12)])

    batch = build_batch([mixed], loss=DecoupledPpoConfig(proximal="loglinear"), head_version=10)

    assert [sequence.staleness.tolist() for sequence in batch.sequences] == [[7, 2, 2], [0]]
    assert collate(batch.sequences, batching="padded").loss_inputs.staleness_BT.tolist() == [[7, 2, 2], [0, 0, 0]]


@pytest.mark.parametrize("loss", [GepoConfig(), GspoConfig(), GrpoConfig(), DecoupledPpoConfig()])
def test_rollout_over_versions_is_weighed_by_its_recorded_log_probs(loss):
    """The policy that sampled is what its log-probs say, token by token, whatever versions they are of."""
    spans = (Span(version=3, start=0, end=1), Span(version=8, start=1, end=3))
    members = [rollout([5, 6, 7], [-0.5, -2.0, -1.0], 1.0), rollout([5, 1], [-1.5, -0.1], 0.0)]
    mixed = [dataclasses.replace(members[0], spans=spans), members[1]]

    plain = build_batch([group(members)], loss=loss, head_version=10).sequences
    spanning = build_batch([group(mixed)], loss=loss, head_version=10).sequences

    assert [sequence.sampler_logprobs.tolist() for sequence in spanning] == [
        [-0.5, -2.0, -1.0],
        pytest.approx([-1.5, -0.1]),
    ]
    assert [sequence.log_denominator for sequence in spanning] == [sequence.log_denominator for sequence in plain]
    assert [sequence.advantage for sequence in spanning] == [sequence.advantage for sequence in plain]
    assert all(sequence.staleness is None for sequence in spanning)
