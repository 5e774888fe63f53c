"""Losses with one ratio per rollout: GEPO and its relatives, GSPO, GMPO."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from heterorl.learner.loss.options import (
    Advantage,
    GroupDenominatorConfig,
    LossOptions,
    RatioLossConfig,
    SequenceLossConfig,
)


class GepoConfig(GroupDenominatorConfig):
    """Group expectation policy optimization, arXiv 2508.17850: one denominator for all rollouts of a prompt."""

    kind: Literal["gepo"] = "gepo"
    scope: Literal["prompt_group", "microbatch"] = "prompt_group"
    """Rollouts the mean is over: the prompt's (paper), or whatever shares the pass (its published code). The latter
    depends on micro_batch_tokens and is for reproduction only."""
    normalisation: Literal["length", "raw"] = "length"
    """Probabilities as mean or as sum of token log-probs; raw puts all weight on the shortest rollout."""


class GepoOneSidedConfig(GroupDenominatorConfig):
    """GEPO without the upper half of its clip: rollouts better than their group keep their gradient at any weight."""

    kind: Literal["gepo_1s"] = "gepo_1s"
    eps_high: float = Field(default=100.0, ge=0.0, le=100.0)


class GepoProductConfig(GroupDenominatorConfig):
    """GEPO without upper clip for good rollouts, TOPR's min(1, prod_t p / q) for bad ones."""

    kind: Literal["gepo_product"] = "gepo_product"
    eps_high: float = Field(default=100.0, ge=0.0, le=100.0)
    negative_weight: Literal["own", "one", "product"] = "product"


class GepoWholeConfig(GroupDenominatorConfig):
    """GEPO without upper clip for good rollouts; bad ones keep its weight and lower clip until their whole completion
    has become drift_limit nats less likely than when it was drawn."""

    kind: Literal["gepo_whole"] = "gepo_whole"
    eps_high: float = Field(default=100.0, ge=0.0, le=100.0)
    drift_limit: float = Field(default=1.1, ge=0.0)


class GepoPlusConfig(GroupDenominatorConfig):
    """GEPO for rollouts far from the sampler, GSPO for the others; later code of the authors of arXiv 2508.17850."""

    kind: Literal["gepo_plus"] = "gepo_plus"
    kl_threshold: float = Field(default=0.002, gt=0.0)
    """Rollouts whose mean KL estimate per token, nats, is below this use their own denominator."""


class EqpConfig(RatioLossConfig):
    """GEPO's variant that averages learner probabilities: D = sum_j q^_j p_j, differentiated through D."""

    kind: Literal["eqp"] = "eqp"
    advantage: Advantage = "mean"

    @model_validator(mode="after")
    def _check_mask(self) -> EqpConfig:
        if self.m2_budget:
            raise ValueError("m2_budget cannot be combined with a denominator that couples whole rollouts")
        return self


class GspoConfig(SequenceLossConfig):
    """Group sequence policy optimization, arXiv 2507.18071: every rollout has its own denominator."""

    kind: Literal["gspo"] = "gspo"


class DsGspoConfig(SequenceLossConfig):
    """GSPO with a defensive mixture as denominator: (1 - a) q_i + a sg(p_i); Hesterberg 1995."""

    kind: Literal["ds_gspo"] = "ds_gspo"
    defensive_fraction: float = Field(default=0.005, gt=0.0, lt=1.0)
    """Share a of the learner's own probability in the denominator."""


class GmpoConfig(LossOptions):
    """Geometric-mean policy optimization, arXiv 2507.20673: token log ratios are clipped, then averaged."""

    kind: Literal["gmpo"] = "gmpo"
    eps_log: float = Field(default=0.4, gt=0.0)
    """Width of the clip range of token log ratios, nats."""
