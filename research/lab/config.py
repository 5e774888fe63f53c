"""An experiment as TOML: what varies (algorithm, delay, task, variant, seed) and what stays the same."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from heterorl.common.process.config_file import Config
from heterorl.common.tasks.task_config import TaskConfig
from heterorl.learner.loss.loss_config import GepoConfig
from heterorl.sampler.delay import DelayConfig, NoDelay
from heterorl_research.losses.kinds import LabLoss

AS_PUBLISHED = 20.0
"""`max_log_weight` of the lab: log weights of whole rollouts stay below it, so it bounds numbers and no algorithm."""


class AlgorithmConfig(Config):
    """One learning rule under the name that tables and figures show."""

    name: str = Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9._+-]+$")
    """Name in tables and figures."""
    loss: LabLoss = GepoConfig(max_log_weight=AS_PUBLISHED)
    """The rule, as in a learner's configuration or of research/losses, but with the bound on weights that its authors
    have: none."""

    @model_validator(mode="before")
    @classmethod
    def _as_published(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(data.get("loss"), dict):
            return {**data, "loss": {"max_log_weight": AS_PUBLISHED, **data["loss"]}}
        return data


class LabTaskConfig(Config):
    """A task with the supervised warm start that makes it learnable."""

    name: str = Field(default="add3", pattern=r"^[A-Za-z0-9._+-]+$")
    """Name in tables and figures."""
    task: TaskConfig = TaskConfig()
    """Prompts and reward."""
    max_new_tokens: int = Field(default=5, ge=1)
    """Longest completion, tokens."""
    warm_start_target: float = Field(default=0.25, gt=0.0, lt=1.0)
    """Sampled accuracy at which the supervised warm start stops."""
    warm_start_batch: int = Field(default=256, ge=1)
    """Examples of one supervised step."""
    warm_start_lr: float = Field(default=2e-3, gt=0.0)
    """AdamW step size of the supervised steps; wider models need smaller ones."""
    warm_start_seed: int | None = None
    """Seed of the warm start; none takes the run's. With it all runs begin from the same weights."""
    hidden_size: int = Field(default=64, ge=16)
    """Width of the model."""
    num_layers: int = Field(default=2, ge=1)
    """Depth of the model."""
    lr: float | None = Field(default=None, gt=0.0)
    """AdamW step size of this task; none takes the regime's. Long completions need smaller steps."""


class VariantConfig(Config):
    """Changes of the regime, for sweeps."""

    name: str = ""
    """Name in tables and figures, such as `lr=0.003`; empty is the regime itself."""
    set: dict[str, Any] = Field(default_factory=dict)
    """Keys of `regime` and their values; `loss.KEY` changes every algorithm."""


class RegimeConfig(Config):
    """What all runs of an experiment share."""

    max_steps: int = Field(default=300, ge=1)
    """Optimizer steps."""
    groups_per_step: int = Field(default=16, ge=1)
    """Prompts of a step."""
    group_size: int = Field(default=8, ge=2)
    """Rollouts of a prompt."""
    lr: float = Field(default=1e-3, gt=0.0)
    """AdamW step size. Staleness hurts only when the policy moves."""
    steps_per_version: int = Field(default=1, ge=1)
    """Optimizer steps between publications; delays in versions count these."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the step size grows to lr."""
    temperature: float = Field(default=1.0, gt=0.0)
    """Softmax temperature of the samplers."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Nucleus mass of the samplers; 1 is off. Evaluations draw from the whole distribution."""
    top_k: int = Field(default=0, ge=0)
    """Candidates of the samplers; 0 is off. Evaluations draw from the whole distribution."""
    sampler_noise: float = Field(default=0.0, ge=0.0, le=0.1)
    """Mismatch of sampler and learner, nats of KL a token: noise on the log-probs that samplers report. The engine
    `fast` alone computes it."""
    evaluation_temperature: float = Field(default=1.0, gt=0.0)
    """Softmax temperature of every evaluation, the warm start's too: runs at several temperatures stay comparable."""
    num_samplers: int = Field(default=2, ge=1, le=64)
    """Samplers, each with its own delays."""
    lease_order: Literal["oldest", "newest"] = "oldest"
    """Which groups the learner gets first, as in a coordinator's configuration; matters where a queue builds up."""
    sampler_speed: float = Field(default=1.0, gt=0.0)
    """Groups that all samplers together can make, over those that the learner takes; for delays in seconds. Above 1 a
    queue builds up, as long as versions_in_flight lets it be."""
    versions_in_flight: int = Field(default=0, ge=0)
    """Versions whose groups may be under way or wait; 0 is as few as the delay needs. For delays in seconds."""
    seconds_per_step: float = Field(default=28.0, gt=0.0)
    """How long a learner's step stands for, seconds: delays in seconds become versions by it."""
    link_one_way_s: float = Field(default=0.1, ge=0.0)
    """Latency of the simulated network, seconds."""
    link_loss: float = Field(default=0.0, ge=0.0, lt=0.5)
    """Share of the messages that the simulated network loses."""
    evaluate_every: int = Field(default=20, ge=1)
    """Steps between evaluations."""
    num_evaluation: int = Field(default=256, ge=8)
    """Held-out prompts of an evaluation, one sampled completion each."""
    evaluation_offset: int = Field(default=0, ge=0)
    """Held-out prompts before the first of an evaluation: what is tuned looks at others than what is reported."""
    evaluation_noise: Literal["same", "by_version"] = "same"
    """Whether every evaluation of a run draws its completions alike, or each version with noise of its own. All runs
    of a seed have the same noise at a version."""
    last_evaluations: int = Field(default=1, ge=1)
    """Evaluations at the end whose mean is the last accuracy."""
    probe_every: int = Field(default=10, ge=0)
    """Steps between measurements of the estimation error with fresh rollouts; 0 is off."""


