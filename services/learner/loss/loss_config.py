"""Configuration of the loss: a union on `kind`.

A kind is its keys and the parts that it fixes; `loss_spec_of` turns any kind into the same parts. Shared keys come
first, so "GEPO with the sequence mask of OPSM" is `kind = "gepo"` with `opsm_threshold`; then losses with one ratio per
rollout, with one per token, with a constant weight, and custom losses. All kinds share the KL penalty's default, so
that algorithms differ by what their names say. GPO in some sources is GEPO, written with a blackboard-bold E that
renderers drop.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, JsonValue, model_validator

from heterorl.common.process.config_file import Config
from heterorl.common.tasks.source_config import Directory

Denominator = Literal["contraharmonic", "arithmetic", "geometric", "leave_one_out"]
Advantage = Literal["mean", "mean_std", "beta"]
Aggregation = Literal["sequence_mean", "token_mean", "max_length", "sequence_sum", "length_power"]


class LossOptions(Config):
    """Keys of every loss."""

    PARTS: ClassVar[dict[str, Any]] = {}
    """Fields of `LossSpec` that the kind fixes."""
    sampler_kl: float = Field(default=0.005, ge=0.0, le=100.0)
    """Weight of KL(sampler || learner); 0: off."""
    aggregation: Aggregation = "sequence_mean"
    """Each rollout counts equally (`sequence_mean`), each token does (`token_mean`) or 1 / (rollouts x max_new_tokens)
    (`max_length`); token sums are averaged (`sequence_sum`) or weighed by `length_power`."""
    length_power: float = Field(default=1.0, ge=0.0, le=2.0)
    """With that aggregation a token of a rollout of T tokens counts T^-length_power."""
    advantage: Advantage = "mean_std"
    """Reward minus the group's mean (`mean`), over its standard deviation (`mean_std`) or over a Beta density
    (`beta`)."""
    opsm_threshold: float = Field(default=0.0, ge=0.0)
    """Leaves out bad rollouts whose mean of log q - log p exceeds this, nats; 0: off."""
    drift_limit: float = Field(default=0.0, ge=0.0)
    """Leaves out bad rollouts whose sum of log q - log p exceeds this, nats; 0: off. A limit for short completions
    drops nearly all long ones."""
    m2_budget: float = Field(default=0.0, ge=0.0)
    """Leaves out harmful tokens with the largest log ratios until their mean square is at most this; 0: off."""
    max_log_weight: float = Field(default=3.0, gt=0.0, le=20.0)
    """Weights and KL ratios beyond e^this are capped without gradient (`cispo`, `tis`, `mis`, `impala`: weights with
    gradient), which bounds forged log-probs. 20: uncapped, as published."""
    reference_kl: float = Field(default=0.0, ge=0.0, le=100.0)
    """Weight of KL(p || reference model), GRPO's beta; 0: off. Backends torch and fsdp2."""
    drop_uniform_groups: bool = False
    """Whether groups of equal rewards leave the step, its counts and the KL penalty."""
    step_size: Literal["constant", "ess", "ess_uncapped"] = "constant"
    """Learning rate as set (`constant`), or times sqrt(ESS / rollouts) with rollouts' ratios capped at 8 (`ess`; kinds
    `gepo*`, `eqp`: their weights) or e^max_log_weight (`ess_uncapped`)."""

    @property
    def reference_key(self) -> str:
        """The key that asks for a reference model; empty for none."""
        if self.reference_kl > 0.0:
            return "reference_kl"
        return "reads_reference" if getattr(self, "reads_reference", False) else ""

    @model_validator(mode="after")
    def _check_length_power(self) -> LossOptions:
        is_used = self.aggregation == "length_power"
        return self._check_used("length_power", is_used=is_used, by='aggregation = "length_power"')

    def _check_used(self, key: str, *, is_used: bool, by: str) -> Self:
        """Refuse a changed key that this loss does not read."""
        if not is_used and getattr(self, key) != type(self).model_fields[key].default:
            raise ValueError(f"{key} has no effect without {by}: remove it, or set that")
        return self


class RatioLossConfig(LossOptions):
    """Keys of clipped-ratio losses."""

    eps_low: float = Field(default=0.2, ge=0.0, le=1.0)
    """Bad rollouts or tokens with a weight below 1 - eps_low get no gradient."""
    eps_high: float = Field(default=0.2, ge=0.0, le=100.0)
    """Good rollouts or tokens with a weight above 1 + eps_high get no gradient."""
    dual_clip: float = Field(default=0.0, ge=0.0, le=1e6)
    """Bad rollouts or tokens with a weight above this get no gradient (TRL's delta); above 1, usually 3. 0: off."""

    @model_validator(mode="after")
    def _check_dual_clip(self) -> RatioLossConfig:
        if 0.0 < self.dual_clip <= 1.0:
            raise ValueError("dual_clip is a largest weight: 0 for none, or above 1")
        return self


