"""Losses over rollouts of several turns: drawn tokens alone count, each once, however the history is cut."""

import dataclasses
import functools
import itertools

import numpy as np
import pytest
import torch

from heterorl.common.types.rollout import GIVEN, FinishReason, QueuedGroup, Rollout, Span, without_stale
from heterorl.learner.backends.ranks.passes import alone
from heterorl.learner.loss.loss_config import CustomLossConfig, GepoConfig, TisConfig
from heterorl.learner.loss.loss_spec import loss_spec_of
from heterorl.learner.train.batch import build_batch, collate
from heterorl.learner.train.step import micro_batch_loss
from heterorl.learner.train.step_report import completion_numbers, wanted_log_ratios
from tests.support.losses import CATALOGUE
from tests.support.training import group, random_trajectories, tiny_model

TEMPERATURE = 0.9


def _rollout(pieces, reward, *, versions=(1, 2)):
    """Of pieces (ids, log-probs or None for given ones, keeps)."""
    ids, logprobs, spans = [], [], []
    for number, (tokens, drawn, keeps) in enumerate(pieces):
        version = GIVEN if drawn is None else versions[min(number, 1)]
        spans.append(Span(version=version, start=len(ids), end=len(ids) + len(tokens), keeps=keeps))
        ids += tokens
        logprobs += drawn or []
    return Rollout(
        token_ids=np.array(ids, np.int32), sampler_logprobs=np.array(logprobs, np.float32), spans=tuple(spans),
        reward=reward, reward_parts=(), finish_reason=FinishReason.LENGTH,
    )  # fmt: skip


@functools.cache
def _groups(seed=0, *, sequences="one"):
    return tuple(_near_policy(each.group) for each in random_trajectories(2, seed=seed, sequences=sequences))


MODEL = tiny_model(dtype=torch.float64)
REFERENCE = tiny_model(seed=5, dtype=torch.float64)


def _pieces(value, member):
    """The token lists that the model reads, with the positions of drawn tokens; written out span by span."""
    rows, context, marks = [], value.prompt_token_ids.tolist(), [False] * value.prompt_token_ids.size
    for span in member.spans:
        if span.keeps is not None:
            rows.append((context, marks))
            context, marks = context[: span.keeps], [False] * span.keeps
        context = context + member.token_ids[span.start : span.end].tolist()
        marks = marks + [span.version >= 0] * (span.end - span.start)
    return [*rows, (context, marks)]


def _logprobs(value, member):
    """Log-probs of drawn tokens with gradient, one whole pass for each sequence."""
    found = []
    for ids, marks in _pieces(value, member):
        row = torch.tensor(ids)
        table = torch.log_softmax(MODEL(row[None]).logits[0] / TEMPERATURE, -1)
        found += [table[at - 1, ids[at]] for at, is_drawn in enumerate(marks) if is_drawn]
    return torch.stack(found)


def _near_policy(value):
    rng = np.random.default_rng(1)
    members = []
    for member in value.rollouts:
        with torch.no_grad():
            own = _logprobs(value, member).numpy()
        noisy = np.minimum(own + 0.2 * rng.standard_normal(own.size), -1e-3).astype(np.float32)
        members.append(dataclasses.replace(member, sampler_logprobs=noisy))
    return dataclasses.replace(value, rollouts=tuple(members))


def _gradients(groups, loss, *, micro_batch_tokens=9999, batching="padded"):
    MODEL.zero_grad(set_to_none=True)
    passes = alone(
        MODEL, loss=loss, temperature=TEMPERATURE, max_new_tokens=16, micro_batch_tokens=micro_batch_tokens,
        batching=batching, reference=REFERENCE,
    )  # fmt: skip
    samples = passes.accumulate(build_batch(groups, loss=loss, head_version=7))
    assert (len(samples) > 1) == (micro_batch_tokens < 9999)
    return sum(sample.loss for sample in samples), {name: p.grad.clone() for name, p in MODEL.named_parameters()}


def _assert_same(one, other):
    assert other[0] == pytest.approx(one[0], abs=1e-12)
    for name, gradient in one[1].items():
        torch.testing.assert_close(other[1][name], gradient, rtol=0, atol=1e-12)
    assert max(gradient.abs().max() for gradient in one[1].values()) > 1e-9


@pytest.mark.parametrize("name", CATALOGUE)
def test_gradient_of_every_loss_does_not_depend_on_the_layout(name):
    groups = _groups(3, sequences="mixed")

    whole = _gradients(groups, CATALOGUE[name])

    for batching, micro_batch_tokens in (("padded", 60), ("packed", 75)):
        _assert_same(
            whole, _gradients(groups, CATALOGUE[name], micro_batch_tokens=micro_batch_tokens, batching=batching)
        )


