"""Policy-gradient losses: pure functions of tensors and named scalars.

Guarantees: gradient reaches learner log-probs only; every denominator is an argument, so the sum over micro-batches
does not depend on how rollouts were split, padded or packed; rows without tokens contribute exactly 0; finite for any
finite log-probs. Never sees configuration, model or logger.

Suffixes: B sequences, T completion tokens (padded; the mask marks the real ones).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from services.learner.denominators import masked_mean
from services.learner.loss_config import Aggregation

MAX_LOG_WEIGHT = 20.0
"""Weights beyond e^20 are capped, without gradient and counted as clipped: their exp could overflow to inf."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossTerms:
    """What one micro-batch adds to the loss, and the importance weights it used.

    `contributions_B` sum, over all micro-batches, to the loss to minimise. `weights`, `is_clipped` and `is_counted`
    are [B] for sequence losses and [B, T] for token losses: the weight, whether it got no gradient, whether it exists.
    """

    contributions_B: torch.Tensor
    weights: torch.Tensor
    is_clipped: torch.Tensor
    is_counted: torch.Tensor


def token_coefficients(
    mask_BT: torch.Tensor, *, aggregation: Aggregation, num_sequences: int, num_tokens: int, max_tokens: int
) -> torch.Tensor:
    """Factor of every token's term in the loss, float64 [B, T]; 0 outside the mask.

    sequence_mean: 1 / (N T_i), token_mean: 1 / sum_i T_i, max_length: 1 / (N max_tokens) of arXiv 2503.20783.

    Args:
        mask_BT: bool, True at completion tokens.
        aggregation: which of the three.
        num_sequences: N, rollouts with at least one token in the whole step, not in this micro-batch.
        num_tokens: completion tokens in the whole step.
        max_tokens: the run's limit on completion tokens.
    """
    assert mask_BT.dim() == 2
    assert mask_BT.dtype == torch.bool
    mask = mask_BT.double()
    if aggregation == "token_mean":
        return mask / num_tokens
    if aggregation == "max_length":
        return mask / (num_sequences * max_tokens)
    return mask / (num_sequences * mask.sum(1, keepdim=True).clamp(min=1.0))


def sequence_ratio_loss(
    *,
    learner_logprobs_BT: torch.Tensor,
    log_denominators_B: torch.Tensor,
    mask_BT: torch.Tensor,
    advantages_B: torch.Tensor,
    coefficients_BT: torch.Tensor,
    eps_low: float,
    eps_high: float,
) -> LossTerms:
    """GEPO and GSPO: -sum_i c_i min(w_i A_i, clip(w_i, 1 - eps_low, 1 + eps_high) A_i), w_i = p_i / D_i.

    p_i = exp(mean_t lp_it); D_i is the group's mean probability (GEPO, arXiv 2508.17850 equation 3) or the rollout's
    own q_i (GSPO, arXiv 2507.18071 equation 5). The gradient of an unclipped term is -c_i A_i w_i / T_i per token.

    Args:
        learner_logprobs_BT: log-probs under the current policy; carries the gradient.
        log_denominators_B: log D_i; a constant.
        mask_BT: bool, True at completion tokens.
        advantages_B: A_i; a constant.
        coefficients_BT: from `token_coefficients`; c_i is their sum over the row.
        eps_low: lower width of the clip range.
        eps_high: upper width of the clip range.
    """
    _check(learner_logprobs_BT, mask_BT, coefficients_BT, advantages_B)
    assert log_denominators_B.shape == advantages_B.shape
    log_weights_B = masked_mean(learner_logprobs_BT, mask_BT) - log_denominators_B.detach()
    objective_B, weights_B, is_clipped_B = _clipped(log_weights_B, advantages_B, eps_low=eps_low, eps_high=eps_high)
    is_counted_B = mask_BT.any(1)
    return LossTerms(
        contributions_B=-coefficients_BT.sum(1) * objective_B,
        weights=weights_B,
        is_clipped=is_clipped_B & is_counted_B,
        is_counted=is_counted_B,
    )


