"""Keys that compose: of every loss, of clipped ratios, of one weight per rollout, of one denominator per group."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from heterorl.common.process.config import Config

Denominator = Literal["contraharmonic", "arithmetic", "geometric", "leave_one_out"]
Advantage = Literal["mean", "mean_std", "beta"]
Aggregation = Literal["sequence_mean", "token_mean", "max_length", "sequence_sum", "length_power"]


class LossOptions(Config):
    """What composes with every algorithm."""

    kl_coefficient: float = Field(default=0.005, ge=0.0, le=100.0)
    """Weight of the penalty KL(sampler || learner); 0 turns it off."""
    aggregation: Aggregation = "sequence_mean"
    """How token terms are averaged: every rollout counts equally, every token counts equally, every token counts
    1 / (rollouts x max_new_tokens), tokens are summed and rollouts averaged, or rollouts count by a power of length."""
    length_power: float = Field(default=1.0, ge=0.0, le=2.0)
    """With aggregation length_power: a rollout of T tokens counts in proportion to T^-length_power per token."""
    advantage: Advantage = "mean_std"
    """Reward minus the group's mean, that over the group's standard deviation, or that over a Beta density (BNPO)."""
    opsm_threshold: float = Field(default=0.0, ge=0.0)
    """Rollouts worse than their group whose mean of log q - log p exceeds this, nats, are left out; 0 turns it off."""
    drift_limit: float = Field(default=0.0, ge=0.0)
    """Rollouts worse than their group whose sum of log q - log p over the completion exceeds this, nats, are left out;
    it means the same at every length; 0 turns it off."""
    m2_budget: float = Field(default=0.0, ge=0.0)
    """Harmful tokens with the largest log ratios are left out until their mean square is at most this; 0 is off."""
    max_log_weight: float = Field(default=3.0, gt=0.0, le=20.0)
    """Weights, and ratios in the KL penalty, beyond e^this are capped without gradient: whatever log-probs a site
    states, no rollout or token counts for more than e^3 = 20 of its peers. 20 is the published algorithms, uncapped."""
    reference_kl: float = Field(default=0.0, ge=0.0, le=100.0)
    """Weight of the penalty KL(learner || reference model), GRPO's beta; 0 turns it off. Backends torch and fsdp2."""
    drop_uniform_groups: bool = False
    """Whether groups whose rewards are all equal leave the step, counts and KL penalty included."""
    step_size: Literal["constant", "ess", "ess_uncapped"] = "constant"
    """Learning rate as configured, or times sqrt(ESS / rollouts) of the step's importance weights, in which ratios of
    whole rollouts are capped at 8, or of those ratios up to e^max_log_weight (VCPO, which has no cap)."""


class RatioLossConfig(LossOptions):
    """What the clipped-ratio losses share."""

    eps_low: float = Field(default=0.2, ge=0.0, le=1.0)
    """A weight below 1 - eps_low of a rollout worse than its group's mean gets no gradient."""
    eps_high: float = Field(default=0.2, ge=0.0, le=100.0)
    """A weight above 1 + eps_high of a rollout better than its group's mean gets no gradient."""
    dual_clip: float = Field(default=0.0, ge=0.0, le=1e6)
    """A weight above this of a rollout worse than its group's mean gets no gradient either, so that no term is below
    dual_clip x A (arXiv 1912.09729; TRL's delta); usual is 3, 0 turns it off."""

    @model_validator(mode="after")
    def _check_dual_clip(self) -> RatioLossConfig:
        if 0.0 < self.dual_clip <= 1.0:
            raise ValueError("dual_clip is a largest weight: 0 for none, or above 1")
        return self


class SequenceLossConfig(RatioLossConfig):
    """What losses with one weight per rollout share."""

    clip: Literal["zero", "preserve", "none"] = "zero"
    """Beyond the clip range: no gradient, the gradient of the bound (c-GEPO and c-GSPO), or no clipping at all."""
    clip_on: Literal["own", "gepo", "gspo"] = "own"
    """Which weight decides what is clipped: the loss's own, GEPO's or GSPO's."""
    positive_weight: Literal["own", "one", "one_clipped"] = "own"
    """Weight of rollouts better than their group: the loss's own, or 1 and the plain log-likelihood as in TOPR, without
    the upper clip or with it."""
    negative_weight: Literal["own", "one", "product"] = "own"
    """Weight of rollouts worse than their group: the loss's own with its clip; or of the plain log-likelihood 1, or the
    truncated ratio of the whole rollout min(1, prod_t p / q) as in TOPR."""


class GroupDenominatorConfig(SequenceLossConfig):
    """What losses with one denominator per group share."""

    advantage: Advantage = "mean"
    denominator: Denominator = "contraharmonic"
    """Mean of the group's sampler probabilities: contraharmonic is the paper's, arithmetic the unbiased estimate;
    leave_one_out is the contraharmonic mean of the others, which a rollout's own probability does not move."""