class SequenceLossConfig(RatioLossConfig):
    """Keys of losses with one weight per rollout."""

    PARTS: ClassVar[dict[str, Any]] = {"level": "sequence"}
    clip: Literal["zero", "preserve", "none"] = "zero"
    """Beyond the clip range: no gradient (`zero`), the bound's gradient (`preserve`) or no clip (`none`)."""
    clip_on: Literal["own", "gepo", "gspo"] = "own"
    """Weight that decides about clipping: the loss's `own`, GEPO's (`gepo`) or GSPO's (`gspo`)."""
    positive_weight: Literal["own", "one", "one_clipped"] = "own"
    """Weight of good rollouts: the loss's `own`, or TOPR's 1 without (`one`) or with (`one_clipped`) the upper clip."""
    negative_weight: Literal["own", "one", "product"] = "own"
    """Weight of bad rollouts: the loss's `own` with its clip, 1 (`one`), or TOPR's min(1, prod_t p / q) (`product`)."""

    @model_validator(mode="after")
    def _check_clip(self) -> Self:
        clips, is_own = self.clip != "none", self.negative_weight == "own"
        has_low, has_high = clips and is_own, clips and self.positive_weight != "one"
        self._check_used("eps_low", is_used=has_low, by='a clip and negative_weight = "own"')
        self._check_used("eps_high", is_used=has_high, by='a clip and positive_weight = "own" or "one_clipped"')
        self._check_used("clip_on", is_used=has_low or has_high, by="a clip of good or bad rollouts")
        return self._check_used("dual_clip", is_used=is_own, by='negative_weight = "own"')


class GroupDenominatorConfig(SequenceLossConfig):
    """Keys of losses with one denominator per group."""

    advantage: Advantage = "mean"
    denominator: Denominator = "contraharmonic"
    """Mean of the group's q: `contraharmonic` (paper), `arithmetic` (unbiased), `geometric`, or `leave_one_out`
    (contraharmonic of the other rollouts)."""


class GepoConfig(GroupDenominatorConfig):
    """Group expectation policy optimization, arXiv 2508.17850.
    All rollouts of a prompt have one denominator."""

    kind: Literal["gepo"] = "gepo"
    scope: Literal["prompt_group", "microbatch"] = "prompt_group"
    """Rollouts of that mean: `prompt_group` (paper), or `microbatch` (its code; depends on micro_batch_tokens, for
    reproduction only)."""
    normalisation: Literal["length", "raw"] = "length"
    """p and q as mean (`length`) or sum (`raw`) of token log-probs; `raw` puts all weight on the shortest rollout."""


class GepoOneSidedConfig(GroupDenominatorConfig):
    """GEPO without upper clip: good rollouts keep their gradient at any weight."""

    kind: Literal["gepo_1s"] = "gepo_1s"
    eps_high: float = Field(default=100.0, ge=0.0, le=100.0)


class GepoProductConfig(GroupDenominatorConfig):
    """GEPO without upper clip for good rollouts, TOPR's weight for bad ones.
    That weight is min(1, prod_t p / q)."""

    kind: Literal["gepo_product"] = "gepo_product"
    eps_high: float = Field(default=100.0, ge=0.0, le=100.0)
    negative_weight: Literal["own", "one", "product"] = "product"


class GepoWholeConfig(GroupDenominatorConfig):
    """GEPO without upper clip, and without bad rollouts that drifted.
    Their completions became drift_limit nats less likely."""

    kind: Literal["gepo_whole"] = "gepo_whole"
    eps_high: float = Field(default=100.0, ge=0.0, le=100.0)
    drift_limit: float = Field(default=1.1, ge=0.0)


class GepoPlusConfig(GroupDenominatorConfig):
    """GEPO for rollouts far from the sampler, GSPO for the others.
    From later code of the authors of arXiv 2508.17850."""

    kind: Literal["gepo_plus"] = "gepo_plus"
    kl_threshold: float = Field(default=0.002, gt=0.0)
    """Rollouts whose mean KL a token is below this use their own denominator, nats."""


