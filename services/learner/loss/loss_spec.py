"""A loss as a value of its parts.

Only this module reads `kind`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, get_args

from heterorl.learner.loss.loss_config import Advantage, Aggregation, CustomLossConfig, Denominator, LossConfig

if TYPE_CHECKING:
    from heterorl.learner.loss.custom import CustomLoss


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSpec:
    """A loss: weight, clip, advantage, aggregation, masks, KL, step size.

    Parts without a description are keys of `loss_config`, where they are described. Example: LossSpec(level="sequence",
    denominator="contraharmonic")
    """

    custom: CustomLoss | None = None
    """The user's own function, in place of weight and clip."""

    # Importance weight: exp(log p - log D).
    level: Literal["token", "sequence"] = "token"
    """One weight per token, or one per rollout."""
    denominator: Denominator | Literal["own", "expected_learner"] = "own"
    """D: the sampler's own probability, a mean of the group's, or sum_j q^_j p_j with its gradient."""
    normalisation: Literal["length", "raw"] = "length"
    scope: Literal["prompt_group", "microbatch"] = "prompt_group"
    kl_threshold: float = 0.0
    defensive_fraction: float = 0.0
    mixture_slope: float = 0.0
    """D <- a p + (1 - a) q with a = 1 / (1 + exp(slope (staleness - mixture_age))); 0 turns it off."""
    mixture_age: float = 0.0
    mixture_gradient: Literal["none", "full"] = "none"
    proximal: Literal["none", "step_start", "loglinear"] = "none"
    """Policy around which decoupled PPO clips: none, the learner at the start of the step, or an estimate from ages."""
    behaviour_cap: float = 1.0

    # How the weight enters the loss.
    clip: Literal["zero", "preserve", "none", "truncate", "drop", "token_log"] = "zero"
    """zero, preserve, none: w A with PPO's one-sided clip, its gradient-preserving form, without; truncate, drop:
    sg(w) A log p with w limited to the range or 0 outside it; token_log: clip log ratios, then average (GMPO)."""
    low: float = 0.0
    """Lower end of the range: a ratio; under token_log a log ratio, nats."""
    high: float = float("inf")
    """Upper end of the range, in the unit of `low`."""
    clip_on: Literal["own", "gepo", "gspo"] = "own"
    dual_clip: float = 0.0
    trace_cap: float = 0.0
    """c of V-trace, whose rho is `high`: token weights times truncated ratios of all later tokens; 0 turns it off."""
    positive_weight: Literal["own", "one", "one_clipped"] = "own"
    negative_weight: Literal["own", "one", "product"] = "own"

    # Terms of the average, and their weights.
    advantage: Advantage = "mean"
    aggregation: Aggregation = "sequence_mean"
    length_power: float = 1.0
    opsm_threshold: float = 0.0
    drift_limit: float = 0.0
    m2_budget: float = 0.0
    drop_uniform_groups: bool = False
    sampler_kl: float = 0.0
    reference_kl: float = 0.0
    max_log_weight: float = 20.0
    step_size: Literal["constant", "ess", "ess_uncapped"] = "constant"

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
        """Whether a rollout's loss depends on the learner's log-probs of others."""
        return (
            self.denominator == "expected_learner"
            or self.m2_budget > 0.0
            or (self.custom is not None and self.custom.takes_step)
        )

    @property
    def needs_reference(self) -> bool:
        """Whether the loss reads log-probs of a frozen model."""
        return self.reference_kl > 0.0 or (self.custom is not None and self.custom.reads_reference)

    @property
    def needs_staleness(self) -> bool:
        """Whether the loss reads the age of each token."""
        return self.proximal == "loglinear" or self.mixture_slope > 0.0 or self.custom is not None


ALGORITHMS: dict[str, dict[str, Any]] = {
    each.model_fields["kind"].default: each.PARTS
    for each in get_args(get_args(LossConfig)[0])
    if each is not CustomLossConfig
}
"""Parts that each kind fixes, from its class; others come from its keys or the defaults of `LossSpec`."""

LEVELS: dict[str, dict[str, Any]] = {
    "token": {"level": "token"},
    "sequence": {"level": "sequence", "normalisation": "raw"},
    "geometric": {"level": "sequence", "normalisation": "length"},
}

KL_TOKEN = 0.001
"""KL a token between two engines with the same weights, nats, where the run has not measured it; from the paper's
published log."""
LEAST_SHARE = 0.5
"""Share of the bad rollouts below which a start warns, and an alert fires."""

