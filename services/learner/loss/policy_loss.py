"""A loss spec applied to one micro-batch: importance weight, clip, masks, average.

Guarantees: gradient reaches learner log-probs only; contributions of micro-batches add up to the whole; values
in padding, NaN included, have no effect. Suffixes: B sequences, T completion tokens.
"""

import math

import torch

from heterorl.learner.loss import importance
from heterorl.learner.loss.custom import LossBatch, batch_of, terms_of
from heterorl.learner.loss.group import masked_mean
from heterorl.learner.loss.importance import has_not_drifted
from heterorl.learner.loss.loss_spec import LossSpec
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


def policy_loss(
    spec: LossSpec,
    inputs: LossInputs,
    learner_BT: torch.Tensor,
    *,
    coefficients_BT: torch.Tensor,
    step: LossBatch | None = None,
) -> LossTerms:
    """-sum_it c_it k_it J_it: coefficients c, masks k, objective J of `objectives`.

    Gradient reaches only `learner_BT`. `step` has all rollouts of the step, for a custom loss that takes them. Raises
    ConfigError if a custom loss raised, or returned an invalid result.
    """
    mask_BT = inputs.mask_BT
    _check(inputs, learner_BT, coefficients_BT)
    learner_BT = torch.where(mask_BT, learner_BT, 0.0)
    sampler_BT = torch.where(mask_BT, inputs.sampler_BT.detach(), 0.0)
    advantages_B = inputs.advantages_B.detach()

    is_kept_BT = mask_BT & inputs.is_selected_BT
    for limit, is_total in ((spec.opsm_threshold, False), (spec.drift_limit, True)):
        if limit > 0.0:
            is_kept_B = has_not_drifted(learner_BT, sampler_BT, mask_BT, advantages_B, limit=limit, is_total=is_total)
            is_kept_BT = is_kept_BT & is_kept_B[:, None]
    if spec.custom is not None:
        # Within the function 0 times an infinite derivative is NaN; a left-out token gets none.
        learner_BT = torch.where(is_kept_BT, learner_BT, learner_BT.detach())
        batch = batch_of(inputs, learner_BT, coefficients_BT=coefficients_BT, max_log_weight=spec.max_log_weight)
        return terms_of(spec.custom(batch, step), batch, is_kept_BT)
    coefficients_BT = torch.where(is_kept_BT, coefficients_BT, 0.0)

    if spec.level == "token":
        objective = _token_objective(spec, inputs, learner_BT, sampler_BT, advantages_B[:, None])
    else:
        objective = _sequence_objective(spec, inputs, learner_BT, sampler_BT, advantages_B)
    if spec.positive_weight != "own":
        objective = with_likelihood_of_good(
            objective, learner_BT, advantages_B[:, None], is_clip_kept=spec.positive_weight == "one_clipped"
        )
    if spec.negative_weight != "own":
        # The weight is 1, or the whole rollout's ratio.
        logs_BT = learner_BT - sampler_BT if spec.negative_weight == "product" else torch.zeros_like(learner_BT)
        logs_B1 = logs_BT.sum(1, keepdim=True)
        objective = with_likelihood_of_bad(objective, learner_BT, advantages_B[:, None], logs_B1)

    contributions_B = -(coefficients_BT * objective.values).sum(1)
    if spec.denominator == "expected_learner":
        means_B = masked_mean(learner_BT, mask_BT)
        contributions_B = contributions_B + inputs.couplings_B.detach() * (means_B - means_B.detach())
    is_clipped = objective.is_clipped
    if spec.level != "token":
        is_clipped = is_clipped[:, 0] if is_clipped.shape[1] == 1 else is_clipped
    return LossTerms(
        contributions_B=contributions_B,
        weights=objective.weights if spec.level == "token" else objective.weights[:, 0],
        is_clipped=is_clipped & (mask_BT if is_clipped.dim() == 2 else mask_BT.any(1)),
        is_kept_BT=is_kept_BT,
    )


def _token_objective(
    spec: LossSpec, inputs: LossInputs, learner_BT: torch.Tensor, sampler_BT: torch.Tensor, advantages_B1: torch.Tensor
) -> Objective:
    staleness_BT = inputs.staleness_BT
    if spec.trace_cap > 0.0:
        return _trace_objective(spec, inputs.mask_BT, learner_BT, sampler_BT, advantages_B1)
    if spec.mixture_slope > 0.0:
        denominators_BT = importance.mixture_log_denominators(
            learner_BT if spec.mixture_gradient == "full" else learner_BT.detach(),
            sampler_BT,
            staleness_BT,
            age=spec.mixture_age,
            slope=spec.mixture_slope,
        )
        return _objective(spec, learner_BT - denominators_BT, learner_BT, advantages_B1)
    if spec.is_score or spec.proximal == "none":
        return _objective(spec, learner_BT - sampler_BT, learner_BT, advantages_B1)
    proximal_BT = importance.proximal_logprobs(
        learner_BT, sampler_BT, staleness_BT, is_exact=spec.proximal == "step_start"
    )
    behaviour_logs_BT = (proximal_BT - sampler_BT).clamp(max=spec.max_log_weight)
    behaviour_BT = behaviour_logs_BT.exp().clamp(max=spec.behaviour_cap)
    # The bound holds for the product of both ratios.
    limits_BT = spec.max_log_weight - behaviour_logs_BT.clamp(0.0, max(0.0, math.log(spec.behaviour_cap)))
    inner = _objective(spec, learner_BT - proximal_BT, learner_BT, advantages_B1, max_log_weight=limits_BT)
    return Objective(
        values=inner.values * behaviour_BT, weights=inner.weights * behaviour_BT, is_clipped=inner.is_clipped
    )


