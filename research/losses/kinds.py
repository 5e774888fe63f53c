"""The names under which experiments know these losses, with the keys that they have there.

Keys and their order are those of the time when the learner had these kinds, so that a run keeps its digest.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, JsonValue, model_validator

from heterorl.learner.loss.loss_config import (
    Advantage,
    Aggregation,
    CustomLossConfig,
    GroupDenominatorConfig,
    LossConfig,
    LossOptions,
    RatioLossConfig,
)
from heterorl.learner.loss.loss_spec import loss_spec_of


class MovedLoss(LossOptions):
    """A loss that a learner takes as a custom one."""

    OPTIONS: ClassVar[tuple[str, ...]] = ()
    """Keys that its function takes."""
    FUNCTION: ClassVar[str] = ""
    """`module:function` of this folder; empty is `loss` of the module that has the kind's name."""
    LEVEL: ClassVar[Literal["token", "sequence"]] = "sequence"
    """Whether a token or a rollout has a weight."""
    READS_REFERENCE: ClassVar[bool] = False

    @model_validator(mode="after")
    def _check_keys(self) -> MovedLoss:
        common = {"kind", *self.OPTIONS, *CustomLossConfig.model_fields}
        for name, field in type(self).model_fields.items():
            if name not in common and getattr(self, name) != field.default:
                raise ValueError(f"{name} does not vary here: leave it out")
        return self

    def learner_loss(self) -> CustomLossConfig:
        """What a learner takes."""
        values = dict(self)
        options: dict[str, JsonValue] = {name: values[name] for name in self.OPTIONS}
        shared = {name: value for name, value in values.items() if name in LossOptions.model_fields}
        function = f"heterorl_research.losses.{self.FUNCTION or values['kind'] + ':loss'}"
        return CustomLossConfig(function=function, options=options, reads_reference=self.READS_REFERENCE, **shared)


class GepoQuantileConfig(GroupDenominatorConfig, MovedLoss):
    """GEPO without upper clip for good rollouts; of the step's bad ones, those of the largest ratios count 1."""

    OPTIONS = ("eps_low", "eps_high", "negative_keep")
    kind: Literal["gepo_quantile"] = "gepo_quantile"
    eps_high: float = Field(default=100.0, ge=0.0, le=100.0)
    negative_keep: float = Field(default=0.3, gt=0.0, le=1.0)
    """Least share of the step's rollouts worse than their group that take part, those of the largest ratio; where the
    effective share of their ratios is larger, it is that share."""


class GepoTemperedConfig(GroupDenominatorConfig, MovedLoss):
    """GEPO without upper clip for good rollouts; bad ones by ratios tempered until the step supports them."""

    OPTIONS = ("eps_low", "eps_high", "tempering_ess")
    kind: Literal["gepo_tempered"] = "gepo_tempered"
    eps_high: float = Field(default=100.0, ge=0.0, le=100.0)
    tempering_ess: float = Field(default=0.5, gt=0.0, le=1.0)
    """Ratios, at most e^max_log_weight, are raised to the largest power, at most 1, at which the effective share of the
    step's rollouts is this."""


class DsGepoConfig(GroupDenominatorConfig, MovedLoss):
    """GEPO with a defensive mixture as denominator: (1 - a) E + a sg(p), so weights never exceed 1 / a."""

    OPTIONS = ("eps_low", "eps_high", "defensive_fraction")
    kind: Literal["ds_gepo"] = "ds_gepo"
    defensive_fraction: float = Field(default=0.005, gt=0.0, lt=1.0)
    """Share a of the learner's own probability in the denominator."""


class GspoTokenConfig(RatioLossConfig, MovedLoss):
    """GSPO-token, arXiv 2507.18071 section 4.3: the sequence weight with the gradient of each token."""

    OPTIONS = ("eps_low", "eps_high")
    kind: Literal["gspo_token"] = "gspo_token"


class VcpoConfig(MovedLoss):
    """VCPO, arXiv 2602.17616: truncated ratios of rollouts, optimal off-policy baseline, step size times sqrt(ESS)."""

    OPTIONS = ("cap",)
    kind: Literal["vcpo"] = "vcpo"
    step_size: Literal["constant", "ess", "ess_uncapped"] = "ess_uncapped"
    cap: float = Field(default=8.0, gt=0.0)
    """Largest weight; the baseline and the step size see ratios up to e^max_log_weight."""


class TbaConfig(MovedLoss):
    """Trajectory balance with the batch's partition function (VarGrad), arXiv 2503.18929. Backends torch and fsdp2."""

    OPTIONS = ("beta",)
    LEVEL = "token"
    READS_REFERENCE = True
    kind: Literal["tba"] = "tba"
    advantage: Advantage = "mean"
    aggregation: Aggregation = "sequence_sum"
    beta: float = Field(default=0.005, gt=0.0)
    """Temperature of the policy to be learned, reference x exp(reward / beta)."""


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
    sampler_kl: float = Field(default=0.0, ge=0.0, le=100.0)
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


class TurnGspoConfig(RatioLossConfig, MovedLoss):
    """GSPO with one ratio for each turn of a trajectory."""

    OPTIONS = ("eps_low", "eps_high")
    FUNCTION = "turns:loss"
    LEVEL = "token"
    kind: Literal["turn_gspo"] = "turn_gspo"


MovedLossConfig = Annotated[
    GepoQuantileConfig
    | GepoTemperedConfig
    | DsGepoConfig
    | GspoTokenConfig
    | VcpoConfig
    | TbaConfig
    | OaplConfig
    | TrmConfig
    | PnpoConfig
    | MinproConfig
    | CppoConfig
    | DppoConfig
    | MaxrlConfig
    | TurnGspoConfig,
    Field(discriminator="kind"),
]
LabLoss = Annotated[LossConfig | MovedLossConfig, Field(discriminator="kind")]
"""What an experiment may name."""


def level_of(loss: LabLoss) -> str:
    """Whether a token has a weight, or a rollout."""
    return loss.LEVEL if isinstance(loss, MovedLoss) else loss_spec_of(loss).level


def learner_loss(loss: LabLoss) -> LossConfig:
    """The loss as a learner takes it."""
    return loss.learner_loss() if isinstance(loss, MovedLoss) else loss
