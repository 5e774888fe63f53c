"""Configuration of a sampler."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    Discriminator,
    Field,
    JsonValue,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)

from heterorl.common.evaluation.evaluation_sets import EvaluationSetConfig, check_unique_names
from heterorl.common.identity.signing import PublicKey
from heterorl.common.identity.tls import TlsConfig
from heterorl.common.model.contract import LoraConfig, SamplingConfig
from heterorl.common.process.address import Addresses
from heterorl.common.process.config_file import Config
from heterorl.common.process.tracing import TracingConfig
from heterorl.common.rpc.presigned import Allowed, Host
from heterorl.common.rpc.transport_options import BandwidthConfig
from heterorl.common.tasks.rewards.reward_config import from_file
from heterorl.common.tasks.task_config import TaskConfig
from heterorl.sampler.delay import DelayConfig, NoDelay

OWN_ARGUMENTS = frozenset(
    {
        "model", "dtype", "tensor_parallel_size", "data_parallel_size", "device_ids", "enforce_eager",
        "enable_prefix_caching", "max_model_len", "max_num_seqs", "kv_cache_memory_bytes", "gpu_memory_utilization",
        "logprobs_mode", "generation_config", "skip_tokenizer_init", "disable_log_stats", "worker_extension_cls",
        "enable_lora", "max_lora_rank", "max_loras", "max_cpu_loras", "lora_target_modules",
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
    known = "jsonl:DIRECTORY, parquet:DIRECTORY, hf:NAME, hf:/DIRECTORY, reward:MODULE:FUNCTION, environment:NAME"
    raise ValueError(f"{value!r} is none of {known}")


class JoinConfig(Config):
    """Bounds within which the sampler adopts what the run states for keys that this file leaves out."""

    accept: tuple[Annotated[str, AfterValidator(_entry)], ...] = Field(default=(), max_length=64)
    """What the run's task may use here besides built-in tasks: `jsonl:DIRECTORY` and `parquet:DIRECTORY` (files below
    it; relative to the working directory), `hf:NAME` (branches and tags of a hub dataset), `hf:NAME@REVISION` (a commit
    or pull request), `hf:/DIRECTORY`, `reward:MODULE:FUNCTION`, `environment:NAME`. Rewards of other kinds are never
    adopted: state task.rewards in this file."""
    reward_path: str = ""
    """Directory of accepted rewards and environments, relative to the configuration file; empty: the file's own
    directory."""
    max_group_size: int = Field(default=64, ge=2)
    """Largest group_size that is adopted."""
    max_new_tokens: int = Field(default=16384, ge=1)
    """Largest sampling.max_new_tokens that is adopted."""
    max_prompts: int = Field(default=1_000_000, ge=1)
    """Largest task.size and task.evaluation_size that are adopted."""
    max_lora_rank: int = Field(default=256, ge=0)
    """Largest lora.rank that is adopted."""

    @field_validator("reward_path")
    @classmethod
    def _make_absolute(cls, value: str, info: ValidationInfo) -> str:
        return from_file(value, info)


def _distinct(devices: tuple[int, ...]) -> tuple[int, ...]:
    if len(set(devices)) != len(devices):
        raise ValueError("a device twice: engines side by side on one are `engines`")
    return devices


Devices = Annotated[tuple[Annotated[int, Field(ge=0)], ...], AfterValidator(_distinct)]


class _EngineConfig(Config):
    devices: Devices = ()
    """GPU numbers, one (vLLM: `tensor_parallel_size`) for each engine; empty: `device`, or vLLM's own choice."""
    engines: Engines = 1
    """Engines without `devices`: on a CPU, or on one GPU with a share of its memory each."""
    batch_rows: int = Field(default=256, ge=1)
    """Completions that an engine generates at once."""
    threads: int = Field(default=0, ge=0)
    """CPU threads of torch and of the weight codec; 0: torch's default, one per core."""

    @model_validator(mode="after")
    def _check_engines(self) -> Self:
        if self.devices and self.engines > 1:
            raise ValueError("devices says how many engines there are: remove engines")
        return self


class HfEngineConfig(_EngineConfig):
    """Generation with transformers, on the CPU or GPUs."""

    kind: Literal["hf"] = "hf"
    device: str = Field(default="cpu", pattern=r"^(cpu|cuda(:[0-9]+)?)$")
    """Device of the weights: cpu, cuda or cuda:N."""
    compute_dtype: Literal["fp32", "bf16"] = "fp32"
    """Type of the matrix products; log-probs are always float32."""


