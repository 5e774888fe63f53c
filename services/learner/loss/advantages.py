"""Advantages of the rollouts of one whole group, and the Beta density that one of them divides by.

Guarantees: finite for finite rewards, also in groups of one and in groups whose rewards are all equal. Never sees part
of a group.
Suffixes: G group members, P unique prompts of a step.
"""

from __future__ import annotations

import math

import torch

from heterorl.common.errors import ConfigError
from heterorl.learner.loss.config import Advantage

STD_FLOOR = 1e-4
MIN_BETA_RANGE = 1e-9
"""Prompts whose mean rewards differ by less are all alike."""
MAX_BETA_WEIGHT = 1e6
"""Largest 1 / density; where the density vanishes a prompt's rewards are all equal and centre to 0."""


def group_advantages(rewards_G: torch.Tensor, *, kind: Advantage) -> torch.Tensor:
    """Centre rewards on their group: A = r - mean(r), or A = (r - mean(r)) / (std(r) + 1e-4).

    Source: arXiv 2508.17850 section 2.1 (mean) and arXiv 2402.03300 section 4.1 (mean_std); std has ddof 1. For beta
    the result is that of mean, to be multiplied by the prompt's `beta_weights`.

    Args:
        rewards_G: float64 [G].
        kind: which of the two.

    Returns:
        float64 [G].
    """
    assert rewards_G.dim() == 1
    assert rewards_G.dtype == torch.float64
    if rewards_G.numel() < 2:
        return torch.zeros_like(rewards_G)  # a single rollout has nothing to compare with; its deviation is 0 / 0
    centred_G = rewards_G - rewards_G.mean()
    return centred_G / (rewards_G.std(correction=1) + STD_FLOOR) if kind == "mean_std" else centred_G


def beta_weights(means_P: torch.Tensor) -> torch.Tensor:
    """1 / Beta(p; alpha, beta) for each prompt of a step, at most 1e6: BNPO, arXiv 2506.02864 equations 9 to 12.

    alpha = 1 + a / 3 and beta = 1 + b / 3, each at least 1, with the moments' a = (m (1 - m) / v - 1) m and
    b = (m (1 - m) / v - 1) (1 - m); m and v (ddof 1) are mean and variance of p over the unique prompts. Prompts that
    are all alike, or a single one, determine no density: their weights are 1.

    Args:
        means_P: float64 [P], mean reward of each unique prompt, in [0, 1].

    Raises:
        ConfigError: a mean is outside [0, 1], where a Beta density has no meaning.
    """
    assert means_P.dim() == 1
    assert means_P.dtype == torch.float64
    if ((means_P < 0.0) | (means_P > 1.0)).any():
        problem = "beta needs rewards in [0, 1]; this step has others"
        raise ConfigError("loss.advantage", problem, action="scale the rewards, or choose mean or mean_std")
    # Equal means differ by rounding, and a variance of 1e-33 would be a density of all weight on one point.
    if means_P.numel() < 2 or float(means_P.max() - means_P.min()) < MIN_BETA_RANGE:
        return torch.ones_like(means_P)
    variance = float(means_P.var(correction=1))
    mean = float(means_P.mean())
    scale = mean * (1.0 - mean) / variance - 1.0
    alpha, beta = max(1.0 + scale * mean / 3.0, 1.0), max(1.0 + scale * (1.0 - mean) / 3.0, 1.0)
    log_norm = math.lgamma(alpha + beta) - math.lgamma(alpha) - math.lgamma(beta)
    # xlogy: at p = 0 or 1 an exponent of 0 gives 0 and not 0 * -inf.
    log_density_P = (
        log_norm
        + torch.special.xlogy(torch.full_like(means_P, alpha - 1.0), means_P)
        + torch.special.xlogy(torch.full_like(means_P, beta - 1.0), 1.0 - means_P)
    )
    return torch.exp(-log_density_P).clamp(max=MAX_BETA_WEIGHT)
