"""Configuration of a sampler."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Discriminator, Field, JsonValue, Tag, field_validator, model_validator

from heterorl.common.errors import ConfigError
from heterorl.common.evaluation.evaluation_sets import EvaluationSetConfig, check_unique_names
from heterorl.common.identity.signing import PublicKey
from heterorl.common.model.contract import ContractConfig, LoraConfig, SamplingConfig
from heterorl.common.process.config_file import Config, checked
from heterorl.common.process.tracing import TracingConfig
from heterorl.common.tasks.source_config import Directory
from heterorl.common.tasks.task_config import TaskConfig
from heterorl.common.types.common import LogprobMode, SamplingSemantics, amount
from heterorl.sampler.delay import DelayConfig, NoDelay

MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 2.0
"""Below the first vLLM uses another temperature than it is given; above the second it refuses each request."""
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Adapter ranks of vLLM."""
OWN_ARGUMENTS = frozenset(
    {
        "model", "dtype", "tensor_parallel_size", "data_parallel_size", "device_ids", "enforce_eager",
        "enable_prefix_caching", "max_model_len", "max_num_seqs", "scheduling_policy", "kv_cache_memory_bytes",
        "gpu_memory_utilization", "logprobs_mode", "generation_config", "skip_tokenizer_init", "disable_log_stats",
        "worker_extension_cls", "enable_lora", "max_lora_rank", "max_loras", "max_cpu_loras", "lora_target_modules",
    }
)  # fmt: skip
"""Arguments of vLLM that [engine] has keys for or that the engine depends on."""
_FILES = ("jsonl:", "parquet:")
Engines = Annotated[int, Field(ge=1, le=64)]


def _entry(value: str) -> str:
    kind, _, rest = value.partition(":")
    if f"{kind}:" in _FILES and rest and not rest.startswith("~"):
        return value
    if (kind in ("hf", "environment") and rest) or (kind == "reward" and ":" in rest):
        return value
    known = (
        "jsonl:DIRECTORY, parquet:DIRECTORY, hf:NAME@COMMIT, hf:/DIRECTORY, reward:MODULE:FUNCTION, environment:NAME"
    )
    raise ValueError(f"{value!r} is none of {known}")


class JoinConfig(Config):
    """Bounds of the keys that the sampler adopts from the run.

    They are keys that this file leaves out.
    """

    accept: tuple[Annotated[str, AfterValidator(_entry)], ...] = Field(default=(), max_length=64)
    """Sources that the run's task may name besides built-in tasks: `jsonl:DIRECTORY`, `parquet:DIRECTORY` (files below
    it, relative to the working directory), `hf:NAME@COMMIT`, `hf:/DIRECTORY`, `reward:MODULE:FUNCTION`,
    `environment:NAME`. State other task.rewards here."""
    reward_path: Directory = ""
    """Directory of accepted rewards and environments, relative to the configuration file; empty: its directory."""
    max_group_size: int = Field(default=64, ge=2)
    """Largest adopted group_size."""
    max_new_tokens: int = Field(default=16384, ge=1)
    """Largest adopted sampling.max_new_tokens."""
    max_prompts: int = Field(default=1_000_000, ge=1)
    """Largest adopted task.size and task.evaluation_size."""
    max_lora_rank: int = Field(default=256, ge=0)
    """Largest adopted lora.rank."""


def _distinct(devices: tuple[int, ...]) -> tuple[int, ...]:
    if len(set(devices)) != len(devices):
        raise ValueError("a device twice: engines side by side on one are `engines`")
    return devices


Devices = Annotated[tuple[Annotated[int, Field(ge=0)], ...], AfterValidator(_distinct)]


class _EngineConfig(Config):
    devices: Devices = ()
    """GPU numbers, one (vLLM: tensor_parallel_size) an engine; empty: `device`, or vLLM's choice."""
    engines: Engines = 1
    """Engines without `devices`: on a CPU, or sharing one GPU's memory."""
    batch_rows: int = Field(default=256, ge=1)
    """Completions that an engine generates at once."""
    threads: int = Field(default=0, ge=0)
    """CPU threads of torch and the weight codec; 0: torch's choice, and one a core."""

    @model_validator(mode="after")
    def _check_engines(self) -> Self:
        if self.devices and self.engines > 1:
            raise ValueError("devices says how many engines there are: remove engines")
        if self.devices and "device" in self.model_fields_set:
            raise ValueError("devices and device both name GPUs: remove device")
        return self


class HfEngineConfig(_EngineConfig):
    """Transformers on a CPU or GPUs."""

    kind: Literal["hf"] = "hf"
    device: str = Field(default="cpu", pattern=r"^(cpu|cuda(:[0-9]+)?)$")
    """Device of the weights."""
    compute_dtype: Literal["fp32", "bf16"] = "fp32"
    """Type of matrix products; log-probs are always float32."""