class EqpConfig(RatioLossConfig):
    """GEPO's variant that averages learner probabilities: D = sum_j q^_j p_j.
    The gradient goes through D."""

    PARTS: ClassVar[dict[str, Any]] = {"level": "sequence", "denominator": "expected_learner"}
    kind: Literal["eqp"] = "eqp"
    advantage: Advantage = "mean"

    @model_validator(mode="after")
    def _check_mask(self) -> EqpConfig:
        if self.m2_budget:
            raise ValueError("m2_budget does not go with a denominator that couples whole rollouts: set it to 0")
        return self


class GspoConfig(SequenceLossConfig):
    """Group sequence policy optimization, arXiv 2507.18071: every rollout has its own denominator."""

    kind: Literal["gspo"] = "gspo"


class DsGspoConfig(SequenceLossConfig):
    """GSPO with a defensive mixture as denominator (Hesterberg 1995).
    The denominator is (1 - a) q_i + a sg(p_i)."""

    kind: Literal["ds_gspo"] = "ds_gspo"
    defensive_fraction: float = Field(default=0.005, gt=0.0, lt=1.0)
    """Share of p in the denominator."""


class GmpoConfig(LossOptions):
    """Geometric-mean policy optimization, arXiv 2507.20673: token log ratios are clipped, then averaged."""

    PARTS: ClassVar[dict[str, Any]] = {"level": "sequence", "clip": "token_log"}
    kind: Literal["gmpo"] = "gmpo"
    eps_log: float = Field(default=0.4, gt=0.0)
    """Clip range of token log ratios, nats."""


class GrpoConfig(RatioLossConfig):
    """Group relative policy optimization, arXiv 2402.03300: every token has its own denominator."""

    kind: Literal["grpo"] = "grpo"


class DrGrpoConfig(RatioLossConfig):
    """Dr. GRPO, arXiv 2503.20783: no division by deviation or length."""

    kind: Literal["dr_grpo"] = "dr_grpo"
    advantage: Advantage = "mean"
    aggregation: Aggregation = "max_length"


class DapoConfig(RatioLossConfig):
    """DAPO, arXiv 2503.14476: wider upper clip and mean over all tokens.
    It can leave out groups of one reward."""

    kind: Literal["dapo"] = "dapo"
    eps_high: float = Field(default=0.28, ge=0.0, le=100.0)
    aggregation: Aggregation = "token_mean"


class BnpoConfig(RatioLossConfig):
    """BNPO, arXiv 2506.02864: a Beta density normalises rewards in [0, 1].
    It is fitted to the step's prompts."""

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
    """GRPO with off-policy sequence masking (DeepSeek-V3.2).
    Bad rollouts that have drifted are left out."""

    kind: Literal["opsm"] = "opsm"
    opsm_threshold: float = Field(default=0.5, gt=0.0)


class M2poConfig(LossOptions):
    """M2PO, arXiv 2510.01161: token ratios without clip.
    Harmful tokens are left out to bound the second moment."""

    PARTS: ClassVar[dict[str, Any]] = {"clip": "none"}
    kind: Literal["m2po"] = "m2po"
    aggregation: Aggregation = "token_mean"
    m2_budget: float = Field(default=0.04, gt=0.0)


class DecoupledPpoConfig(RatioLossConfig):
    """Decoupled PPO, arXiv 2505.24298: clip around a proximal policy.
    Weights are proximal over sampler."""

    kind: Literal["decoupled_ppo"] = "decoupled_ppo"
    aggregation: Aggregation = "token_mean"
    proximal: Literal["step_start", "loglinear"] = "step_start"
    """Clip around the step's first policy (`step_start`; never acts, as a batch has one step), or an estimate of the
    policy one version ago (`loglinear`)."""
    behaviour_cap: float = Field(default=5.0, gt=0.0)
    """Largest proximal-over-sampler weight."""


class MoisConfig(RatioLossConfig):
    """Mixture importance sampling, code of arXiv 2508.17850.
    D = a p + (1 - a) q with a share a that falls with age."""

    kind: Literal["mois"] = "mois"
    advantage: Advantage = "mean"
    mixture_age: float = Field(default=8.0, ge=0.0)
    """Age at which the learner's share is one half, versions."""
    mixture_slope: float = Field(default=1.0, gt=0.0)
    """How sharply the share falls with age, per version."""
    mixture_gradient: Literal["none", "full"] = "none"
    """Denominator constant (`none`), or differentiated as published (`full`; almost no gradient for fresh tokens)."""


class ReinforceConfig(LossOptions):
    """The uncorrected policy gradient A log p, for any sampler (Williams 1992)."""

    PARTS: ClassVar[dict[str, Any]] = {"clip": "truncate", "positive_weight": "one", "negative_weight": "one"}
    kind: Literal["reinforce"] = "reinforce"
    advantage: Advantage = "mean"
    aggregation: Aggregation = "token_mean"


