"""The learning rule as configuration: a discriminated union on `kind`; reading it decides nothing."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from services.common.config import Config

Denominator = Literal["contraharmonic", "arithmetic", "geometric"]
Advantage = Literal["mean", "mean_std"]
Aggregation = Literal["sequence_mean", "token_mean", "max_length"]


class RatioLossConfig(Config):
    """What the clipped-ratio losses share."""

    eps_low: float = Field(default=0.2, ge=0.0, le=1.0)
    """A weight below 1 - eps_low of a rollout worse than its group's mean gets no gradient."""
    eps_high: float = Field(default=0.2, ge=0.0, le=100.0)
    """A weight above 1 + eps_high of a rollout better than its group's mean gets no gradient."""
    kl_coefficient: float = Field(default=0.005, ge=0.0, le=100.0)
    """Weight of the penalty KL(sampler || learner); 0 turns it off."""
    aggregation: Aggregation = "sequence_mean"
    """How token terms are averaged: every rollout counts equally, every token counts equally, or every token
    counts 1 / (rollouts x max_new_tokens)."""


class GepoConfig(RatioLossConfig):
    """Group expectation policy optimization, arXiv 2508.17850: one denominator for all rollouts of a prompt."""

    kind: Literal["gepo"] = "gepo"
    denominator: Denominator = "contraharmonic"
    """Mean of the group's sampler probabilities: contraharmonic is the paper's, arithmetic the unbiased estimate."""
    advantage: Advantage = "mean"
    """Reward minus the group's mean, or that divided by the group's standard deviation."""


class GspoConfig(RatioLossConfig):
    """Group sequence policy optimization, arXiv 2507.18071: every rollout has its own denominator."""

    kind: Literal["gspo"] = "gspo"
    advantage: Advantage = "mean_std"
    """Reward minus the group's mean, or that divided by the group's standard deviation."""


class GrpoConfig(RatioLossConfig):
    """Group relative policy optimization, arXiv 2402.03300: every token has its own denominator.

    With `advantage = "mean"` and `aggregation = "max_length"` this is Dr. GRPO, arXiv 2503.20783.
    """

    kind: Literal["grpo"] = "grpo"
    advantage: Advantage = "mean_std"
    """Reward minus the group's mean, or that divided by the group's standard deviation."""


LossConfig = Annotated[GepoConfig | GspoConfig | GrpoConfig, Field(discriminator="kind")]