class VllmEngineConfig(_EngineConfig):
    """vLLM in its own processes."""

    kind: Literal["vllm"] = "vllm"
    compute_dtype: Literal["fp32", "bf16", "fp16"] = "bf16"
    """Type of matrix products; log-probs are always float32."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """Devices that share one copy of the model."""
    enforce_eager: bool | None = None
    """No compilation or CUDA graphs: a quicker start, slower tokens on a GPU. None: only on a CPU."""
    extra: dict[str, JsonValue] = Field(default_factory=dict)
    """More vLLM engine arguments, such as `quantization`; those that heterorl sets are refused."""
    prefix_cache: bool = True
    """Share keys and values of equal prompt prefixes within a version."""
    max_model_len: int = Field(default=0, ge=0)
    """Longest prompt plus completion, tokens; 0: the model's limit."""
    kv_cache_bytes: int = Field(default=0, ge=0)
    """Memory of keys and values; 0: vLLM's choice, which on a CPU is most of the memory."""
    memory_share: float = Field(default=0.9, gt=0, le=1)
    """Share of the device's memory for weights, keys and values."""
    swap_check_tolerance: float = Field(default=0.0, ge=0)
    """Mean log-prob difference from a float32 reference that refuses new weights, nats; 0: 1e-4 (fp32), 0.02 (fp16),
    0.1 (bf16)."""
    swap_check_device: str = Field(default="cpu", pattern=r"^(cpu|cuda(:[0-9]+)?)$")
    """Device of that reference: cpu (6 core-seconds for 10^9 weights and swap), or cuda (memory of the largest layer in
    float32, outside memory_share)."""
    weights_dir: str = ""
    """Directory for weights on their way to vLLM, fastest in memory; empty: state_dir."""

    @field_validator("extra")
    @classmethod
    def _check_extra(cls, extra: dict[str, JsonValue]) -> dict[str, JsonValue]:
        if taken := sorted(OWN_ARGUMENTS & extra.keys()):
            raise ValueError(f"{', '.join(taken)}: heterorl sets it itself; see the other keys of [engine]")
        return extra

    @model_validator(mode="after")
    def _check_devices(self) -> VllmEngineConfig:
        if len(self.devices) % self.tensor_parallel_size:
            raise ValueError(
                f"devices: has {amount(len(self.devices), 'GPU')};"
                f" tensor_parallel_size = {self.tensor_parallel_size} needs a multiple of {self.tensor_parallel_size}"
            )
        if self.engines * self.memory_share > 1 and not self.kv_cache_bytes:
            raise ValueError(
                f"memory_share: engines = {self.engines} take {self.memory_share:g} of one device each, together above"
                f" 1; set it to {0.9 / self.engines:.2g} or less"
            )
        return self


def _kind(value: object) -> str:
    # Tables that set a detail of the default engine need not name it.
    kind = value.get("kind", "hf") if isinstance(value, dict) else getattr(value, "kind", "")
    return str(kind)


EngineConfig = Annotated[
    Annotated[HfEngineConfig, Tag("hf")] | Annotated[VllmEngineConfig, Tag("vllm")], Discriminator(_kind)
]


