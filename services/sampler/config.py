"""Configuration of a sampler."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

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
from heterorl.common.process.config import Config
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
"""Of vLLM's arguments those that have keys of their own here, or that an engine depends on."""
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
    """What is taken of the run's task, sampling, group size, adapters and template where this file leaves them out."""

    accept: tuple[Annotated[str, AfterValidator(_entry)], ...] = Field(default=(), max_length=64)
    """What the run's task may name here beside built-in tasks: `jsonl:DIRECTORY` and `parquet:DIRECTORY` for files
    below it, relative to where the process is started as in task.name; `hf:NAME` for branches and tags of a data set of
    the hub, `hf:NAME@REVISION` for a commit or a pull request of it, `hf:/DIRECTORY` for one on this machine,
    `reward:MODULE:FUNCTION` for your own code, `environment:NAME` for an environment as task.environment names it.
    Rewards of other kinds are never adopted: state task.rewards in this file."""
    reward_path: str = ""
    """Directory of accepted rewards and environments, taken from the configuration file's directory on; empty is that
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


def _only_one(devices: tuple[int, ...], engines: int) -> None:
    if devices and engines > 1:
        raise ValueError("devices says how many engines there are: remove engines")


Devices = Annotated[tuple[Annotated[int, Field(ge=0)], ...], AfterValidator(_distinct)]


class HfEngineConfig(Config):
    """transformers, on the CPU or GPUs."""

    kind: Literal["hf"] = "hf"
    device: str = Field(default="cpu", pattern=r"^(cpu|cuda(:[0-9]+)?)$")
    """Where the weights live: cpu, cuda or cuda:N."""
    devices: Devices = ()
    """Numbers of the GPUs of one sampler, an engine on each; empty takes `device`."""
    engines: Engines = 1
    """Engines side by side on `device`."""
    compute_dtype: Literal["fp32", "bf16"] = "fp32"
    """Type of the matrix products; log-probs are float32 either way."""
    batch_rows: int = Field(default=256, ge=1)
    """Completions that each engine generates at once; as each ends, another one begins."""
    threads: int = Field(default=0, ge=0)
    """Threads of torch and of the weight codec on the CPU; 0 leaves torch's choice, and one for each core."""

    @model_validator(mode="after")
    def _check_engines(self) -> HfEngineConfig:
        _only_one(self.devices, self.engines)
        return self


class VllmEngineConfig(Config):
    """vLLM in processes of its own, on the devices that its package is built for."""

    kind: Literal["vllm"] = "vllm"
    compute_dtype: Literal["fp32", "bf16", "fp16"] = "bf16"
    """Type of the matrix products; log-probs are float32 in any case."""
    devices: Devices = ()
    """Numbers of the GPUs of one sampler, `tensor_parallel_size` for each engine; empty takes what vLLM takes."""
    engines: Engines = 1
    """Engines side by side without `devices`: on a CPU, or on one GPU with a share of its memory each."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """Devices that share the model."""
    batch_rows: int = Field(default=256, ge=1)
    """Completions that each engine generates at once; as each ends, another one begins."""
    enforce_eager: bool | None = None
    """Compile nothing and record no graphs: slower on a GPU, quicker to start. Left out, it is so on a CPU only."""
    extra: dict[str, JsonValue] = Field(default_factory=dict)
    """More arguments of vLLM's engine, by its own names, such as `quantization`; none that other keys decide."""
    prefix_cache: bool = True
    """Share keys and values of equal prompt prefixes within a version."""
    max_model_len: int = Field(default=0, ge=0)
    """Longest prompt and completion, tokens; 0 is the model's."""
    kv_cache_bytes: int = Field(default=0, ge=0)
    """Memory of keys and values; 0 leaves it to vLLM. Set it on the CPU, where vLLM takes most of the machine's."""
    memory_share: float = Field(default=0.9, gt=0, le=1)
    """Share of the device's memory for weights, keys and values."""
    canary_tolerance: float = Field(default=0.0, ge=0)
    """Mean difference of log-probs from the float32 reference at which a swap is refused, nats; 0 takes 1e-4 for fp32,
    0.02 for fp16 and 0.1 for bf16."""
    canary_device: str = Field(default="cpu", pattern=r"^(cpu|cuda(:[0-9]+)?)$")
    """What computes the float32 reference: cpu, cuda or cuda:N. On a CPU a swap costs some 6 core-seconds for each
    10^9 weights; on a GPU it needs room beside vLLM (`memory_share`) for the largest layer in float32."""
    weights_dir: str = ""
    """Where weights lie on their way to vLLM's processes; empty is state_dir. A memory file system saves time."""
    threads: int = Field(default=0, ge=0)
    """Threads of the weight codec and the reference on the CPU; 0 leaves torch's choice, and one for each core."""

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

    @model_validator(mode="after")
    def _check_engines(self) -> VllmEngineConfig:
        _only_one(self.devices, self.engines)
        return self


def _kind(value: object) -> str:
    # Tables that set a detail of the default engine need not name it.
    kind = value.get("kind", "hf") if isinstance(value, dict) else getattr(value, "kind", "")
    return str(kind)


EngineConfig = Annotated[
    Annotated[HfEngineConfig, Tag("hf")] | Annotated[VllmEngineConfig, Tag("vllm")], Discriminator(_kind)
]