def token_ratio_loss(
    *,
    learner_logprobs_BT: torch.Tensor,
    sampler_logprobs_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    advantages_B: torch.Tensor,
    coefficients_BT: torch.Tensor,
    eps_low: float,
    eps_high: float,
) -> LossTerms:
    """GRPO: -sum_it c_it min(r_it A_i, clip(r_it, 1 - eps_low, 1 + eps_high) A_i), r_it = p_it / q_it.

    Source: arXiv 2402.03300 equation 3; the gradient of an unclipped term is -c_it A_i r_it.

    Args:
        learner_logprobs_BT: log-probs under the current policy; carries the gradient.
        sampler_logprobs_BT: log-probs under the policy that sampled; a constant.
        mask_BT: bool, True at completion tokens.
        advantages_B: A_i; a constant.
        coefficients_BT: c_it, from `token_coefficients`.
        eps_low: lower width of the clip range.
        eps_high: upper width of the clip range.
    """
    _check(learner_logprobs_BT, mask_BT, coefficients_BT, advantages_B)
    log_ratios_BT = _log_ratios(learner_logprobs_BT, sampler_logprobs_BT, mask_BT)
    objective_BT, ratios_BT, is_clipped_BT = _clipped(
        log_ratios_BT, advantages_B[:, None], eps_low=eps_low, eps_high=eps_high
    )
    return LossTerms(
        contributions_B=-(coefficients_BT * objective_BT).sum(1),
        weights=ratios_BT,
        is_clipped=is_clipped_BT,
        is_counted=mask_BT,
    )


def kl_estimates(
    learner_logprobs_BT: torch.Tensor, sampler_logprobs_BT: torch.Tensor, mask_BT: torch.Tensor
) -> torch.Tensor:
    """Per-token estimate of KL(q || p) from samples of q: k3 = (r - 1) - log r with r = p / q; [B, T].

    Unbiased because E_q[r] = 1, never negative, and its gradient is r - 1. With q / p in place of r the same formula
    is neither: one token with p / q = e^-15 would count 3.3e6 instead of 14. Source: Schulman 2020, "Approximating KL
    divergence". The sum over a row estimates the KL of the whole sequence. log r is capped at 20.
    """
    log_ratios_BT = _log_ratios(learner_logprobs_BT, sampler_logprobs_BT, mask_BT)
    # Capping inside exp alone would leave -log r: a gradient that pushes p further away from q.
    capped_BT = log_ratios_BT.clamp(max=MAX_LOG_WEIGHT)
    return torch.expm1(capped_BT) - capped_BT


def _log_ratios(
    learner_logprobs_BT: torch.Tensor, sampler_logprobs_BT: torch.Tensor, mask_BT: torch.Tensor
) -> torch.Tensor:
    assert learner_logprobs_BT.shape == sampler_logprobs_BT.shape == mask_BT.shape
    return torch.where(mask_BT, learner_logprobs_BT - sampler_logprobs_BT.detach(), 0.0)


def _clipped(
    log_weights: torch.Tensor, advantages: torch.Tensor, *, eps_low: float, eps_high: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    # The decision is made once, so that what is reported as clipped is exactly what has no gradient.
    advantages = advantages.detach()
    weights = log_weights.clamp(max=MAX_LOG_WEIGHT).exp()
    bounded = weights.detach().clamp(1.0 - eps_low, 1.0 + eps_high)
    is_outside = ((advantages > 0) & (weights > 1.0 + eps_high)) | ((advantages < 0) & (weights < 1.0 - eps_low))
    objective = torch.where(is_outside, bounded * advantages, weights * advantages)
    return objective, weights.detach(), is_outside | (log_weights.detach() > MAX_LOG_WEIGHT)


def _check(
    logprobs_BT: torch.Tensor, mask_BT: torch.Tensor, coefficients_BT: torch.Tensor, advantages_B: torch.Tensor
) -> None:
    assert logprobs_BT.dim() == 2
    assert logprobs_BT.is_floating_point()
    assert mask_BT.dtype == torch.bool
    assert logprobs_BT.shape == mask_BT.shape == coefficients_BT.shape
    assert advantages_B.shape == logprobs_BT.shape[:1]
