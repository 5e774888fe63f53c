"""A rule applied to one micro-batch: importance weight, then clip, then masks, then average.

Guarantees: gradient reaches learner log-probs only; contributions of micro-batches add up to those of the whole;
what stands in padding, NaN included, changes nothing.
Suffixes: B sequences, T completion tokens.
"""

from __future__ import annotations

import math

import torch

from heterorl.learner.loss import importance
from heterorl.learner.loss.custom import LossBatch, batch_of, terms_of
from heterorl.learner.loss.group import masked_mean
from heterorl.learner.loss.importance import has_not_drifted
from heterorl.learner.loss.objectives import (
    LossInputs,
    LossTerms,
    Objective,
    kl_estimates,
    ratio_objective,
    score_objective,
    with_likelihood_of_bad,
    with_likelihood_of_good,
)
from heterorl.learner.loss.rule import Rule


def policy_loss(
    rule: Rule,
    inputs: LossInputs,
    learner_BT: torch.Tensor,
    *,
    coefficients_BT: torch.Tensor,
    step: LossBatch | None = None,
) -> LossTerms:
    """-sum_it c_it k_it J_it with the objective J of `objectives`, masks k and coefficients c.

    Gradient reaches `learner_BT` alone. `step` has all rollouts of the step, for a custom loss that takes them.

    Raises:
        ConfigError: a custom loss raised, or returned what is no loss.
    """
    mask_BT = inputs.mask_BT
    _check(inputs, learner_BT, coefficients_BT)
    learner_BT = torch.where(mask_BT, learner_BT, 0.0)
    sampler_BT = torch.where(mask_BT, inputs.sampler_BT.detach(), 0.0)
    advantages_B = inputs.advantages_B.detach()

    is_kept_BT = mask_BT & inputs.is_selected_BT
    for limit, is_total in ((rule.opsm_threshold, False), (rule.drift_limit, True)):
        if limit > 0.0:
            is_kept_B = has_not_drifted(learner_BT, sampler_BT, mask_BT, advantages_B, limit=limit, is_total=is_total)
            is_kept_BT = is_kept_BT & is_kept_B[:, None]
    if rule.custom is not None:
        batch = batch_of(inputs, learner_BT, coefficients_BT=coefficients_BT, max_log_weight=rule.max_log_weight)
        return terms_of(rule.custom(batch, step), batch, is_kept_BT)
    coefficients_BT = torch.where(is_kept_BT, coefficients_BT, 0.0)

    if rule.level == "token":
        objective = _token_objective(rule, inputs, learner_BT, sampler_BT, advantages_B[:, None])
        is_counted = mask_BT
    else:
        objective = _sequence_objective(rule, inputs, learner_BT, sampler_BT, advantages_B)
        is_counted = mask_BT.any(1)
    if rule.positive_weight != "own":
        objective = with_likelihood_of_good(
            objective, learner_BT, advantages_B[:, None], is_clip_kept=rule.positive_weight == "one_clipped"
        )
    if rule.negative_weight != "own":
        # Of weight 1, or of the whole rollout's ratio.
        logs_BT = learner_BT - sampler_BT if rule.negative_weight == "product" else torch.zeros_like(learner_BT)
        logs_B1 = logs_BT.sum(1, keepdim=True)
        objective = with_likelihood_of_bad(objective, learner_BT, advantages_B[:, None], logs_B1)

    contributions_B = -(coefficients_BT * objective.values).sum(1)
    if rule.denominator == "expected_learner":
        means_B = masked_mean(learner_BT, mask_BT)
        contributions_B = contributions_B + inputs.couplings_B.detach() * (means_B - means_B.detach())
    is_clipped = objective.is_clipped
    if rule.level != "token":
        is_clipped = is_clipped[:, 0] if is_clipped.shape[1] == 1 else is_clipped
    return LossTerms(
        contributions_B=contributions_B,
        weights=objective.weights if rule.level == "token" else objective.weights[:, 0],
        is_clipped=is_clipped & (mask_BT if is_clipped.dim() == 2 else mask_BT.any(1)),
        is_counted=is_counted,
        is_kept_BT=is_kept_BT,
    )


def _token_objective(
    rule: Rule,
    inputs: LossInputs,
    learner_BT: torch.Tensor,
    sampler_BT: torch.Tensor,
    advantages_B1: torch.Tensor,
) -> Objective:
    staleness_BT = inputs.staleness_BT
    if rule.trace_cap > 0.0:
        return _trace_objective(rule, inputs.mask_BT, learner_BT, sampler_BT, advantages_B1)
    if rule.mixture_slope > 0.0:
        denominators_BT = importance.mixture_log_denominators(
            learner_BT if rule.mixture_gradient == "full" else learner_BT.detach(),
            sampler_BT,
            staleness_BT,
            age=rule.mixture_age,
            slope=rule.mixture_slope,
        )
        return _objective(rule, learner_BT - denominators_BT, learner_BT, advantages_B1, decision=None)
    if rule.is_score or rule.proximal == "none":
        return _objective(rule, learner_BT - sampler_BT, learner_BT, advantages_B1, decision=None)
    proximal_BT = importance.proximal_logprobs(
        learner_BT, sampler_BT, staleness_BT, is_exact=rule.proximal == "step_start"
    )
    inner = _objective(rule, learner_BT - proximal_BT, learner_BT, advantages_B1, decision=None)
    behaviour_BT = (proximal_BT - sampler_BT).clamp(max=rule.max_log_weight).exp().clamp(max=rule.behaviour_cap)
    return Objective(
        values=inner.values * behaviour_BT, weights=inner.weights * behaviour_BT, is_clipped=inner.is_clipped
    )