# Of each way in which a loss reads more than one rollout's tokens: a group, a step, turns, ages, a plan before the step.
COUPLED = [
    "gepo",
    "grpo",
    "impala",
    "mois",
    "eqp",
    "gepo_whole",
    "gepo with m2po",
    "dapo dropping",
    "custom of the step",
]


@pytest.mark.parametrize("name", COUPLED)
def test_history_that_is_cut_where_it_is_has_the_gradient_of_the_uncut_one(name):
    one, cut = _groups(4), _groups(4, sequences="cut")
    assert [member.spans for member in one[0].rollouts] != [member.spans for member in cut[0].rollouts]

    _assert_same(_gradients(one, CATALOGUE[name]), _gradients(cut, CATALOGUE[name], batching="packed"))


@pytest.mark.parametrize("sequences", ["one", "cut", "new"])
def test_loss_is_that_of_trajectories_written_out(sequences):
    groups = _groups(5, sequences=sequences)
    total = 0.0
    for value in groups:
        means = np.array([member.sampler_logprobs.astype(np.float64).mean() for member in value.rollouts])
        expectation = (np.exp(means) ** 2).sum() / np.exp(means).sum()
        rewards = np.array([member.reward for member in value.rollouts])
        for member, reward in zip(value.rollouts, rewards, strict=True):
            weight = torch.exp(_logprobs(value, member).mean()) / expectation
            total = total - weight * (reward - rewards.mean()) / sum(len(one.rollouts) for one in groups)
    MODEL.zero_grad(set_to_none=True)
    total.backward()
    expected = float(total.detach()), {name: p.grad.clone() for name, p in MODEL.named_parameters()}

    _assert_same(expected, _gradients(groups, GepoConfig(clip="none", sampler_kl=0.0)))


BY_TURN = CustomLossConfig(function="tests.support.custom_losses:by_turn")


def test_turns_of_a_custom_loss_end_at_given_tokens_and_new_sequences_but_not_at_new_weights():
    pieces = [
        ([1, 2], [-0.1, -0.2], None), ([3], [-0.3], None), ([4, 5], None, None), ([6, 7], [-0.4, -0.5], None),
        ([8], [-0.6], 2),
    ]  # fmt: skip
    value = group([_rollout(pieces, 1.0), _rollout([([5], [-1.0], None)], 0.0)])
    batch = build_batch([value], loss=BY_TURN, head_version=7)

    inputs = collate(batch.sequences, batching="padded").loss_inputs
    assert inputs.turns_BT.tolist() == [[0, 0, 0, 1, 1, 2], [0] * 6]
    assert collate(build_batch([value], loss=GepoConfig()).sequences, batching="padded").loss_inputs.turns_BT is None


@pytest.mark.parametrize("sequences", ["one", "cut", "mixed"])
def test_loss_by_turns_does_not_depend_on_the_layout(sequences):
    groups = _groups(3, sequences=sequences)
    whole = _gradients(groups, BY_TURN)

    for batching, micro_batch_tokens in (("padded", 60), ("packed", 75)):
        _assert_same(whole, _gradients(groups, BY_TURN, micro_batch_tokens=micro_batch_tokens, batching=batching))


def _aged_group():
    """Rollouts whose first tokens version 1 drew and whose later ones version 2 did; the last one is of version 1."""
    members = [
        _rollout([([4, 5, 6], [-1.0, -2.0, -1.5], None), ([7, 8], [-0.5, -1.0], None)], 1.0),
        _rollout(
            [([9], [-0.7], None), ([3, 2], None, None), ([6, 5, 4], [-2.0, -0.1, -1.1], None)], 0.0, versions=(1, 2)
        ),
        _rollout([([5, 5], [-1.2, -0.4], None)], 0.0, versions=(2, 2)),
        _rollout([([8, 9], [-1.3, -0.8], None)], 1.0),
    ]
    return group(members, version=1)


