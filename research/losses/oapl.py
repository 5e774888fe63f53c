"""OAPL, arXiv 2602.19362: log ratios fitted to optimal advantages.

There is no importance weight and no clip. The policy that maximises E r - beta KL(p || q) has
beta log(p / q) = r - V with V = beta log E_q e^(r / beta). The loss is the square of what is missing, equation 3, with
V estimated from the group. Later drafts of the authors' group have one beta for V and one for the ratio, as here.

Suffixes: B rollouts of a pass, S of the whole step, G members of a group.
"""

from __future__ import annotations

import math

import torch

from heterorl.learner.loss.custom import LossBatch, LossOutput
from heterorl_research.losses.parts import by_group, log_ratios


def loss(batch: LossBatch, step: LossBatch, *, value_beta: float = 1.0, policy_beta: float = 0.001) -> LossOutput:
    """(policy_beta z - A*)^2 of a rollout, z = sum_t log p_t / q_t and A* of `optimal_advantages`.

    Tokens count at most `max_log_weight` nats each, without gradient, so stated log-probs are bounded. Rollouts of a
    group of equal rewards have A* = 0: they are pulled to their sampler.
    """
    advantages_S = by_group(
        step, step.centred_rewards_B, lambda rewards_G, _: optimal_advantages(rewards_G, beta=value_beta)
    )
    ratios_B = log_ratios(batch).clamp(max=batch.max_log_weight).sum(1)
    residuals_B = policy_beta * ratios_B - advantages_S[batch.rows_B]
    return LossOutput(losses=residuals_B.square(), metrics={"oapl_gap": residuals_B.detach().abs()})


def optimal_advantages(rewards_G: torch.Tensor, *, beta: float) -> torch.Tensor:
    """r - beta log mean_j e^(r_j / beta) of one whole group; a constant added to all rewards changes nothing."""
    scaled_G = rewards_G / beta
    return rewards_G - beta * (torch.logsumexp(scaled_G, -1) - math.log(rewards_G.shape[-1]))
