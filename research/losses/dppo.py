"""DPPO, arXiv 2602.04879, as prime-rl runs it.

A token is left out where the update would take its probability further from the sampler's than a limit. The distance is
binary: of the drawn token against all others. It is the difference p - q (`tv`) or KL(q || p) (`kl`), equations 12 to
14. prime-rl adds a small square of the log ratio at every token. None of heterorl's masks reads probabilities: a clip
of ratios acts on rare tokens first, this one on likely tokens.
"""

from __future__ import annotations

from typing import Literal

import torch

from heterorl.learner.loss.custom import LossBatch, LossOutput
from heterorl.learner.loss.objectives import ratio_objective
from heterorl_research.losses.parts import log_ratios

Divergence = Literal["tv", "kl"]


def loss(
    batch: LossBatch,
    *,
    divergence: Divergence = "tv",
    mask_low: float = 0.2,
    mask_high: float = 0.2,
    square_coefficient: float = 0.001,
) -> LossOutput:
    """-m_t r_t A + square_coefficient (log r_t)^2, m_t of `is_within`."""
    ratios_BT, advantages_B1 = log_ratios(batch), batch.advantages_B[:, None]
    objective = ratio_objective(
        ratios_BT, advantages_B1, low=0.0, high=float("inf"), max_log_weight=batch.max_log_weight
    )
    shifts_BT = signed_shifts(batch.learner_BT.detach(), batch.sampler_BT, divergence=divergence)
    is_kept_BT = is_within(shifts_BT, advantages_B1, low=mask_low, high=mask_high)
    squares_BT = ratios_BT.clamp(max=batch.max_log_weight).square()
    return LossOutput(
        losses=torch.where(is_kept_BT, -objective.values, 0.0) + square_coefficient * squares_BT,
        weights=objective.weights,
        is_clipped=~is_kept_BT | objective.is_clipped,
    )


def signed_shifts(learner_BT: torch.Tensor, sampler_BT: torch.Tensor, *, divergence: Divergence) -> torch.Tensor:
    """p - q, or the binary KL(q || p) with the sign of p - q; [B, T]."""
    p_BT, q_BT = learner_BT.exp(), sampler_BT.exp()
    if divergence == "tv":
        return p_BT - q_BT
    tiny = torch.finfo(p_BT.dtype).tiny
    others_p_BT, others_q_BT = (-torch.expm1(logs_BT.clamp(max=0.0)) for logs_BT in (learner_BT, sampler_BT))
    kl_BT = q_BT * (sampler_BT - learner_BT) + others_q_BT * (
        others_q_BT.clamp(min=tiny).log() - others_p_BT.clamp(min=tiny).log()
    )
    return kl_BT * (p_BT - q_BT).sign()


def is_within(shifts_BT: torch.Tensor, advantages_B1: torch.Tensor, *, low: float, high: float) -> torch.Tensor:
    """False where A > 0 and the shift exceeds high, or A < 0 and it is below -low; bool [B, T]."""
    is_beyond = ((advantages_B1 > 0) & (shifts_BT > high)) | ((advantages_B1 < 0) & (shifts_BT < -low))
    return ~is_beyond
