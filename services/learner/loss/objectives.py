"""Policy-gradient objectives: pure functions of tensors and named scalars.

Guarantees: gradient reaches learner log-probs only; every denominator is an argument, so the sum over micro-batches
does not depend on how rollouts were split, padded or packed; rows without tokens contribute exactly 0; finite for any
finite log-probs. Never sees configuration, model or logger.

Suffixes: B sequences, T completion tokens (padded; the mask marks the real ones). Tensors without suffix are [B, 1] for
one weight per rollout or [B, T] for one per token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

import torch

from heterorl.learner.loss.loss_config import Aggregation

MAX_LOG_WEIGHT = 20.0
"""Weights beyond e^20 are capped, without gradient and counted as clipped: their exp could overflow to inf.

A loss may cap them earlier, so that log-probs that a site states cannot make a rollout outweigh its peers.
"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossInputs:
    """Constants of one micro-batch before any pass; float64 except the two masks.

    Example: LossInputs(sampler_BT=log_q, mask_BT=mask, advantages_B=a, centred_rewards_B=r, log_denominators_B=d,
    log_expectations_B=e, couplings_B=zeros, staleness_BT=zeros, is_selected_BT=mask)
    """

    sampler_BT: torch.Tensor
    """log q under the policy that sampled, nats."""
    mask_BT: torch.Tensor
    """bool, True at completion tokens."""
    advantages_B: torch.Tensor
    """A of each rollout, in the unit of the loss's advantage."""
    centred_rewards_B: torch.Tensor
    """Reward minus the group's mean, for measurements and custom losses."""
    log_denominators_B: torch.Tensor
    """log D of the loss's sequence weight."""
    log_expectations_B: torch.Tensor
    """GEPO's log denominator, contraharmonic and length-normalised, for every loss."""
    couplings_B: torch.Tensor
    """Gradient of a rollout's mean log-prob through its group's denominator; 0 for most losses."""
    staleness_BT: torch.Tensor
    """Versions between each token's sampler and the learner."""
    is_selected_BT: torch.Tensor
    """bool, True at tokens that the step's selection keeps."""
    reference_BT: torch.Tensor | None = None
    """log-probs of the reference model, where the loss has one."""
    turns_BT: torch.Tensor | None = None
    """int64, the turn that drew each token, from 0; for custom losses."""
    places_B2: torch.Tensor | None = None
    """int64 [B, 2]: group of each rollout, and its row in the step; for custom losses."""

    def to(self, device: torch.device) -> LossInputs:
        present = {field.name: one for field in fields(self) if (one := getattr(self, field.name)) is not None}
        return LossInputs(**{name: one.to(device) for name, one in present.items()})

    def padded(self, values_N: torch.Tensor) -> torch.Tensor:
        """All completion tokens' values as float64 [B, T]; 0 in padding.
        `values_N` has one rollout after another."""
        return torch.zeros_like(self.sampler_BT).masked_scatter(self.mask_BT, values_N.to(torch.float64))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossTerms:
    """One micro-batch's contributions to the loss, and its importance weights.

    `contributions_B` sum, over all micro-batches, to the loss to minimise. `weights` are [B] of rollouts or [B, T] of
    tokens. `is_clipped`, where clip or truncation acted, is [B] or [B, T] too; GMPO has weights of rollouts and clips
    tokens. `is_kept_BT` marks tokens that no mask left out. `metrics` are a custom loss's own, [B] or [B, T].
    """

    contributions_B: torch.Tensor
    weights: torch.Tensor
    is_clipped: torch.Tensor
    is_kept_BT: torch.Tensor
    metrics: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Objective:
    """Values to maximise, their weights, and where the clip acted.
    Each is [B, 1] or [B, T]; weights and clip are constants."""

    values: torch.Tensor
    weights: torch.Tensor
    is_clipped: torch.Tensor