class VllmEngineConfig(_EngineConfig):
    """Generation with vLLM, in processes of its own."""

    kind: Literal["vllm"] = "vllm"
    compute_dtype: Literal["fp32", "bf16", "fp16"] = "bf16"
    """Type of the matrix products; log-probs are always float32."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """Devices that share one copy of the model."""
    enforce_eager: bool | None = None
    """Compile nothing and record no CUDA graphs: a quicker start, slower tokens on a GPU. Default: only on a CPU."""
    extra: dict[str, JsonValue] = Field(default_factory=dict)
    """More vLLM engine arguments by their own names, such as `quantization`; keys that heterorl sets are refused."""
    prefix_cache: bool = True
    """Share keys and values of equal prompt prefixes within a version."""
    max_model_len: int = Field(default=0, ge=0)
    """Longest prompt and completion together, tokens; 0: the model's limit."""
    kv_cache_bytes: int = Field(default=0, ge=0)
    """Memory of keys and values; 0 leaves it to vLLM. Set it on a CPU, where vLLM takes most of the memory."""
    memory_share: float = Field(default=0.9, gt=0, le=1)
    """Share of the device's memory for weights, keys and values."""
    canary_tolerance: float = Field(default=0.0, ge=0)
    """Mean log-prob difference from the float32 reference above which a swap is refused, nats; 0: 1e-4 for fp32, 0.02
    for fp16, 0.1 for bf16."""
    canary_device: str = Field(default="cpu", pattern=r"^(cpu|cuda(:[0-9]+)?)$")
    """Device of the float32 reference: cpu (about 6 core-seconds per 10^9 weights and swap), cuda or cuda:N (memory for
    the largest layer in float32, outside `memory_share`)."""
    weights_dir: str = ""
    """Directory for weights on their way to vLLM; empty: state_dir. A memory file system is faster."""

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
                f"devices: {len(self.devices)} are no multiple of tensor_parallel_size = {self.tensor_parallel_size}"
            )
        return self


def _kind(value: object) -> str:
    # Tables that set a detail of the default engine need not name it.
    kind = value.get("kind", "hf") if isinstance(value, dict) else getattr(value, "kind", "")
    return str(kind)


EngineConfig = Annotated[
    Annotated[HfEngineConfig, Tag("hf")] | Annotated[VllmEngineConfig, Tag("vllm")], Discriminator(_kind)
]


