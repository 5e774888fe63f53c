"""The learning rule as configuration: a discriminated union on `kind`; reading it decides nothing.

Each kind names an algorithm and exposes the keys that mean something to it; `rule.rule_of` turns any of them
into the same composable parts. Keys that compose are in `options`, so "GEPO with the sequence mask of OPSM" is
`kind = "gepo"` with `opsm_threshold`; the kinds are in `kinds_sequence`, `kinds_token` and `kinds_score`. All kinds
share the KL penalty's default, so that algorithms differ by what their names say. There is no loss called GPO: the
name in some sources is GEPO, written with a blackboard-bold E that renderers drop.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from heterorl.learner.loss.kinds_custom import CustomLossConfig
from heterorl.learner.loss.kinds_score import (
    CispoConfig,
    ImpalaConfig,
    MisConfig,
    ReinforceConfig,
    TisConfig,
    ToprConfig,
)
from heterorl.learner.loss.kinds_sequence import (
    DsGspoConfig,
    EqpConfig,
    GepoConfig,
    GepoOneSidedConfig,
    GepoPlusConfig,
    GepoProductConfig,
    GepoWholeConfig,
    GmpoConfig,
    GspoConfig,
)
from heterorl.learner.loss.kinds_token import (
    BnpoConfig,
    DapoConfig,
    DecoupledPpoConfig,
    DeltaLConfig,
    DrGrpoConfig,
    GrpoConfig,
    M2poConfig,
    MoisConfig,
    OpsmConfig,
)
from heterorl.learner.loss.options import Advantage, Aggregation, Denominator, LossOptions

__all__ = [
    "Advantage",
    "Aggregation",
    "BnpoConfig",
    "CispoConfig",
    "CustomLossConfig",
    "DapoConfig",
    "DecoupledPpoConfig",
    "DeltaLConfig",
    "Denominator",
    "DrGrpoConfig",
    "DsGspoConfig",
    "EqpConfig",
    "GepoConfig",
    "GepoOneSidedConfig",
    "GepoPlusConfig",
    "GepoProductConfig",
    "GepoWholeConfig",
    "GmpoConfig",
    "GrpoConfig",
    "GspoConfig",
    "ImpalaConfig",
    "LossConfig",
    "LossOptions",
    "M2poConfig",
    "MisConfig",
    "MoisConfig",
    "OpsmConfig",
    "ReinforceConfig",
    "TisConfig",
    "ToprConfig",
]

LossConfig = Annotated[
    GepoConfig
    | GepoOneSidedConfig
    | GepoProductConfig
    | GepoWholeConfig
    | GepoPlusConfig
    | EqpConfig
    | GspoConfig
    | DsGspoConfig
    | GmpoConfig
    | GrpoConfig
    | DrGrpoConfig
    | DapoConfig
    | BnpoConfig
    | DeltaLConfig
    | ReinforceConfig
    | ToprConfig
    | CispoConfig
    | TisConfig
    | MisConfig
    | ImpalaConfig
    | DecoupledPpoConfig
    | M2poConfig
    | OpsmConfig
    | MoisConfig
    | CustomLossConfig,
    Field(discriminator="kind"),
]
