"""The names under which experiments know these losses, with the keys that they have there.

Keys and their order are those of the time when the learner had these kinds, so that a run keeps its digest. Losses of
2026 are in `kinds_2026`; `LabLoss` has all.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from heterorl.learner.loss.loss_config import (
    Advantage,
    Aggregation,
    GroupDenominatorConfig,
    LossConfig,
    RatioLossConfig,
)
from heterorl.learner.loss.loss_spec import loss_spec_of
from heterorl_research.losses.custom_kind import MovedLoss
from heterorl_research.losses.kinds_2026 import (
    CppoConfig,
    DppoConfig,
    MaxrlConfig,
    MinproConfig,
    OaplConfig,
    PnpoConfig,
    TrmConfig,
)


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
    | MaxrlConfig,
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
