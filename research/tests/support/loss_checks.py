"""Checks that every loss of research passes.

A loss equals loops over floats, does not depend on how a step is divided, and is finite on long completions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from heterorl.learner.loss.loss_config import CustomLossConfig
from tests.support.loss_cases import HEAD, assert_equals, case_of, coefficient, groups_of_case
from tests.support.loss_reference import Reference
from tests.support.losses import Outcome, groups_of, run_loss

Objective = Callable[[Reference, int], list[float]]
"""What a loss maximises at every token of rollout i, by loops over floats."""
DIVISIONS: list[dict[str, Any]] = [
    {"parts": [[i] for i in range(10)]}, {"parts": [[9, 0, 4], [1, 2, 3, 5], [8, 7, 6]]}, {"width": 23},
]  # fmt: skip
"""Micro-batches, their order, and padding. Parts are also what ranks would hold."""
EXTREMES = {
    "learner far above": (-100.0, -20000.0),
    "learner far below": (-20000.0, -100.0),
    "both far down": (-20000.0, -19000.0),
    "sampler beyond any probability": (-100.0, -2e7),
}
"""Sums of log-probs of a completion, learner and sampler."""
LONG = 16384
"""Tokens of a long completion."""


def assert_equals_loops(
    loss: CustomLossConfig, objective: Objective, *, seed: int, aggregation: str = "sequence_mean"
) -> None:
    """Compare a loss and its gradient with the objective, the gradient by central differences."""
    case, learner = case_of(seed)
    rows = range(len(case.group))

    def value(moved: list[list[float]]) -> float:
        reference = Reference(case, moved, learner)
        return -sum(coefficient(case, i, aggregation, rows) * sum(objective(reference, i)) for i in rows)

    assert_equals(loss, case, learner, value)


def assert_acts(loss: CustomLossConfig) -> None:
    """Expect a bound or mask of the loss to act on some tokens of the cases and not on others."""
    found = []
    for seed in (1, 2, 3):
        case, learner = case_of(seed)
        terms = run_loss(loss, learner, groups_of_case(case), max_tokens=6, head_version=HEAD).terms[0]
        is_clipped = terms.is_clipped if terms.is_clipped.dim() == 2 else terms.is_clipped[:, None]
        found.append(is_clipped.expand(terms.is_kept_BT.shape)[terms.is_kept_BT])
    flat = torch.cat(found)
    assert flat.any()
    assert not flat.all()


def assert_equal_however_divided(loss: CustomLossConfig, division: dict[str, Any]) -> None:
    """Compare one pass over a step with the division, in value and gradient."""
    case, learner = case_of(4)
    one, other = (run_loss(loss, learner, groups_of_case(case), **chosen) for chosen in ({}, division))

    assert other.value == pytest.approx(one.value, abs=1e-12)
    for left, right in zip(one.gradients, other.gradients, strict=True):
        torch.testing.assert_close(right, left, rtol=0, atol=1e-12)


def assert_finite_on_long_completions(loss: CustomLossConfig, sums: tuple[float, float]) -> None:
    """Run the loss on completions of 16k tokens and of one; value, gradient and weights are finite."""
    learner_sum, sampler_sum = sums
    sampler = [[[sampler_sum / LONG] * LONG, [-0.5], [sampler_sum / LONG] * LONG], [[-1.0], [-2.0]], [[-3.0]]]
    learner = [[learner_sum / LONG] * LONG, [-0.6], [learner_sum / LONG] * LONG, [-1.0], [-2.0], [-3.0]]
    groups = groups_of(sampler, [[1.0, 0.5, 0.0], [1.0, 1.0], [0.0]])

    outcome = run_loss(loss, learner, groups, max_tokens=LONG, head_version=5)

    assert math.isfinite(outcome.value)
    assert all(gradient.isfinite().all() for gradient in outcome.gradients)
    assert all(terms.weights.isfinite().all() for terms in outcome.terms)


def equal_rewards(loss: CustomLossConfig, reward: float, *, is_on_policy: bool = False) -> Outcome:
    """The loss on groups whose rollouts all have this reward."""
    case, learner = case_of(7)
    rows = [[member.sampler_logprobs.tolist() for member in group.rollouts] for group in groups_of_case(case)]
    flat = groups_of(rows, [[reward] * len(group) for group in rows])
    return run_loss(loss, [row for group in rows for row in group] if is_on_policy else learner, flat)


def assert_teaches_nothing(outcome: Outcome) -> None:
    """Expect value and gradient to be 0."""
    assert outcome.value == pytest.approx(0.0, abs=1e-15)
    assert all(gradient.abs().max() < 1e-15 for gradient in outcome.gradients)
