"""GSPO by turns."""

import dataclasses
import math

import pytest
import torch

from heterorl.common.types.rollout import turns_of
from heterorl.learner.loss.loss_config import GspoConfig
from heterorl.learner.train.batch import build_batch
from heterorl_research.losses.kinds import TurnGspoConfig
from research.tests.support.every_loss import LOSSES
from research.tests.support.loss_checks import assert_acts, assert_equals_loops
from tests.support.loss_reference import advantage, ppo
from tests.support.losses import run_loss
from tests.support.training import random_trajectories

LOSS = LOSSES["turn_gspo"]


def by_hand(reference, i):
    """Cases of one turn: GSPO's clipped ratio."""
    a = advantage(reference.case, i, "mean_std")
    return [ppo(reference.p(i) / reference.q(i), a, 0.95, 1.05)] * len(reference.lp[i])


def trajectories(seed):
    groups = [each.group for each in random_trajectories(3, seed=seed)]
    noise = torch.Generator().manual_seed(seed)
    learner = [
        (torch.from_numpy(member.sampler_logprobs).double() + 0.15 * torch.randn(member.num_drawn, generator=noise))
        .clamp(max=0.0)
        .tolist()
        for value in groups
        for member in value.rollouts
    ]
    return groups, learner


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_loss_of_trajectories_equals_loops_over_turns(seed):
    groups, learner = trajectories(seed)
    batch = build_batch(groups, loss=LOSS)
    members = [member for value in groups for member in value.rollouts]
    assert {len(turns_of(member)) for member in members} == {3}
    expected, num_clipped = 0.0, 0
    for sequence, member, row in zip(batch.sequences, members, learner, strict=True):
        place, values = 0, []
        for start, end in turns_of(member):
            own = slice(place, place + end - start)
            place = own.stop
            gaps = [p - float(q) for p, q in zip(row[own], member.sampler_logprobs[own], strict=True)]
            ratio = math.exp(sum(gaps) / len(gaps))
            a = sequence.advantage
            value = ppo(ratio, a, 0.95, 1.05)
            num_clipped += value != ratio * a
            values += [value] * len(gaps)
        expected -= sum(values) / len(values) / len(members)

    assert 0 < num_clipped < 3 * len(members)
    assert run_loss(LOSS, learner, groups).value == pytest.approx(expected, abs=1e-12)


def test_a_clipped_turn_gets_no_gradient_and_its_siblings_do():
    groups, learner = trajectories(1)
    batch = build_batch(groups, loss=LOSS)
    row = next(number for number, one in enumerate(batch.sequences) if one.advantage > 0)
    member = groups[row // 3].rollouts[row % 3]
    lengths = [end - start for start, end in turns_of(member)]
    quiet = member.sampler_logprobs.tolist()
    learner[row] = [min(value + 0.9, -0.01) if at < lengths[0] else value for at, value in enumerate(quiet)]

    gradient = run_loss(LOSS, learner, groups).gradients[row]
    assert not gradient[: lengths[0]].any()
    assert gradient[lengths[0] :].all()


def test_gradient_equals_central_differences():
    groups, learner = trajectories(4)
    outcome = run_loss(LOSS, learner, groups)
    step = 1e-6
    for row in (0, 4):
        for at in range(len(learner[row])):
            sides = []
            for sign in (1, -1):
                moved = [list(one) for one in learner]
                moved[row][at] += sign * step
                sides.append(run_loss(LOSS, moved, groups).value)
            assert outcome.gradients[row][at].item() == pytest.approx((sides[0] - sides[1]) / 2 / step, abs=1e-7)


def test_one_turn_is_gspo():
    groups, learner = trajectories(2)
    whole = [
        dataclasses.replace(
            value,
            rollouts=tuple(
                dataclasses.replace(
                    member,
                    token_ids=member.token_ids[: member.num_drawn],
                    spans=(dataclasses.replace(member.spans[0], end=member.num_drawn),),
                )
                for member in value.rollouts
            ),
        )
        for value in groups
    ]
    same = {"eps_low": 0.05, "eps_high": 0.05}
    one, other = run_loss(GspoConfig(**same), learner, whole), run_loss(LOSS, learner, whole)

    assert other.value == pytest.approx(one.value, abs=1e-14)
    for left, right in zip(one.gradients, other.gradients, strict=True):
        torch.testing.assert_close(right, left, rtol=0, atol=1e-14)
    assert run_loss(TurnGspoConfig(**same).learner_loss(), learner, groups).value != pytest.approx(one.value, abs=1e-6)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_cases_of_one_turn_equal_loops(seed):
    assert_acts(LOSS)
    assert_equals_loops(LOSS, by_hand, seed=seed)