def token_coefficients(
    mask_BT: torch.Tensor,
    *,
    aggregation: Aggregation,
    num_sequences: int,
    num_tokens: int,
    max_tokens: int,
    length_power: float = 0.0,
    sum_of_powers: float = 1.0,
) -> torch.Tensor:
    """Factor of each token's term in the loss, float64 [B, T].

    It is 0 outside the mask. sequence_mean: 1 / (N T_i), token_mean: 1 / sum_i T_i, max_length: 1 / (N max_tokens) of
    arXiv 2503.20783, sequence_sum: 1 / N, length_power: T_i^-a / (max_tokens sum_j T_j^-a) of arXiv 2509.07558 with a =
    `length_power`. N and the number of tokens are of the whole step; `max_tokens` is the run's limit on completion
    tokens.
    """
    assert mask_BT.dim() == 2
    assert mask_BT.dtype == torch.bool
    mask = mask_BT.double()
    if aggregation == "token_mean":
        return mask / num_tokens
    if aggregation == "max_length":
        return mask / (num_sequences * max_tokens)
    if aggregation == "sequence_sum":
        return mask / num_sequences
    lengths = mask.sum(1, keepdim=True).clamp(min=1.0)
    if aggregation == "length_power":
        return mask * lengths.pow(-length_power) / (max_tokens * sum_of_powers)
    return mask / (num_sequences * lengths)


def ratio_objective(
    log_weights: torch.Tensor,
    advantages_B1: torch.Tensor,
    *,
    low: float,
    high: float,
    dual: float = math.inf,
    decision_log_weights: torch.Tensor | None = None,
    is_preserving: bool = False,
    max_log_weight: float | torch.Tensor = MAX_LOG_WEIGHT,
) -> Objective:
    """PPO's one-sided clip: min(w A, clip(w, low, high) A).

    Source: arXiv 1707.06347 equation 7. For A < 0 the result is at least c A. The bound c A is the dual clip of arXiv
    1912.09729. The gradient of an unclipped term is A w dlog w; of a clipped one 0 or, preserving, A b dlog w with the
    bound b. `decision_log_weights` replace log w in the comparison with the bounds. Weights beyond e^max_log_weight are
    capped, without gradient.
    """
    # The decision is made once, so that what is reported as clipped is exactly what the clip acted on.
    advantages = advantages_B1.detach()
    capped = log_weights.clamp(max=max_log_weight)
    weights = capped.exp()
    own = weights.detach()
    decision = own if decision_log_weights is None else decision_log_weights.detach().clamp(max=MAX_LOG_WEIGHT).exp()
    is_outside = ((advantages > 0) & (decision > high)) | ((advantages < 0) & ((decision < low) | (decision > dual)))
    bounded = torch.where(advantages < 0, decision.clamp(low, dual), decision.clamp(low, high))
    if is_preserving:
        bounded = bounded * (1.0 + (capped - capped.detach()))
    values = torch.where(is_outside, bounded, weights) * advantages
    return Objective(values=values, weights=own, is_clipped=is_outside | (log_weights.detach() > max_log_weight))


def score_objective(
    log_weights: torch.Tensor,
    logprobs_BT: torch.Tensor,
    advantages_B1: torch.Tensor,
    *,
    low: float,
    high: float,
    is_dropping: bool = False,
    max_log_weight: float = MAX_LOG_WEIGHT,
) -> Objective:
    """sg(w') A log p per token, with w' = clip(w, low, high).

    With `is_dropping` w' is w within the range and 0 elsewhere. CISPO (arXiv 2506.13585 equation 4), TIS, MIS and the
    negative half of TOPR (arXiv 2503.14286 equation 8). The gradient is A w' per token, also where w was truncated. log
    w and A are constants. Weights beyond e^max_log_weight are lowered to it, also where the range has no end.
    """
    raw = log_weights.detach().clamp(max=MAX_LOG_WEIGHT).exp()
    is_outside = (raw < low) | (raw > high)
    weights = raw.masked_fill(is_outside, 0.0) if is_dropping else raw.clamp(low, high)
    weights = weights.clamp(max=math.exp(max_log_weight))
    return Objective(values=weights * advantages_B1.detach() * logprobs_BT, weights=weights, is_clipped=is_outside)


