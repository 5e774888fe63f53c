"""What several of these losses share.

Suffixes: B sequences of a pass, S of the whole step, T completion tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from heterorl.learner.loss.custom import LossBatch, LossOutput
from heterorl.learner.loss.objectives import Objective, ratio_objective


def learner_means(batch: LossBatch) -> torch.Tensor:
    """Mean of log p over the tokens of each rollout; [B]."""
    return batch.learner_BT.sum(1) / batch.lengths_B


def log_ratios(batch: LossBatch) -> torch.Tensor:
    """log r, learner over sampler, of each token; [B, T], 0 in padding."""
    return batch.learner_BT - batch.sampler_BT


def log_products(batch: LossBatch) -> torch.Tensor:
    """z, log of the ratio of each whole rollout, learner over sampler; [B]."""
    return log_ratios(batch).sum(1)


def clipped(batch: LossBatch, log_weights: torch.Tensor, *, eps_low: float, eps_high: float) -> Objective:
    """PPO's one-sided clip of weights [B, 1] or [B, T]."""
    return ratio_objective(
        log_weights,
        batch.advantages_B[:, None],
        low=1.0 - eps_low,
        high=1.0 + eps_high,
        max_log_weight=batch.max_log_weight,
    )


def one_sided_gepo(batch: LossBatch, *, eps_low: float, eps_high: float) -> Objective:
    """GEPO's weight with its own clip, whose upper side is far away by default."""
    log_weights_B = learner_means(batch) - batch.log_expectations_B
    return clipped(batch, log_weights_B[:, None], eps_low=eps_low, eps_high=eps_high)


def minimised(batch: LossBatch, objective: Objective) -> LossOutput:
    """The output for an objective with one weight for each rollout."""
    return LossOutput(
        losses=-objective.values.expand(batch.mask_BT.shape),
        weights=objective.weights[:, 0],
        is_clipped=objective.is_clipped[:, 0],
    )


def by_group(
    step: LossBatch, values_S: torch.Tensor, change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """New values of the rollouts of a step, computed group by group; [S].

    Args:
        step: all rollouts.
        values_S: one number of each.
        change: takes the values of a group and their rows in the step.
    """
    changed_S = values_S.clone()
    for group in step.groups_B.unique():
        rows = (step.groups_B == group).nonzero()[:, 0]
        changed_S[rows] = change(values_S[rows], rows)
    return changed_S
