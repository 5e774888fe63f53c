"""Losses that multiply A log p by a constant weight: REINFORCE, truncated and masked ratios."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from heterorl.learner.loss.options import Advantage, Aggregation, LossOptions


class ReinforceConfig(LossOptions):
    """The policy gradient without correction, Williams 1992: A log p, whoever sampled."""

    kind: Literal["reinforce"] = "reinforce"
    advantage: Advantage = "mean"
    aggregation: Aggregation = "token_mean"


class ToprConfig(LossOptions):
    """TOPR, arXiv 2503.14286: good rollouts by likelihood, bad ones by the sequence ratio truncated to [0, 1]."""

    kind: Literal["topr"] = "topr"
    advantage: Advantage = "mean"
    aggregation: Aggregation = "sequence_sum"


class CispoConfig(LossOptions):
    """CISPO, arXiv 2506.13585: truncated token weights multiply the likelihood's gradient; no token loses it."""

    kind: Literal["cispo"] = "cispo"
    aggregation: Aggregation = "token_mean"
    eps_low: float = Field(default=1.0, ge=0.0, le=1.0)
    """Weights are raised to 1 - eps_low; 1 leaves the lower side alone."""
    eps_high: float = Field(default=0.2, ge=0.0, le=100.0)
    """Weights are lowered to 1 + eps_high."""


class TisConfig(LossOptions):
    """Truncated importance sampling (Yao et al. 2025; Ionides 2008): weights min(r, cap).

    `level = "sequence"`, `cap = 8` and `step_size = "ess"` take two ideas of VCPO, without its baseline.
    """

    kind: Literal["tis"] = "tis"
    advantage: Advantage = "mean"
    aggregation: Aggregation = "token_mean"
    level: Literal["token", "sequence", "geometric"] = "token"
    """Weight of a token, product over the rollout, or the product's geometric mean per token."""
    cap: float = Field(default=2.0, gt=0.0)
    """Largest weight."""


class MisConfig(LossOptions):
    """Masked importance sampling: weights outside [floor, cap] count 0 instead of being truncated."""

    kind: Literal["mis"] = "mis"
    advantage: Advantage = "mean"
    aggregation: Aggregation = "token_mean"
    level: Literal["token", "sequence", "geometric"] = "sequence"
    """Weight of a token, product over the rollout, or the product's geometric mean per token."""
    floor: float = Field(default=0.0, ge=0.0)
    """Smallest weight that counts."""
    cap: float = Field(default=3.0, gt=0.0)
    """Largest weight that counts."""

    @model_validator(mode="after")
    def _check_range(self) -> MisConfig:
        if self.floor >= self.cap:
            raise ValueError("floor is not below cap")
        return self


class ImpalaConfig(LossOptions):
    """V-trace, arXiv 1802.01561, with the reward at the last token and the group's mean as value of every state."""

    kind: Literal["impala"] = "impala"
    advantage: Advantage = "mean"
    aggregation: Aggregation = "token_mean"
    rho_cap: float = Field(default=1.0, gt=0.0)
    """Largest ratio of a token at which the policy is corrected."""
    c_cap: float = Field(default=1.0, gt=0.0)
    """Largest ratio of a later token through which the reward comes back."""
