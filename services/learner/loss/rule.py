"""A loss as the composition of its parts; every algorithm of the catalogue is one value of this class."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from heterorl.learner.loss.config import Advantage, Aggregation, Denominator


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What the learner computes: weight x clip x advantage x aggregation x masks x KL x step size.

    Example: Rule(level="sequence", denominator="contraharmonic")
    """

    # Importance weight: exp(log p - log D).
    level: Literal["token", "sequence", "spread"] = "token"
    """One weight per token, one per rollout, or one per rollout whose gradient is each token's own."""
    denominator: Denominator | Literal["own", "expected_learner"] = "own"
    """D: the sampler's own probability, a mean of the group's, or sum_j q^_j p_j with its gradient."""
    normalisation: Literal["length", "raw"] = "length"
    """Rollout probabilities from the mean or from the sum of token log-probs."""
    scope: Literal["prompt_group", "microbatch"] = "prompt_group"
    kl_threshold: float = 0.0
    """Rollouts with a mean k3 below this use their own denominator; 0 turns it off."""
    defensive_fraction: float = 0.0
    """a of D <- (1 - a) D + a sg(p)."""
    proximal: Literal["none", "step_start", "loglinear"] = "none"
    behaviour_cap: float = 1.0

    # How the weight enters the loss.
    clip: Literal["zero", "preserve", "none", "truncate", "drop", "token_log"] = "zero"
    """zero, preserve, none: w A with PPO's one-sided clip, its gradient-preserving form, without; truncate, drop:
    sg(w) A log p with w limited to the range or 0 outside it; token_log: clip log ratios, then average (GMPO)."""
    low: float = 0.0
    high: float = float("inf")
    clip_on: Literal["own", "gepo", "gspo"] = "own"
    positive_weight: Literal["own", "one"] = "own"

    # What is averaged, and how.
    advantage: Advantage = "mean"
    aggregation: Aggregation = "sequence_mean"
    length_power: float = 1.0
    opsm_threshold: float = 0.0
    m2_budget: float = 0.0
    drop_uniform_groups: bool = False
    kl_coefficient: float = 0.0
    max_log_weight: float = 20.0
    """Weights, and ratios in the KL penalty, beyond e^this are capped without gradient."""
    step_size: Literal["constant", "ess"] = "constant"

    @property
    def is_score(self) -> bool:
        """Whether the weight is a constant that multiplies A log p."""
        return self.clip in ("truncate", "drop")

    @property
    def has_group_denominator(self) -> bool:
        """Whether all rollouts of a group share one denominator."""
        return self.denominator != "own"

    @property
    def needs_first_pass(self) -> bool:
        """Whether the loss of one rollout depends on the learner's log-probs of others."""
        return self.denominator == "expected_learner" or self.m2_budget > 0.0