def test_loss_of_what_is_left_of_stale_rollouts_is_that_of_fresh_tokens_written_out():
    """Stale tokens are read; lengths, the denominator, means over the group are of what is left."""
    value, total = _aged_group(), 0.0
    is_fresh = [[2 if span.version == 2 else 0 for span in one.spans for _ in range(span.end - span.start)
                 if span.is_drawn] for one in value.rollouts]  # fmt: skip
    left = [(one, torch.tensor(marks) > 0) for one, marks in zip(value.rollouts, is_fresh, strict=True) if any(marks)]
    assert len(left) == 3
    means = np.array([one.sampler_logprobs.astype(np.float64)[kept.numpy()].mean() for one, kept in left])
    expectation = (np.exp(means) ** 2).sum() / np.exp(means).sum()
    rewards = np.array([one.reward for one, _ in left])
    for (one, kept), reward in zip(left, rewards, strict=True):
        weight = torch.exp(_logprobs(value, one)[kept].mean()) / expectation
        total = total - weight * (reward - rewards.mean()) / len(left)
    MODEL.zero_grad(set_to_none=True)
    total.backward()
    expected = float(total.detach()), {name: p.grad.clone() for name, p in MODEL.named_parameters()}

    loss = GepoConfig(clip="none", sampler_kl=0.0)
    for batching in ("padded", "packed"):
        _assert_same(expected, _gradients([without_stale(value, oldest=2)], loss, batching=batching))


def test_group_within_the_bound_is_the_same_object():
    for value in _groups(7):
        assert without_stale(value, oldest=value.oldest_version) is value


def test_what_is_left_of_a_stale_group_counts_its_age_from_the_oldest_token_left():
    masked = without_stale(_aged_group(), oldest=2)

    assert masked.oldest_version == 2
    assert [one.num_drawn for one in masked.rollouts] == [2, 3, 2, 0]
    assert [one.is_trainable for one in masked.rollouts] == [True, True, True, False]
    assert [[span.version for span in one.spans] for one in masked.rollouts] == [
        [GIVEN, 2], [GIVEN, GIVEN, 2], [2], [GIVEN],
    ]  # fmt: skip
    assert without_stale(_aged_group(), oldest=3).trainable == ()


def test_turns_keep_their_numbers_when_stale_ones_become_context():
    pieces = [([4, 5], [-1.0, -2.0], None), ([3], None, None), ([7, 8], [-0.5, -1.0], None)]
    half = [([4], [-1.0], None), ([5, 6], [-2.0, -0.1], None), ([3], None, None), ([7], [-0.5], None)]
    value = group([_rollout(pieces, 1.0), _rollout(half, 0.0)], version=1)

    for oldest, turns in ((1, [[0, 0, 1, 1], [0, 0, 0, 1]]), (2, [[1, 1, 0], [0, 0, 1]])):
        masked = without_stale(value, oldest=oldest)
        inputs = collate(build_batch([masked], loss=BY_TURN).sequences, batching="padded").loss_inputs
        assert inputs.turns_BT.tolist() == turns
        numbers = completion_numbers([masked])
        assert (numbers.turns_mean, numbers.turns_max, numbers.given_mean) == (2.0, 2, 1.0)


@pytest.mark.parametrize("batching", ["padded", "packed"])
def test_recorded_experts_of_a_stale_end_are_left_out(batching):
    """A site may state an older version behind a newer one; the record is of all tokens."""
    pieces = [([4, 5], [-1.0, -2.0], None), ([7, 8, 9], [-0.5, -1.0, -0.2], None)]
    member = _rollout(pieces, 1.0, versions=(2, 1))
    value = group([member, _rollout([([6], [-0.3], None)], 0.0, versions=(2, 2))], version=1)
    num_read = value.prompt_token_ids.size + 4
    record = bytes(range(2 * num_read))
    value = dataclasses.replace(value, rollouts=(dataclasses.replace(member, routed_experts=record), value.rollouts[1]))

    batch = build_batch([without_stale(value, oldest=2)], loss=GepoConfig())
    routed = collate(batch.sequences[:1], batching=batching).routed

    assert routed.is_recorded_N.tolist() == [True] * (num_read - 3)
    assert routed.ids_NC.tolist() == [[2 * place, 2 * place + 1] for place in range(num_read - 3)]
    assert build_batch([value], loss=GepoConfig()).sequences[0].routed_experts == record
    assert collate(batch.sequences, batching=batching).routed.is_recorded_N.sum() == num_read - 3


@pytest.mark.parametrize("name", CATALOGUE)
def test_lost_members_and_trailing_given_tokens_change_nothing(name):
    groups = _groups(6)
    more = []
    for value in groups:
        last = value.rollouts[0]
        tail = Span(version=GIVEN, start=last.token_ids.size, end=last.token_ids.size + 5)
        longer = dataclasses.replace(
            last, token_ids=np.concatenate([last.token_ids, np.full(5, 9, np.int32)]), spans=(*last.spans, tail)
        )
        lost = dataclasses.replace(value.rollouts[1], finish_reason=FinishReason.TOOL_LOST, reward=77.0)
        empty = dataclasses.replace(
            lost, token_ids=lost.token_ids[:0], sampler_logprobs=lost.sampler_logprobs[:0], spans=()
        )
        more.append(dataclasses.replace(value, rollouts=(empty, longer, *value.rollouts[1:], lost)))

    _assert_same(_gradients(groups, CATALOGUE[name]), _gradients(more, CATALOGUE[name]))
    batch = build_batch(more, loss=CATALOGUE[name], head_version=7)
    assert {sequence.number for sequence in batch.sequences} <= {1, 2, 3}