_PARTS = {field.name for field in fields(LossSpec)}
UNBOUND_TOKENS = 100
"""Tokens of a completion from which a mean over them stays near 1 however far the learner has moved."""


def loss_spec_of(config: LossConfig) -> LossSpec:
    """The parts that the configuration names.
    Raises ConfigError if a custom function cannot be loaded, or takes other options."""
    keys: dict[str, Any] = dict(config)
    parts = {name: value for name, value in keys.items() if name in _PARTS} | config.PARTS
    if isinstance(config, CustomLossConfig):
        # Here, so that a configuration is read without torch.
        from heterorl.learner.loss.custom import load_loss

        parts |= {"custom": load_loss(config)}
    if "eps_low" in keys:
        parts |= {"low": 1.0 - keys["eps_low"], "high": 1.0 + keys["eps_high"]}
    if "eps_log" in keys:
        parts |= {"low": -keys["eps_log"], "high": keys["eps_log"]}
    if "cap" in keys:
        parts |= {"low": keys.get("floor", 0.0), "high": keys["cap"]}
    if "rho_cap" in keys:
        parts |= {"high": keys["rho_cap"], "trace_cap": keys["c_cap"]}
    if config.kind in ("mis", "tis"):
        parts |= LEVELS[config.level]
    return LossSpec(**parts)


def open_share(spec: LossSpec, *, max_new_tokens: int, kl_token: float = KL_TOKEN) -> float:
    """Share of bad rollouts' gradient that a whole-completion loss leaves.

    It is 1 for any other loss. Token log ratios are taken as independent, with mean -d and variance 2 d for d =
    `kl_token`: their sum over T tokens is normal with mean -T d and variance 2 T d.
    """
    total = max_new_tokens * kl_token
    deviation = math.sqrt(2.0 * total)
    share = 1.0
    if spec.drift_limit > 0.0:
        share = _normal_below((spec.drift_limit - total) / deviation)
    if spec.negative_weight == "product" or (spec.level == "sequence" and spec.normalisation == "raw"):
        # The mean of min(1, e^z).
        share = min(share, 2.0 * _normal_below(-deviation / 2.0))
    if spec.step_size == "ess_uncapped":
        share = min(share, math.exp(-total))
    return share


def _normal_below(value: float) -> float:
    return 0.5 * math.erfc(-value / math.sqrt(2.0))


def length_caveats(spec: LossSpec, *, max_new_tokens: int) -> tuple[tuple[str, str], ...]:
    """A loss's problems with completions of this length, each with its remedy."""
    found = []
    share = open_share(spec, max_new_tokens=max_new_tokens)
    if share < LEAST_SHARE:
        found.append(
            (
                f"this loss weighs whole completions: of {max_new_tokens} tokens at a KL of {KL_TOKEN} nats a token, as"
                f" between engines of one version, {share:.0%} of the rollouts with A < 0 train",
                "take gepo_1s with drift_limit = 5 x KL a token x tokens, or watch mask_share_bad"
                " (docs/losses.md#long-completions)",
            )
        )
    is_mean = spec.level == "sequence" and spec.normalisation == "length" and spec.clip == "zero"
    is_bound = spec.drift_limit > 0.0 or spec.opsm_threshold > 0.0 or spec.negative_weight != "own"
    if is_mean and not is_bound and max_new_tokens >= UNBOUND_TOKENS:
        found.append(
            (
                f"this loss weighs a completion by a mean over its tokens: from {UNBOUND_TOKENS} tokens on it fell"
                " below its start 64 versions behind",
                "for a lag of dozens of versions set loss.drift_limit or take topr (docs/losses.md#long-completions)",
            )
        )
    return tuple(found)


def caveats(spec: LossSpec, *, max_new_tokens: int) -> tuple[str, ...]:
    """Warnings about choices that are allowed but rarely wanted."""
    notes = [f"{problem}; {remedy}" for problem, remedy in length_caveats(spec, max_new_tokens=max_new_tokens)]
    if spec.has_group_denominator and spec.normalisation == "raw":
        notes.append("loss.normalisation = raw: the shortest rollout of each group sets the denominator")
    if spec.scope == "microbatch":
        notes.append("loss.scope = microbatch: the loss depends on micro_batch_tokens; for reproduction only")
    return tuple(notes)
