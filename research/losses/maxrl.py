"""MaxRL, arXiv 2602.02710: advantages over the success rate.

For right and wrong answers (r - mean) / mean is what maximises the log of the pass rate, up to the order that a group
can see: hard prompts weigh 1 / mean. Groups without a right answer teach nothing. The paper is on policy; for stale
rollouts the advantage has GRPO's ratio and clip, as in TRL.

Suffixes: B rollouts of a pass, S of the whole step, G members of a group.
"""

from __future__ import annotations

import dataclasses

import torch

from heterorl.learner.loss.custom import LossBatch, LossOutput
from heterorl_research.losses.parts import by_group, clipped, log_ratios

_LEAST_SPREAD = 1e-9
"""Rewards nearer to their mean are equal, and a rounding."""


def loss(batch: LossBatch, step: LossBatch, *, eps_low: float = 0.2, eps_high: float = 0.2) -> LossOutput:
    """PPO's clip of r_t with A = `over_success_rate`."""
    advantages_S = by_group(step, step.centred_rewards_B, lambda rewards_G, _: over_success_rate(rewards_G))
    weighed = dataclasses.replace(batch, advantages_B=advantages_S[batch.rows_B])
    objective = clipped(weighed, log_ratios(batch), eps_low=eps_low, eps_high=eps_high)
    return LossOutput(losses=-objective.values, weights=objective.weights, is_clipped=objective.is_clipped)


def over_success_rate(centred_G: torch.Tensor) -> torch.Tensor:
    """(r - mean) / (mean - least) of one whole group, which is (r - mean) / mean where the least reward is 0; [G].

    A loss is given rewards minus their mean, from which the mean cannot be told. With rewards of 0 and 1 it can: a
    group of both has a 0. Equal rewards give 0.

    Args:
        centred_G: rewards minus the group's mean.
    """
    below = -centred_G.min()
    return torch.zeros_like(centred_G) if below <= _LEAST_SPREAD else centred_G / below
