"""Trajectory balance with the batch's partition function (VarGrad), arXiv 2503.18929; needs a reference model.

Suffixes: B sequences of a pass, S of the whole step, G members of a group.
"""

from __future__ import annotations

import torch

from heterorl.learner.loss.custom import LossBatch, LossOutput
from heterorl_research.losses.parts import by_group


def loss(batch: LossBatch, step: LossBatch, *, beta: float = 0.005) -> LossOutput:
    """A' log p with A' = A - beta (z - mean z), z = log learner over reference of a rollout."""
    assert step.reference_BT is not None, "set loss.reads_reference"
    ratios_S = (step.learner_BT - step.reference_BT).sum(1)
    advantages_S = by_group(
        step, step.advantages_B, lambda advantages_G, rows: drift_compensated(advantages_G, ratios_S[rows], beta=beta)
    )
    return LossOutput(losses=-batch.learner_BT * advantages_S[batch.rows_B][:, None])


def drift_compensated(advantages_G: torch.Tensor, log_ratios_G: torch.Tensor, *, beta: float) -> torch.Tensor:
    """A_i - beta (z_i - mean z): the trajectory balance (VarGrad) of a group, arXiv 2503.18929; float64 [G].

    Its loss mean_i (log Z + log p_i - log ref_i - r_i / beta)^2 with log Z = mean_i (r_i / beta - z_i) and
    z_i = log p_i - log ref_i has the gradient -(2 / beta) mean_i A'_i grad log p_i with this A' (log Z is a constant).

    Args:
        advantages_G: r - mean(r) of one whole group.
        log_ratios_G: z, learner over reference, whole rollouts.
        beta: temperature, in units of the reward.
    """
    assert advantages_G.shape == log_ratios_G.shape
    return advantages_G - beta * (log_ratios_G - log_ratios_G.mean(-1, keepdim=True))
