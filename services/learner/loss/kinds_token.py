"""Losses with one ratio per token, clipped or masked: GRPO and its relatives."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from heterorl.learner.loss.options import Advantage, Aggregation, LossOptions, RatioLossConfig


class GrpoConfig(RatioLossConfig):
    """Group relative policy optimization, arXiv 2402.03300: every token has its own denominator."""

    kind: Literal["grpo"] = "grpo"


class DrGrpoConfig(RatioLossConfig):
    """Dr. GRPO, arXiv 2503.20783: GRPO without division by the deviation or by the rollout's length."""

    kind: Literal["dr_grpo"] = "dr_grpo"
    advantage: Advantage = "mean"
    aggregation: Aggregation = "max_length"


class DapoConfig(RatioLossConfig):
    """DAPO, arXiv 2503.14476: wider upper clip and mean over all tokens; optionally without groups of one reward."""

    kind: Literal["dapo"] = "dapo"
    eps_high: float = Field(default=0.28, ge=0.0, le=100.0)
    aggregation: Aggregation = "token_mean"


class BnpoConfig(RatioLossConfig):
    """BNPO, arXiv 2506.02864: rewards in [0, 1] are normalised by a Beta density fitted to the step's prompts."""

    kind: Literal["bnpo"] = "bnpo"
    eps_high: float = Field(default=0.28, ge=0.0, le=100.0)
    advantage: Advantage = "beta"
    aggregation: Aggregation = "token_mean"


class DeltaLConfig(RatioLossConfig):
    """Delta-L normalisation, arXiv 2509.07558: GRPO whose rollouts count by T^-length_power."""

    kind: Literal["delta_l"] = "delta_l"
    advantage: Advantage = "mean"
    aggregation: Aggregation = "length_power"


class OpsmConfig(RatioLossConfig):
    """GRPO with off-policy sequence masking (DeepSeek-V3.2): bad rollouts that have drifted are left out."""

    kind: Literal["opsm"] = "opsm"
    opsm_threshold: float = Field(default=0.5, gt=0.0)


class M2poConfig(LossOptions):
    """M2PO, arXiv 2510.01161: token ratios without clip, harmful tokens left out to bound the second moment."""

    kind: Literal["m2po"] = "m2po"
    aggregation: Aggregation = "token_mean"
    m2_budget: float = Field(default=0.04, gt=0.0)


class DecoupledPpoConfig(RatioLossConfig):
    """Decoupled PPO, arXiv 2505.24298: clip around a proximal policy, weigh by proximal over sampler."""

    kind: Literal["decoupled_ppo"] = "decoupled_ppo"
    aggregation: Aggregation = "token_mean"
    proximal: Literal["step_start", "loglinear"] = "step_start"
    """The policy at the start of the step, exact, which one optimizer step per batch never leaves; or A-3PO's estimate
    of the policy one version ago from the sampler's log-probs and versions (arXiv 2512.06547), which does clip."""
    behaviour_cap: float = Field(default=5.0, gt=0.0)
    """Largest proximal-over-sampler weight."""


class MoisConfig(RatioLossConfig):
    """Mixture importance sampling, code of arXiv 2508.17850: D = a p + (1 - a) q with a share a that falls with age."""

    kind: Literal["mois"] = "mois"
    advantage: Advantage = "mean"
    mixture_age: float = Field(default=8.0, ge=0.0)
    """Age at which the share of the learner is one half, versions; a = 1 / (1 + exp(slope (age - this)))."""
    mixture_slope: float = Field(default=1.0, gt=0.0)
    """How sharply the share falls with age, per version."""
    mixture_gradient: Literal["none", "full"] = "none"
    """Whether the denominator is a constant, or differentiated as in the published code; then fresh tokens, of which it
    is almost the numerator, get almost no gradient."""
