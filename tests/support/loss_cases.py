"""Rollouts for comparing a loss with one that is written with loops, and the comparison itself."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from heterorl.common.types.rollout import Group
from heterorl.learner.loss.loss_config import LossConfig
from tests.support.loss_reference import Case, Rows
from tests.support.losses import groups_of, run_loss

HEAD = 9


def case_of(seed: int) -> tuple[Case, list[list[float]]]:
    """Ten rollouts of three groups of different ages, the last of equal rewards, and a learner near their sampler."""
    rng = random.Random(seed)
    group = [0, 0, 0, 0, 1, 1, 1, 2, 2, 2]
    sampler = [[-2.0 * rng.random() - 0.01 for _ in range(rng.randint(1, 6))] for _ in group]
    learner = [[min(x + 0.35 * rng.gauss(0, 1), -1e-4) for x in row] for row in sampler]
    rewards = [1.0, 0.0, 1.0, 0.0, 0.25, 0.0, 1.0, 0.5, 0.5, 0.5]
    versions = [9, 8, 4]
    staleness = [HEAD - versions[number] for number in group]
    return Case(sampler=sampler, rewards=rewards, group=group, staleness=staleness, max_tokens=6), learner


def groups_of_case(case: Case) -> list[Group]:
    """The same rollouts as a step has them."""
    numbers = sorted(set(case.group))
    rows = [[row for row, number in zip(case.sampler, case.group, strict=True) if number == g] for g in numbers]
    rewards = [[r for r, number in zip(case.rewards, case.group, strict=True) if number == g] for g in numbers]
    age = dict(zip(case.group, case.staleness, strict=True))
    return [
        groups_of([row], [reward], version=HEAD - age[number], first=number)[0]
        for number, row, reward in zip(numbers, rows, rewards, strict=True)
    ]


def coefficient(case: Case, i: int, aggregation: str, chosen: Sequence[int]) -> float:
    """What a token of rollout i is multiplied by where the chosen rollouts are the step."""
    lengths = {j: len(case.sampler[j]) for j in chosen}
    return {
        "sequence_mean": 1 / (len(chosen) * lengths[i]),
        "token_mean": 1 / sum(lengths.values()),
        "max_length": 1 / (len(chosen) * case.max_tokens),
        "sequence_sum": 1 / len(chosen),
        "length_power": lengths[i] ** -0.75 / (case.max_tokens * sum(n**-0.75 for n in lengths.values())),
    }[aggregation]


def assert_equals(
    config: LossConfig,
    case: Case,
    learner: Rows,
    value: Callable[[Rows], float],
    *,
    num_rollouts: int = 10,
    has_value: bool = True,
) -> None:
    """Compare value and gradient of a loss with those of `value`, a function of log-probs, by central differences."""
    outcome = run_loss(
        config, learner[:num_rollouts], groups_of_case(case), max_tokens=case.max_tokens, head_version=HEAD
    )
    if has_value:
        assert outcome.value == pytest.approx(value(learner), abs=1e-12)
    step = 1e-5
    for i, row in enumerate(learner[:num_rollouts]):
        for t in range(len(row)):
            up, down = ([list(values) for values in learner] for _ in range(2))
            up[i][t] += step
            down[i][t] -= step
            slope = (value(up) - value(down)) / (2 * step)
            assert float(outcome.gradients[i][t]) == pytest.approx(slope, abs=1e-8), (i, t)