@pytest.mark.parametrize("batching", ["padded", "packed"])
@pytest.mark.parametrize("sequences", ["one", "new"])
def test_ratios_for_people_are_those_of_each_drawn_token_in_its_order(sequences, batching):
    lost = Rollout(
        token_ids=np.zeros(0, np.int32), sampler_logprobs=np.zeros(0, np.float32), spans=(), reward=0.0,
        reward_parts=(), finish_reason=FinishReason.TOOL_LOST,
    )  # fmt: skip
    groups = [dataclasses.replace(value, rollouts=(lost, *value.rollouts)) for value in _groups(7, sequences=sequences)]
    loss = GepoConfig()
    passes = alone(
        MODEL, loss=loss, temperature=TEMPERATURE, max_new_tokens=16, micro_batch_tokens=45, batching=batching
    )
    samples = passes.accumulate(build_batch(groups, loss=loss, head_version=7))
    queued = [
        QueuedGroup(group=value, policy_age_s=0.0, queue_age_s=0.0, wants_note=bool(number))
        for number, value in enumerate(groups)
    ]

    found = wanted_log_ratios(samples, queued)

    # Of the second group, and of no lost member.
    assert set(found) == {(1, 1), (1, 2), (1, 3)}
    for (_, place), ratios in found.items():
        member = groups[1].rollouts[place]
        with torch.no_grad():
            want = _logprobs(groups[1], member).numpy() - member.sampler_logprobs
        np.testing.assert_allclose(ratios, want, atol=1e-5)


class _World:
    """Two turns of three actions, with an observation that the first action makes; a policy is a table by context."""

    def __init__(self, seed):
        rng = torch.Generator().manual_seed(seed)
        self.first = torch.randn(3, generator=rng, dtype=torch.float64).requires_grad_()
        self.second = torch.randn(3, 3, generator=rng, dtype=torch.float64).requires_grad_()
        self.rewards = torch.randn(3, 3, generator=rng, dtype=torch.float64)

    def logprobs(self, one, two):
        return torch.stack([torch.log_softmax(self.first, 0)[one], torch.log_softmax(self.second[one], 0)[two]])

    def gradient(self, value):
        found = torch.autograd.grad(value, [self.first, self.second])
        return torch.cat([part.reshape(-1) for part in found])


def test_own_probability_weights_give_the_exact_policy_gradient_of_a_world_of_two_turns():
    world = _World(3)
    paths = list(itertools.product(range(3), repeat=2))
    returns = sum(world.logprobs(*path).sum().exp() * world.rewards[path] for path in paths)
    expected = world.gradient(returns)
    # Under a uniform sampler one group of all nine paths is the expectation itself.
    uniform = [float(np.log(1 / 3))]
    members = [
        _rollout([([one], uniform, None), ([3 + one % 2], None, None), ([two], uniform, None)],
                 float(world.rewards[one, two]))
        for one, two in paths
    ]  # fmt: skip
    gradients = {}
    for name, loss in {
        "own": TisConfig(level="sequence", cap=1e9, aggregation="sequence_sum", sampler_kl=0.0),
        "gepo": GepoConfig(clip="none", sampler_kl=0.0),
    }.items():
        batch = build_batch([group(members, prompt=[5])], loss=loss)
        micro_batch = collate(batch.sequences, batching="padded")
        logprobs_N = torch.cat([world.logprobs(*path) for path in paths])
        total, _ = micro_batch_loss(
            loss_spec_of(loss), micro_batch, logprobs_N, torch.zeros(18), batch, max_new_tokens=4
        )
        gradients[name] = -world.gradient(total)

    # A reward travels as float64, a log-prob as float32.
    torch.testing.assert_close(gradients["own"], expected, rtol=0, atol=1e-6)
    # GEPO's weight is no ratio of probabilities: another length and a direction nearby.
    assert not torch.allclose(gradients["gepo"], expected, atol=1e-3)
    assert torch.cosine_similarity(gradients["gepo"], expected, 0) > 0.7
