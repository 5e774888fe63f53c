"""The names under which experiments know losses of 2026 for stale data."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from heterorl.learner.loss.loss_config import Advantage, Aggregation, RatioLossConfig
from heterorl_research.losses.custom_kind import MovedLoss


class OaplConfig(MovedLoss):
    """OAPL, arXiv 2602.19362: the log ratio of a rollout is fitted to its optimal advantage."""

    OPTIONS = ("value_beta", "policy_beta")
    kind: Literal["oapl"] = "oapl"
    advantage: Advantage = "mean"
    value_beta: float = Field(default=1.0, gt=0.0)
    """Temperature of the optimal value, in units of the reward; large: the group's mean, small: its best reward."""
    policy_beta: float = Field(default=0.001, gt=0.0)
    """Reward for a nat of drift: a rollout is fitted to advantage / policy_beta nats."""


class TrmConfig(MovedLoss):
    """Trust region masking, arXiv 2512.23075: rollouts of too large a KL, at most or on average, are left out."""

    OPTIONS = ("max_kl", "mean_kl")
    LEVEL = "token"
    kind: Literal["trm"] = "trm"
    max_kl: float = Field(default=0.5, ge=0.0)
    """Largest KL that a token of a rollout may have, nats; 0: off."""
    mean_kl: float = Field(default=0.0, ge=0.0)
    """Largest mean KL of a rollout's tokens, nats; 0: off."""


class PnpoConfig(MovedLoss):
    """PNPO, arXiv 2608.01418: a token's weight is the geometric mean of the ratios up to it."""

    OPTIONS = ("cap",)
    FUNCTION = "prefix:pnpo"
    LEVEL = "token"
    kind: Literal["pnpo"] = "pnpo"
    cap: float = Field(default=2.0, gt=0.0)
    """Largest weight."""


class MinproConfig(MovedLoss):
    """MinPRO, arXiv 2601.22718: a token's weight is its ratio times the least ratio before it."""

    OPTIONS = ("cap",)
    FUNCTION = "prefix:minpro"
    LEVEL = "token"
    kind: Literal["minpro"] = "minpro"
    cap: float = Field(default=2.0, gt=0.0)
    """Largest weight."""


class CppoConfig(MovedLoss):
    """CPPO, arXiv 2606.10968: a mask of tokens that is tighter early, and behind a prefix that drifted."""

    OPTIONS = ("delta", "least_weight", "budget")
    FUNCTION = "prefix:cppo"
    LEVEL = "token"
    kind: Literal["cppo"] = "cppo"
    delta: float = Field(default=0.2, gt=0.0)
    """Largest weighted shift of a token's probability."""
    least_weight: float = Field(default=0.8, gt=0.0, le=1.0)
    """Weight of the last token's shift; the first has 1."""
    budget: float = Field(default=0.02, ge=0.0)
    """Mean shift of a prefix behind which the limit stays whole."""


class DppoConfig(MovedLoss):
    """DPPO, arXiv 2602.04879, as prime-rl runs it: a mask by probabilities and a square of log ratios."""

    OPTIONS = ("divergence", "mask_low", "mask_high", "square_coefficient")
    LEVEL = "token"
    kind: Literal["dppo"] = "dppo"
    kl_coefficient: float = Field(default=0.0, ge=0.0, le=100.0)
    """Weight of KL(q || p); the loss has a square of its own in its place."""
    advantage: Advantage = "mean"
    aggregation: Aggregation = "token_mean"
    divergence: Literal["tv", "kl"] = "tv"
    """Difference of a token's probabilities (`tv`), or the binary KL of them (`kl`)."""
    mask_low: float = Field(default=0.2, ge=0.0)
    """Tokens of bad rollouts further below the sampler than this get no gradient."""
    mask_high: float = Field(default=0.2, ge=0.0)
    """Tokens of good rollouts further above the sampler than this get no gradient."""
    square_coefficient: float = Field(default=0.001, ge=0.0)
    """Weight of the square of the log ratio, at every token."""


class MaxrlConfig(RatioLossConfig, MovedLoss):
    """MaxRL, arXiv 2602.02710: advantages over the success rate, with GRPO's ratio and clip."""

    OPTIONS = ("eps_low", "eps_high")
    LEVEL = "token"
    kind: Literal["maxrl"] = "maxrl"
    advantage: Advantage = "mean"