def _trace_objective(
    spec: LossSpec,
    mask_BT: torch.Tensor,
    learner_BT: torch.Tensor,
    sampler_BT: torch.Tensor,
    advantages_B1: torch.Tensor,
) -> Objective:
    ratios_BT = learner_BT - sampler_BT
    log_weights_BT = importance.v_trace_log_weights(ratios_BT, mask_BT, rho_cap=spec.high, c_cap=spec.trace_cap)
    objective = score_objective(
        log_weights_BT, learner_BT, advantages_B1, low=0.0, high=float("inf"), max_log_weight=spec.max_log_weight
    )
    # A factor was truncated, not the product.
    is_truncated_BT = ratios_BT.detach() > math.log(spec.high)
    return Objective(values=objective.values, weights=objective.weights, is_clipped=is_truncated_BT)


def _sequence_objective(
    spec: LossSpec, inputs: LossInputs, learner_BT: torch.Tensor, sampler_BT: torch.Tensor, advantages_B: torch.Tensor
) -> Objective:
    mask_BT, advantages_B1 = inputs.mask_BT, advantages_B[:, None]
    is_raw = spec.normalisation == "raw"
    numerators_BT, is_token_clipped_BT = learner_BT, None
    if spec.clip == "token_log":
        ratios_BT, is_token_clipped_BT = importance.clip_token_log_ratios(
            learner_BT - sampler_BT, advantages_B, low=spec.low, high=spec.high
        )
        numerators_BT = sampler_BT + ratios_BT
    log_probs_B = torch.where(mask_BT, numerators_BT, 0.0).sum(1) if is_raw else masked_mean(numerators_BT, mask_BT)
    log_weights_B = log_probs_B - _log_denominators(spec, inputs, learner_BT, sampler_BT, log_probs_B)
    log_weights = log_weights_B[:, None]
    if spec.m2_budget > 0.0:
        # A mask of single tokens takes their gradient only if each token's gradient is its own. Coefficients divide by
        # the length, which is right for a mean.
        scale_B1 = mask_BT.sum(1, keepdim=True) if is_raw else 1.0
        log_weights = log_weights.detach() + scale_B1 * (numerators_BT - numerators_BT.detach())
    decision = None
    if spec.clip_on != "own":
        bases_B = inputs.log_expectations_B if spec.clip_on == "gepo" else masked_mean(sampler_BT, mask_BT)
        decision = (masked_mean(learner_BT, mask_BT) - bases_B)[:, None]
    objective = _objective(spec, log_weights, learner_BT, advantages_B1, decision=decision)
    if is_token_clipped_BT is None:
        return objective
    is_clipped_BT = is_token_clipped_BT | objective.is_clipped
    return Objective(values=objective.values, weights=objective.weights, is_clipped=is_clipped_BT)


def _log_denominators(
    spec: LossSpec, inputs: LossInputs, learner_BT: torch.Tensor, sampler_BT: torch.Tensor, log_probs_B: torch.Tensor
) -> torch.Tensor:
    log_denominators_B = inputs.log_denominators_B.detach()
    if spec.kl_threshold > 0.0:
        kl_B = masked_mean(kl_estimates(learner_BT, sampler_BT, inputs.mask_BT), inputs.mask_BT)
        own_B = masked_mean(sampler_BT, inputs.mask_BT)
        log_denominators_B = torch.where(kl_B.detach() < spec.kl_threshold, own_B, log_denominators_B)
    if spec.defensive_fraction > 0.0:
        log_denominators_B = importance.defensive_log_denominators(
            log_denominators_B, log_probs_B, fraction=spec.defensive_fraction
        )
    return log_denominators_B


def _objective(
    spec: LossSpec,
    log_weights: torch.Tensor,
    learner_BT: torch.Tensor,
    advantages_B1: torch.Tensor,
    *,
    decision: torch.Tensor | None = None,
    max_log_weight: torch.Tensor | None = None,
) -> Objective:
    if spec.is_score:
        return score_objective(
            log_weights,
            learner_BT,
            advantages_B1,
            low=spec.low,
            high=spec.high,
            is_dropping=spec.clip == "drop",
            max_log_weight=spec.max_log_weight,
        )
    has_bounds = spec.clip in ("zero", "preserve")
    return ratio_objective(
        log_weights,
        advantages_B1,
        low=spec.low if has_bounds else 0.0,
        high=spec.high if has_bounds else float("inf"),
        dual=spec.dual_clip or float("inf"),
        decision_log_weights=decision,
        is_preserving=spec.clip == "preserve",
        max_log_weight=spec.max_log_weight if max_log_weight is None else max_log_weight,
    )


def _check(inputs: LossInputs, learner_BT: torch.Tensor, coefficients_BT: torch.Tensor) -> None:
    assert learner_BT.dim() == 2
    assert learner_BT.is_floating_point()
    assert inputs.mask_BT.dtype == torch.bool
    assert learner_BT.shape == inputs.sampler_BT.shape == inputs.mask_BT.shape == coefficients_BT.shape
    assert learner_BT.shape == inputs.staleness_BT.shape == inputs.is_selected_BT.shape
    assert inputs.advantages_B.shape == inputs.log_denominators_B.shape == learner_BT.shape[:1]
    assert inputs.couplings_B.shape == inputs.log_expectations_B.shape == learner_BT.shape[:1]