class SamplerConfig(ContractConfig):
    """One sampler of one site."""

    site: str = Field(default="site-1", pattern=r"^[A-Za-z0-9._-]{1,64}$")
    """Name of the site, unique in the run."""
    state_dir: Path = Path("runs/sampler")
    """Directory of the outbox, verified versions and arriving weights; one for each sampler."""
    metrics_port: int = Field(default=9103, ge=0, le=65535)
    """Port of the Prometheus metrics; 0: any free one. Left out: the default or the next free one in steps of 10."""
    tracing: TracingConfig = TracingConfig()
    """Traces of groups by OpenTelemetry."""
    published_dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Type of the weights that the learner publishes."""
    variant: Literal["", "int8", "fp8_e4m3"] = ""
    """Variant to pull: rollouts and log-probs are the quantised policy's. Empty: the trained weights."""
    engine: EngineConfig = HfEngineConfig()
    """Engine that generates."""
    join: JoinConfig | None = None
    """The sampler adopts task, sampling, lora, group_size and template from the run where this file has none. Without
    this table the file states everything."""
    evaluation: tuple[EvaluationSetConfig, ...] = ()
    """Sets that this site can draw, by the coordinator's names; in a run only name and task count."""
    evaluation_share: float = Field(default=0.25, gt=0, le=1)
    """Largest share of the engine's rows for evaluation while rollouts go on."""
    evaluation_hold_s: float = Field(default=300.0, ge=0)
    """How long newer weights wait for a running evaluation, and a drained sampler for the last version."""
    seeded_sampling: bool = False
    """Derive draws from assignment and position, so that the learner can repeat them. Engine hf, no top_p or
    top_k; sets swap to `drain`."""
    group_size: int = Field(default=8, ge=2, le=4096)
    """Rollouts of one prompt; equal on every node."""
    swap: Literal["in_flight", "drain"] = "in_flight"
    """Take new weights `in_flight`, between two tokens (rollouts span versions, old keys and values stay), or after a
    `drain` of the engine."""
    work_ahead_s: float = Field(default=600.0, ge=0, le=86400)
    """Work to lease ahead, at measured speed, within the coordinator's max_outstanding_groups. 0, for experiments: one
    fill of its engine, the next when all those groups are in the outbox."""
    delay_seed: int = Field(default=0, ge=0)
    """Seed of this sampler's delays."""
    delay: DelayConfig = NoDelay()
    """Delay added to the link's own, for experiments."""
    trusted_keys: tuple[PublicKey, ...] = ()
    """Public keys of trusted learners, from `heterorl keys new`; empty accepts unsigned versions."""
    heartbeat_s: float = Field(default=2.0, gt=0)
    """Time between heartbeats."""
    pull_streams: int = Field(default=1, ge=1, le=16)
    """Ranges of a payload fetched at once; 2 to 4 help on long links with packet loss."""
    outbox_bytes: int = Field(default=1 << 30, ge=1 << 16)
    """Undelivered groups at which generation pauses."""

    @model_validator(mode="before")
    @classmethod
    def _drain_for_seeds(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("seeded_sampling") is True:
            return {"swap": "drain", **data}
        return data

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_unique_names(self.evaluation)
        if self.variant and self.lora.is_on:
            raise ValueError("variant with lora: adapters are small and published as they are; remove one of them")
        if self.seeded_sampling and not isinstance(self.engine, HfEngineConfig):
            raise ValueError("seeded_sampling needs engine hf: vLLM takes no noise from outside")
        if self.seeded_sampling and self.swap == "in_flight":
            raise ValueError('seeded_sampling needs swap = "drain": one version of the weights repeats a draw')
        if self.seeded_sampling and (self.sampling.top_p < 1 or self.sampling.top_k):
            raise ValueError("seeded_sampling needs top_p = 1 and top_k = 0: truncation flips under rounding")
        # With [join] a key that the file leaves out is the run's: adoption checks them together.
        if self.join is None or "group_size" in self.model_fields_set:
            checked(self.sampling.members, self.group_size)
        if isinstance(self.engine, VllmEngineConfig):
            sampling = self.sampling
            if self.join is not None and "logprob_mode" not in sampling.model_fields_set:
                sampling = sampling.model_copy(update={"logprob_mode": LogprobMode.RAW})
            checked(check_limits, sampling, self.lora, self.engine.max_model_len)
        return self


REWARD_WORKERS = 4
"""Default of reward_workers at a sampler: completions end faster than one process scores them."""


def with_workers(config: TaskConfig) -> TaskConfig:
    """A task's configuration with the sampler's default of reward_workers."""
    if "reward_workers" in config.model_fields_set:
        return config
    return config.model_copy(update={"reward_workers": REWARD_WORKERS})


def check_limits(sampling: SamplingConfig, lora: LoraConfig, max_model_len: int) -> None:
    """Raise ConfigError if vLLM cannot draw so, or takes no such adapters."""
    # Evaluations state their own number of new tokens.
    if "max_new_tokens" in sampling.model_fields_set and 0 < max_model_len <= sampling.max_new_tokens:
        raise ConfigError(
            "engine.max_model_len",
            f"{max_model_len} tokens hold no prompt with sampling.max_new_tokens = {sampling.max_new_tokens}",
            action="raise the first or lower the second",
        )
    if sampling.router_replay != "none":
        raise ConfigError(
            "sampling.router_replay", "vLLM's routing is not recorded", action='use engine hf, or set it to "none"'
        )
    logprobs_mode(sampling.semantics())
    if lora.is_on:
        adapter_room(lora.rank)


def logprobs_mode(sampling: SamplingSemantics) -> str:
    """vLLM's log-probs mode of the contract's meaning; raises ConfigError without one."""
    if not MIN_TEMPERATURE <= sampling.temperature <= MAX_TEMPERATURE:
        is_low = sampling.temperature < MIN_TEMPERATURE
        where, change = (f"below {MIN_TEMPERATURE}", "higher") if is_low else (f"above {MAX_TEMPERATURE:g}", "lower")
        problem = f"vLLM draws at no temperature {where}"
        action = f'set a {change} temperature at the learner, or engine.kind = "hf"'
        raise ConfigError("sampling.temperature", problem, action=action)
    is_of_logits = sampling.logprob_temperature == 1.0
    if sampling.logprob_mode is LogprobMode.RAW or (sampling.is_truncated and is_of_logits):
        return "raw_logprobs"
    if sampling.is_truncated:
        # vLLM renormalises processed log-probs after truncation; the contract does not.
        action = "use top_p = 1 and top_k = 0, temperature = 1, or logprob_mode = raw"
        raise ConfigError("sampling", "vLLM gives no log-probs before truncation at a temperature", action=action)
    return "processed_logprobs"


def adapter_room(rank: int) -> int:
    """The smallest rank of vLLM's that has room for an adapter."""
    room = [larger for larger in LORA_RANKS if larger >= rank]
    if not room:
        action = 'set a smaller rank at the learner, or engine.kind = "hf"'
        raise ConfigError("lora.rank", f"vLLM takes adapters up to rank {LORA_RANKS[-1]}", action=action)
    return room[0]