class SamplerConfig(Config):
    """One sampler of one site."""

    site: str = Field(default="site-1", pattern=r"^[A-Za-z0-9._-]{1,64}$")
    """Name of the site, unique among the run's samplers."""
    coordinator: Addresses = "127.0.0.1:50051"
    """host:port of the coordinator; a list if a standby may take over."""
    tls: TlsConfig = TlsConfig()
    """Certificates of the link."""
    model_dir: str = ""
    """Hugging Face directory or hub id of the base model: its configuration, tokenizer and layout."""
    state_dir: Path = Path("runs/sampler")
    """Directory of the outbox, the record of verified versions and weights being fetched; one for each sampler."""
    metrics_port: int = Field(default=9103, ge=0, le=65535)
    """Port of the Prometheus metrics; 0: any free port. Left out: 9103, or the next free port in steps of 10."""
    metrics_host: str = Field(default="127.0.0.1", min_length=1, max_length=253)
    """Address of the metrics. They hold no secret; every host that reaches the address can read them."""
    metrics_push_s: float = Field(default=15.0, ge=0.0, le=45.0)
    """Seconds between two pushes of the metrics to the coordinator, which serves them too; 0: never."""
    tracing: TracingConfig = TracingConfig()
    """OpenTelemetry traces of groups; off without an endpoint."""
    published_dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Type of the weights that the learner publishes: bf16, fp16 or fp32."""
    variant: Literal["", "int8", "fp8_e4m3"] = ""
    """Variant of the weights to pull: int8 or fp8_e4m3, if the learner publishes it; empty: the trained weights.
    Rollouts and their log-probs are then the quantised policy's."""
    lora: LoraConfig = LoraConfig()
    """Low-rank adapters on the base model; the same on every node."""
    engine: EngineConfig = HfEngineConfig()
    """Engine that generates; `kind` is hf or vllm."""
    task: TaskConfig = TaskConfig()
    """Prompts and rewards; the same on every node."""
    sampling: SamplingConfig = SamplingConfig()
    """Sampling parameters; the same on every node."""
    join: JoinConfig | None = None
    """With this section the sampler adopts task, sampling, lora, group_size and template from the run where this file
    leaves them out. Without it the file must state everything."""
    evaluation: tuple[EvaluationSetConfig, ...] = ()
    """Evaluation sets that this site can draw, by the coordinator's names for them."""
    evaluation_share: float = Field(default=0.25, gt=0, le=1)
    """Largest share of the engine's rows for evaluation while rollouts go on."""
    evaluation_hold_s: float = Field(default=300.0, ge=0)
    """Seconds that newer weights wait for an evaluation of the current version, and that a drained sampler waits for
    the last version."""
    use_chat_template: bool = False
    """Send prompts through the tokenizer's chat template; the same on every node."""
    chat_template_arguments: dict[str, JsonValue] = Field(default_factory=dict)
    """Arguments of the chat template, such as `enable_thinking = false`; the same on every node. `strftime_now =
    "2026-11-25"` sets the date of templates that write one (default 1 January 2025)."""
    seeded_sampling: bool = False
    """Derive the noise of every token from assignment, weights and position, so that the learner can repeat the draws.
    Engine hf only, without top_p and top_k; with vLLM the learner checks log-probs."""
    group_size: int = Field(default=8, ge=2)
    """Rollouts of one prompt."""
    swap: Literal["in_flight", "drain"] = "in_flight"
    """When the engine takes new weights: `in_flight` between two tokens (rollouts then span versions and keep old keys
    and values), `drain` when the engine is empty. seeded_sampling needs `drain`."""
    work_ahead_s: float = Field(default=600.0, ge=0, le=86400)
    """Seconds of work to lease ahead, at this sampler's measured speed; an outage of that length idles nothing. 0
    leases one fill of the engine after everything is spooled, for experiments."""
    seed: int = Field(default=0, ge=0)
    """Seed of this sampler's delays."""
    delay: DelayConfig = NoDelay()
    """Delay added to the link's own, for experiments; `kind` is none, fixed, uniform, lognormal, weibull, exponential,
    sawtooth or uniform_lag."""
    trusted_keys: tuple[PublicKey, ...] = ()
    """Public keys of trusted learners (`heterorl keys new` prints one); empty accepts unsigned versions."""
    heartbeat_s: float = Field(default=2.0, gt=0)
    """Seconds between two heartbeats."""
    bandwidth: BandwidthConfig = BandwidthConfig()
    """Caps on received and sent bytes of this process."""
    payload_urls: Allowed = "https"
    """Bucket addresses that this node may read payloads from: `https`, `any` (also http and loopback) or `none`. Each
    payload is checked against its digest."""
    payload_hosts: tuple[Host, ...] = ()
    """Hosts of such addresses, `*.amazonaws.com` for all below one; HTTPS_PROXY applies to them. Empty: any host that
    does not resolve to this machine or its link, without a proxy."""
    pull_streams: int = Field(default=1, ge=1, le=16)
    """Ranges of a payload fetched at once; 2 to 4 help on long links with packet loss."""
    outbox_bytes: int = Field(default=1 << 30, ge=1 << 16)
    """Bytes of undelivered groups at which generation pauses."""

    @model_validator(mode="before")
    @classmethod
    def _drain_for_seeds(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("seeded_sampling") is True:
            return {"swap": "drain", **data}
        return data

    @model_validator(mode="after")
    def _check_evaluation(self) -> SamplerConfig:
        check_unique_names(self.evaluation)
        return self

    @model_validator(mode="after")
    def _check_variant(self) -> SamplerConfig:
        if self.variant and self.lora.is_on:
            raise ValueError("variant with lora: adapters are small and published as they are; remove one of them")
        return self

    @model_validator(mode="after")
    def _check_seeded(self) -> SamplerConfig:
        if self.seeded_sampling and not isinstance(self.engine, HfEngineConfig):
            raise ValueError("seeded_sampling needs engine hf: vLLM takes no noise from outside")
        if self.seeded_sampling and self.swap == "in_flight":
            raise ValueError('seeded_sampling needs swap = "drain": draws are named by one version of the weights')
        if self.seeded_sampling and (self.sampling.top_p < 1 or self.sampling.top_k):
            raise ValueError("seeded_sampling needs top_p = 1 and top_k = 0: truncation flips under rounding")
        return self