class ToprConfig(LossOptions):
    """TOPR, arXiv 2503.14286: good rollouts by likelihood, bad ones by ratio.
    The ratio is the sequence's, truncated to [0, 1]."""

    PARTS: ClassVar[dict[str, Any]] = {
        "level": "sequence",
        "normalisation": "raw",
        "clip": "truncate",
        "high": 1.0,
        "positive_weight": "one",
    }
    kind: Literal["topr"] = "topr"
    advantage: Advantage = "mean"
    aggregation: Aggregation = "sequence_sum"


class CispoConfig(LossOptions):
    """CISPO, arXiv 2506.13585: truncated token weights multiply the likelihood's gradient.
    No token loses it."""

    PARTS: ClassVar[dict[str, Any]] = {"clip": "truncate"}
    kind: Literal["cispo"] = "cispo"
    aggregation: Aggregation = "token_mean"
    eps_low: float = Field(default=1.0, ge=0.0, le=1.0)
    """Weights are raised to 1 - eps_low; 1: no lower bound."""
    eps_high: float = Field(default=0.2, ge=0.0, le=100.0)
    """Weights are lowered to 1 + eps_high."""


class TisConfig(LossOptions):
    """Truncated importance sampling (Yao et al. 2025; Ionides 2008): weights min(r, cap).

    `level = "sequence"`, `cap = 8` and `step_size = "ess"` take two ideas of VCPO, without its baseline.
    """

    PARTS: ClassVar[dict[str, Any]] = {"clip": "truncate"}
    kind: Literal["tis"] = "tis"
    advantage: Advantage = "mean"
    aggregation: Aggregation = "token_mean"
    level: Literal["token", "sequence", "geometric"] = "token"
    """Weight of each `token`, their product (`sequence`), or its geometric mean a token (`geometric`)."""
    cap: float = Field(default=2.0, gt=0.0)
    """Largest weight; `mis` drops what exceeds it, `tis` lowers it."""


class MisConfig(LossOptions):
    """Masked importance sampling: weights outside [floor, cap] count 0."""

    PARTS: ClassVar[dict[str, Any]] = {"clip": "drop"}
    kind: Literal["mis"] = "mis"
    advantage: Advantage = "mean"
    aggregation: Aggregation = "token_mean"
    level: Literal["token", "sequence", "geometric"] = "sequence"
    """Weight of each `token`, their product (`sequence`), or its geometric mean a token (`geometric`)."""
    floor: float = Field(default=0.0, ge=0.0)
    """Smallest weight that counts."""
    cap: float = Field(default=3.0, gt=0.0)
    """Largest weight; `mis` drops what exceeds it, `tis` lowers it."""

    @model_validator(mode="after")
    def _check_range(self) -> MisConfig:
        if self.floor >= self.cap:
            raise ValueError("floor is not below cap: lower floor, or raise cap")
        return self


class ImpalaConfig(LossOptions):
    """V-trace, arXiv 1802.01561, with the reward at the last token.
    The value of every state is the group's mean."""

    PARTS: ClassVar[dict[str, Any]] = {"clip": "truncate"}
    kind: Literal["impala"] = "impala"
    advantage: Advantage = "mean"
    aggregation: Aggregation = "token_mean"
    rho_cap: float = Field(default=1.0, gt=0.0)
    """Upper bound of a token's own ratio in V-trace (rho)."""
    c_cap: float = Field(default=1.0, gt=0.0)
    """Upper bound of the ratios of later tokens in V-trace's product (c)."""


class CustomLossConfig(LossOptions):
    """A custom Python function; advantages, averages, masks and penalties stay the learner's."""

    kind: Literal["custom"] = "custom"
    function: str
    """`package.module:function`: f(batch, **options) -> LossOutput; a parameter `step` gets all rollouts of the step,
    for one more pass."""
    directory: Directory = ""
    """Directory of its module, relative to the configuration file; empty: its directory."""
    options: dict[str, JsonValue] = Field(default_factory=dict)
    """Keyword arguments of the function."""
    reads_reference: bool = False
    """Whether it reads `batch.reference_BT`, the reference model's log-probs. Backends torch and fsdp2."""

    @model_validator(mode="after")
    def _check_mask(self) -> CustomLossConfig:
        if self.m2_budget:
            raise ValueError("m2_budget with kind custom: leave tokens out in the function, by the parameter `step`")
        return self


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
