"""GSPO with one ratio for each turn of a trajectory.

    w_k = (prod_(t in turn k) r_t)^(1 / T_k)

T_k is the number of drawn tokens of turn k. A trajectory of one turn has GSPO's ratio. A turn that drifted is clipped
by itself; the other turns of its trajectory train.
"""

from __future__ import annotations

import torch

from heterorl.learner.loss.custom import LossBatch, LossOutput
from heterorl_research.losses.parts import clipped, log_ratios


def loss(batch: LossBatch, *, eps_low: float = 0.2, eps_high: float = 0.2) -> LossOutput:
    """min(w_k A, clip(w_k, 1 - eps_low, 1 + eps_high) A) at each token of turn k."""
    log_weights_BT = turn_means(log_ratios(batch), batch)
    objective = clipped(batch, log_weights_BT, eps_low=eps_low, eps_high=eps_high)
    return LossOutput(losses=-objective.values, weights=objective.weights, is_clipped=objective.is_clipped)


def turn_means(values_BT: torch.Tensor, batch: LossBatch) -> torch.Tensor:
    """Mean over the drawn tokens of each token's turn; [B, T]."""
    turns_BT = batch.turns_BT
    zeros_BK = values_BT.new_zeros(len(turns_BT), int(turns_BT.max()) + 1)
    sums_BK = zeros_BK.scatter_add(1, turns_BT, torch.where(batch.mask_BT, values_BT, 0.0))
    counts_BK = zeros_BK.scatter_add(1, turns_BT, batch.mask_BT.to(values_BT.dtype))
    return (sums_BK / counts_BK.clamp(min=1.0)).gather(1, turns_BT)
