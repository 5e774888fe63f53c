"""Trust region masking, arXiv 2512.23075: rollouts that drifted anywhere are left out.

The bound of the paper holds for the largest KL over a rollout's positions, which no clip of single tokens controls. Its
KL is over the vocabulary; here it is k3 of the drawn token, as in verl's `seq_max_k3` and `seq_mean_k3`. Both signs of
the advantage are masked, unlike by `opsm_threshold` and `drift_limit`.
"""

from __future__ import annotations

import torch

from heterorl.learner.loss.custom import LossBatch, LossOutput
from heterorl.learner.loss.objectives import kl_estimates, ratio_objective
from heterorl_research.losses.parts import log_ratios


def loss(batch: LossBatch, *, max_kl: float = 0.5, mean_kl: float = 0.0) -> LossOutput:
    """1(max_t k_t <= max_kl and mean_t k_t <= mean_kl) r_t A, k_t = r_t - 1 - log r_t; a limit of 0 is off."""
    kl_BT = kl_estimates(batch.learner_BT.detach(), batch.sampler_BT, batch.mask_BT, max_log_ratio=batch.max_log_weight)
    is_kept_B1 = is_within(kl_BT, batch.lengths_B, max_kl=max_kl, mean_kl=mean_kl)[:, None]
    # A kept ratio is near 1, so it needs no clip.
    objective = ratio_objective(
        log_ratios(batch), batch.advantages_B[:, None], low=0.0, high=float("inf"), max_log_weight=batch.max_log_weight
    )
    return LossOutput(
        losses=torch.where(is_kept_B1, -objective.values, 0.0),
        weights=objective.weights,
        is_clipped=~is_kept_B1 | objective.is_clipped,
        metrics={"trm_kept": is_kept_B1[:, 0].double()},
    )


def is_within(kl_BT: torch.Tensor, lengths_B: torch.Tensor, *, max_kl: float, mean_kl: float) -> torch.Tensor:
    """Whether the largest and the mean KL of a rollout are within the limits; bool [B].

    Args:
        kl_BT: per token, 0 in padding.
        lengths_B: tokens of each rollout.
        max_kl: nats; 0 is off.
        mean_kl: nats; 0 is off.
    """
    is_within_B = torch.ones_like(lengths_B, dtype=torch.bool)
    if max_kl > 0.0:
        is_within_B &= kl_BT.amax(1) <= max_kl
    if mean_kl > 0.0:
        is_within_B &= kl_BT.sum(1) / lengths_B <= mean_kl
    return is_within_B