def _trace_objective(
    rule: Rule, mask_BT: torch.Tensor, learner_BT: torch.Tensor, sampler_BT: torch.Tensor, advantages_B1: torch.Tensor
) -> Objective:
    ratios_BT = learner_BT - sampler_BT
    log_weights_BT = importance.v_trace_log_weights(ratios_BT, mask_BT, rho_cap=rule.high, c_cap=rule.trace_cap)
    objective = score_objective(
        log_weights_BT, learner_BT, advantages_B1, low=0.0, high=float("inf"), max_log_weight=rule.max_log_weight
    )
    # What was truncated is a factor, not the product.
    is_truncated_BT = ratios_BT.detach() > math.log(rule.high)
    return Objective(values=objective.values, weights=objective.weights, is_clipped=is_truncated_BT)


def _sequence_objective(
    rule: Rule, inputs: LossInputs, learner_BT: torch.Tensor, sampler_BT: torch.Tensor, advantages_B: torch.Tensor
) -> Objective:
    mask_BT, advantages_B1 = inputs.mask_BT, advantages_B[:, None]
    is_raw = rule.normalisation == "raw"
    numerators_BT, is_token_clipped_BT = learner_BT, None
    if rule.clip == "token_log":
        ratios_BT, is_token_clipped_BT = importance.clip_token_log_ratios(
            learner_BT - sampler_BT, advantages_B, low=rule.low, high=rule.high
        )
        numerators_BT = sampler_BT + ratios_BT
    log_probs_B = importance.sequence_log_probs(numerators_BT, mask_BT, is_raw=is_raw)
    log_weights_B = log_probs_B - _log_denominators(rule, inputs, learner_BT, sampler_BT, log_probs_B)
    # A mask of single tokens takes their gradient only if each token's gradient is its own.
    is_spread = rule.m2_budget > 0.0
    log_weights = importance.spread(log_weights_B, learner_BT) if is_spread else log_weights_B[:, None]
    decision = None
    if rule.clip_on != "own":
        bases_B = inputs.log_expectations_B if rule.clip_on == "gepo" else masked_mean(sampler_BT, mask_BT)
        decision = (masked_mean(learner_BT, mask_BT) - bases_B)[:, None]
    objective = _objective(rule, log_weights, learner_BT, advantages_B1, decision=decision)
    if is_token_clipped_BT is None:
        return objective
    return Objective(values=objective.values, weights=objective.weights, is_clipped=is_token_clipped_BT)


def _log_denominators(
    rule: Rule, inputs: LossInputs, learner_BT: torch.Tensor, sampler_BT: torch.Tensor, log_probs_B: torch.Tensor
) -> torch.Tensor:
    log_denominators_B = inputs.log_denominators_B.detach()
    if rule.kl_threshold > 0.0:
        kl_B = masked_mean(kl_estimates(learner_BT, sampler_BT, inputs.mask_BT), inputs.mask_BT)
        own_B = masked_mean(sampler_BT, inputs.mask_BT)
        log_denominators_B = importance.switched_log_denominators(
            log_denominators_B, own_B, kl_B, threshold=rule.kl_threshold
        )
    if rule.defensive_fraction > 0.0:
        log_denominators_B = importance.defensive_log_denominators(
            log_denominators_B, log_probs_B, fraction=rule.defensive_fraction
        )
    return log_denominators_B


def _objective(
    rule: Rule,
    log_weights: torch.Tensor,
    learner_BT: torch.Tensor,
    advantages_B1: torch.Tensor,
    *,
    decision: torch.Tensor | None,
) -> Objective:
    if rule.is_score:
        return score_objective(
            log_weights,
            learner_BT,
            advantages_B1,
            low=rule.low,
            high=rule.high,
            is_dropping=rule.clip == "drop",
            max_log_weight=rule.max_log_weight,
        )
    has_bounds = rule.clip in ("zero", "preserve")
    return ratio_objective(
        log_weights,
        advantages_B1,
        low=rule.low if has_bounds else 0.0,
        high=rule.high if has_bounds else float("inf"),
        dual=rule.dual_clip or float("inf"),
        decision_log_weights=decision,
        is_preserving=rule.clip == "preserve",
        max_log_weight=rule.max_log_weight,
    )


def _check(inputs: LossInputs, learner_BT: torch.Tensor, coefficients_BT: torch.Tensor) -> None:
    assert learner_BT.dim() == 2
    assert learner_BT.is_floating_point()
    assert inputs.mask_BT.dtype == torch.bool
    assert learner_BT.shape == inputs.sampler_BT.shape == inputs.mask_BT.shape == coefficients_BT.shape
    assert learner_BT.shape == inputs.staleness_BT.shape == inputs.is_selected_BT.shape
    assert inputs.advantages_B.shape == inputs.log_denominators_B.shape == learner_BT.shape[:1]
    assert inputs.couplings_B.shape == inputs.log_expectations_B.shape == learner_BT.shape[:1]