def with_likelihood_of_good(
    objective: Objective, logprobs_BT: torch.Tensor, advantages_B1: torch.Tensor, *, is_clip_kept: bool = False
) -> Objective:
    """Replace terms with A >= 0 by A log p per token.

    Their weight is 1: TOPR's treatment, arXiv 2503.14286 equation 8. With `is_clip_kept` clipped terms stay, so that
    only the weight changes.
    """
    advantages = advantages_B1.detach()
    is_good = (advantages >= 0) & ~objective.is_clipped if is_clip_kept else advantages >= 0
    return Objective(
        values=torch.where(is_good, advantages * logprobs_BT, objective.values),
        weights=torch.where(is_good, 1.0, objective.weights),
        is_clipped=objective.is_clipped & ~is_good,
    )


def with_likelihood_of_bad(
    objective: Objective, logprobs_BT: torch.Tensor, advantages_B1: torch.Tensor, log_weights_B1: torch.Tensor
) -> Objective:
    """Replace terms with A < 0 by sg(min(1, w)) A log p.

    This is the negative half of TOPR, per token, with any weight. log w is a constant, truncated and counted as clipped
    above 0.
    """
    advantages = advantages_B1.detach()
    is_bad = advantages < 0
    logs = log_weights_B1.detach()
    weights = logs.clamp(max=0.0).exp()
    return Objective(
        values=torch.where(is_bad, weights * advantages * logprobs_BT, objective.values),
        weights=torch.where(is_bad, weights, objective.weights),
        is_clipped=torch.where(is_bad, logs > 0.0, objective.is_clipped),
    )


def kl_estimates(
    learner_logprobs_BT: torch.Tensor,
    sampler_logprobs_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    *,
    max_log_ratio: float = MAX_LOG_WEIGHT,
) -> torch.Tensor:
    """Per-token estimate of KL(q || p) from samples of q; [B, T].

    k3 = (r - 1) - log r with r = p / q. Unbiased because E_q[r] = 1, never negative, with gradient r - 1. With r = q /
    p the formula would be biased: one token with p / q = e^-15 would count 3.3e6 instead of 14. Source: Schulman 2020,
    "Approximating KL divergence". The sum over a row estimates the KL of the whole sequence. log r is capped, without
    gradient.
    """
    assert learner_logprobs_BT.shape == sampler_logprobs_BT.shape == mask_BT.shape
    log_ratios_BT = torch.where(mask_BT, learner_logprobs_BT - sampler_logprobs_BT.detach(), 0.0)
    return _k3(log_ratios_BT, max_log_ratio)


def reference_kl_estimates(
    learner_logprobs_BT: torch.Tensor,
    reference_logprobs_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    *,
    max_log_ratio: float = MAX_LOG_WEIGHT,
) -> torch.Tensor:
    """Per-token penalty for leaving a reference; [B, T].

    k3 with r = ref / p, arXiv 2402.03300 equation 4. Under samples of p it estimates KL(p || ref); stale samples are
    not reweighed, as in the paper. Its gradient by log p is 1 - r, so it also pulls where p is below the reference. log
    r is capped, without gradient.
    """
    assert learner_logprobs_BT.shape == reference_logprobs_BT.shape == mask_BT.shape
    log_ratios_BT = torch.where(mask_BT, reference_logprobs_BT.detach() - learner_logprobs_BT, 0.0)
    return _k3(log_ratios_BT, max_log_ratio)


def _k3(log_ratios_BT: torch.Tensor, max_log_ratio: float) -> torch.Tensor:
    # Capping only inside exp would leave -log r: a gradient that pushes p further away from what it is compared with.
    capped_BT = log_ratios_BT.clamp(max=max_log_ratio)
    return torch.expm1(capped_BT) - capped_BT
