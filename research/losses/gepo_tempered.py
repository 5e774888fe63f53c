"""GEPO without upper clip for good rollouts; bad ones by ratios tempered until the step supports them.

Suffixes: B sequences of a pass, N rollouts of the step.
"""

from __future__ import annotations

import math

import torch

from heterorl.learner.loss.custom import LossBatch, LossOutput
from heterorl.learner.loss.objectives import with_likelihood_of_bad
from heterorl_research.losses.parts import log_products, minimised, one_sided_gepo


def loss(
    batch: LossBatch, step: LossBatch, *, eps_low: float = 0.2, eps_high: float = 100.0, tempering_ess: float = 0.5
) -> LossOutput:
    """A >= 0: GEPO; A < 0: sg(min(1, u)) A log p with u of `tempered_log_weights` over the step."""
    objective = one_sided_gepo(batch, eps_low=eps_low, eps_high=eps_high)
    logs_N = tempered_log_weights(log_products(step).clamp(max=batch.max_log_weight), share=tempering_ess)
    logs_B1 = logs_N[batch.rows_B][:, None]
    return minimised(batch, with_likelihood_of_bad(objective, batch.learner_BT, batch.advantages_B[:, None], logs_B1))


def log_effective_share(log_weights_N: torch.Tensor) -> torch.Tensor:
    """log of (sum w)^2 / (N sum w^2), the effective share of a sample, over the last dimension; at most 0."""
    log_sum = torch.logsumexp(log_weights_N, -1)
    return 2.0 * log_sum - torch.logsumexp(2.0 * log_weights_N, -1) - math.log(log_weights_N.shape[-1])


def tempered_log_weights(log_products_N: torch.Tensor, *, share: float) -> torch.Tensor:
    """log of u_i = e^(a z_i) / mean_j e^(a z_j), a the largest power up to 1 with this effective share; [..., N].

    A step of adaptive tempering, Jasra et al. 2011: the policy p^a q^(1 - a) is the nearest to the learner that samples
    of q still represent. The effective share falls with a: its derivative, 2 (E_a z - E_2a z) under weights e^(a z) and
    e^(2 a z), is never positive. Hence bisection; a is exact to 2^-60. Where the share binds, adding a constant to all
    z or multiplying them by one changes nothing.

    Args:
        log_products_N: z, log ratios of the rollouts of a step; leading dimensions are other steps.
        share: in (0, 1].
    """
    z_N = log_products_N.detach().double()
    z_N = z_N - z_N.amax(-1, keepdim=True)
    low = torch.zeros_like(z_N[..., :1])
    high = torch.ones_like(low)
    floor = math.log(share)
    is_whole = log_effective_share(z_N)[..., None] >= floor
    for _ in range(60):
        middle = (low + high) / 2.0
        holds = log_effective_share(middle * z_N)[..., None] >= floor
        low, high = torch.where(holds, middle, low), torch.where(holds, high, middle)
    logs_N = torch.where(is_whole, 1.0, low) * z_N
    return logs_N - (torch.logsumexp(logs_N, -1, keepdim=True) - math.log(z_N.shape[-1]))