class SamplerConfig(Config):
    """One sampler at one site."""

    site: str = Field(default="site-1", pattern=r"^[A-Za-z0-9._-]{1,64}$")
    """Name of the site; unique among the run's samplers."""
    coordinator: Addresses = "127.0.0.1:50051"
    """host:port of the coordinator; a list where a standby may take its place."""
    tls: TlsConfig = TlsConfig()
    """Certificates of the link."""
    model_dir: str = ""
    """Hugging Face directory or hub id that the run starts from: configuration, tokenizer and layout come from it."""
    state_dir: Path = Path("runs/sampler")
    """Directory of the outbox, the verified versions and the weights being fetched; each sampler needs its own."""
    metrics_port: int = Field(default=9103, ge=0, le=65535)
    """Port of the Prometheus metrics; 0 lets the system choose. Left out, the next free one in steps of 10."""
    metrics_host: str = Field(default="127.0.0.1", min_length=1, max_length=253)
    """Address that the metrics are served on; they carry no secret, and whoever can reach them can read them."""
    metrics_push_s: float = Field(default=15.0, ge=0.0, le=45.0)
    """Seconds between two pushes of these metrics to the coordinator, which shows them in its place; 0 is never."""
    tracing: TracingConfig = TracingConfig()
    """Traces of groups by OpenTelemetry; off unless it names an endpoint."""
    published_dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Type that the learner publishes: bf16, fp16 or fp32."""
    variant: Literal["", "int8", "fp8_e4m3"] = ""
    """Form of the weights that is pulled: int8 or fp8_e4m3, one of the learner's variants; empty takes them as they are
    trained. Rollouts are then the quantised policy's, and so are their log-probs."""
    lora: LoraConfig = LoraConfig()
    """Low-rank adapters on the weights of model_dir; the same on every node."""
    engine: EngineConfig = HfEngineConfig()
    """Engine that generates; `kind` is hf or vllm."""
    task: TaskConfig = TaskConfig()
    """Prompts and reward; the same on every node."""
    sampling: SamplingConfig = SamplingConfig()
    """How tokens are drawn; the same on every node."""
    join: JoinConfig | None = None
    """Take from the run what this file leaves out of task, sampling, lora, group_size and template, within these
    bounds. Without this section nothing is taken: the file states everything."""
    evaluation: tuple[EvaluationSetConfig, ...] = ()
    """Sets that this site can evaluate, by the names that the coordinator gives them; none: it evaluates nothing."""
    evaluation_share: float = Field(default=0.25, gt=0, le=1)
    """Largest part of the engine's rows that an evaluation takes beside rollouts, which have the others."""
    evaluation_hold_s: float = Field(default=300.0, ge=0)
    """How long newer weights wait for an evaluation of the ones in use, seconds, while rollouts go on; and how long a
    drained sampler waits for the last version."""
    use_chat_template: bool = False
    """Send prompts through the tokenizer's chat template; the same on every node."""
    chat_template_arguments: dict[str, JsonValue] = Field(default_factory=dict)
    """What the template is given beside the messages, such as `enable_thinking = false`; the same on every node.
    `strftime_now = "2026-11-25"` is the date for templates that write one; without it they write 1 January 2025."""
    seeded_sampling: bool = False
    """Draw every token with noise that the assignment, the weights and the position decide, so that the learner can
    repeat the draws; engine hf, without top_p and top_k. vLLM cannot: its rollouts are checked by log-probs alone."""
    group_size: int = Field(default=8, ge=2)
    """Rollouts of one prompt."""
    swap: Literal["in_flight", "drain"] = "in_flight"
    """When new weights are taken: `in_flight` between two tokens of what is under way, whose rollouts then span
    versions and keep the keys and values that they have; `drain` when no completion and no turn is under way: a swap
    that is due lets none begin. seeded_sampling takes `drain`."""
    work_ahead_s: float = Field(default=600.0, ge=0, le=86400)
    """Seconds for which assignments are leased ahead, at this sampler's own speed: an outage so long idles nothing. 0
    leases a fill of the engine when everything before it is spooled, for experiments."""
    seed: int = Field(default=0, ge=0)
    """Seed of this sampler's delays."""
    delay: DelayConfig = NoDelay()
    """Delay added to the link's own; `kind` is none, fixed, uniform, lognormal, weibull, exponential, sawtooth
    or uniform_lag."""
    trusted_keys: tuple[PublicKey, ...] = ()
    """Public keys of learners whose versions are used (`heterorl keys new` prints one); none accepts unsigned ones."""
    heartbeat_s: float = Field(default=2.0, gt=0)
    """Seconds between two heartbeats."""
    bandwidth: BandwidthConfig = BandwidthConfig()
    """Caps of what this process receives and sends."""
    payload_urls: Allowed = "https"
    """Addresses in a bucket that the coordinator gives and this node reads payloads from: of `https` on other
    machines, `any` (http and loopback too) or `none`; what they bring is compared with its digest."""
    payload_hosts: tuple[Host, ...] = ()
    """Hosts that such addresses may name, `*.amazonaws.com` for all below one; HTTPS_PROXY of the environment serves
    them. Empty: any host whose name resolves neither to this machine nor to its link, and no proxy."""
    pull_streams: int = Field(default=1, ge=1, le=16)
    """Ranges of a payload fetched at once; 2 to 4 help on long links that lose packets."""
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