class ProtocolConfig(Config):
    """What an experiment must keep so that a difference between two arms is one of the arms; checked before it runs.

    An arm is an algorithm with a delay, a task and a variant. A key that is loosened stands in the experiment's file.
    """

    tune: bool = True
    """Whether `lr` is chosen for every arm on the tuning seeds; off where every arm has the same, or `lr` is swept."""
    tuning_seeds: tuple[int, ...] = Field(default=(100, 101, 102), min_length=1)
    """Seeds that choose `lr`, in their order; none of them is reported."""
    tuning_steps: int = Field(default=0, ge=0)
    """Steps of a trial; 0 is as many as a run of the experiment has."""
    learning_rates: tuple[float, ...] = Field(default=(1.5e-4, 3e-4, 5e-4, 7e-4, 1e-3, 1.5e-3), min_length=2)
    """What `lr` is chosen from."""
    tune_as: dict[str, str] = Field(default_factory=dict)
    """Algorithms that are not tuned and take the rate of another one, such as the parts of a rule that of the whole."""
    chosen: dict[str, float] = Field(default_factory=dict)
    """Learning rate by arm, as `heterorl lab tune` found it; `heterorl lab run` reads it from beside the results."""
    confirms: tuple[str, ...] = ()
    """Shipped experiments that suggested what this one tests: it runs on the seeds 300 to 331, and they on none of
    its seeds."""
    least_seeds: int = Field(default=16, ge=2)
    """Fewest seeds that are reported."""
    steps_per_lag: float = Field(default=3.0, ge=0.0)
    """Steps are at least this many times the delay, in versions."""
    least_prompts: int = Field(default=1024, ge=8)
    """Fewest prompts of an evaluation."""
    least_evaluations: int = Field(default=3, ge=1)
    """Fewest evaluations whose mean is the last accuracy."""

    @model_validator(mode="after")
    def _rates_differ(self) -> ProtocolConfig:
        if any(rate <= 0.0 for rate in (*self.learning_rates, *self.chosen.values())):
            raise ValueError("a learning rate is not positive")
        if len(set(self.learning_rates)) < len(self.learning_rates):
            raise ValueError("learning_rates has one twice")
        twice = sorted(self.tune_as.keys() & set(self.tune_as.values()))
        if twice:
            raise ValueError(f"tune_as gives {twice[0]} the rate of another algorithm, and its own to a third")
        return self


class ExperimentConfig(Config):
    """One experiment: every algorithm with every delay, task, variant and seed."""

    name: str = Field(default="experiment", pattern=r"^[A-Za-z0-9._-]{1,64}$")
    """Name of the experiment and of its directory."""
    title: str = ""
    """One line for the report."""
    algorithms: tuple[AlgorithmConfig, ...] = Field(default=(AlgorithmConfig(name="gepo"),), min_length=1)
    """What is compared."""
    delays: tuple[DelayConfig, ...] = Field(default=(NoDelay(),), min_length=1)
    """Delays of the samplers."""
    tasks: tuple[LabTaskConfig, ...] = Field(default=(LabTaskConfig(),), min_length=1)
    """What is learned."""
    variants: tuple[VariantConfig, ...] = Field(default=(VariantConfig(),), min_length=1)
    """Regimes; more than one is a sweep."""
    seeds: tuple[int, ...] = Field(default=(0,), min_length=1)
    """A seed fixes warm start, prompts, sampling and delays, for every algorithm the same."""
    regime: RegimeConfig = RegimeConfig()
    """What all runs share."""
    protocol: ProtocolConfig | None = None
    """What the experiment keeps; none for a quick look."""

    @model_validator(mode="after")
    def _seeds_are_fresh(self) -> ExperimentConfig:
        if self.protocol is not None:
            both = sorted(set(self.seeds) & set(self.protocol.tuning_seeds))
            if both:
                raise ValueError(f"seed {both[0]} is both tuned on and reported")
            if len(set(self.seeds)) < self.protocol.least_seeds:
                raise ValueError(f"{len(set(self.seeds))} seeds are fewer than protocol.least_seeds")
        return self
