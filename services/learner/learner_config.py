"""Configuration of the learner."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

from pydantic import Field, JsonValue, model_validator

from heterorl.common.identity.signing import PublicKey
from heterorl.common.identity.tls import TlsConfig
from heterorl.common.model.contract import LoraConfig, SamplingConfig
from heterorl.common.process.address import Addresses
from heterorl.common.process.config_file import Config
from heterorl.common.process.tracing import TracingConfig
from heterorl.common.rpc.presigned import Allowed, Host
from heterorl.common.rpc.transport_options import BandwidthConfig
from heterorl.common.tasks.task_config import TaskConfig
from heterorl.common.types.common import SamplingSemantics
from heterorl.learner.checks.findings import VerificationConfig
from heterorl.learner.checks.reward_signal import DynamicSamplingConfig
from heterorl.learner.loss.loss_config import GepoConfig, LossConfig
from heterorl.learner.train.backend_config import BackendConfig, TorchBackendConfig


class EvaluationConfig(Config):
    """Held-out accuracy while training."""

    every_versions: int = Field(default=0, ge=0)
    """Versions between evaluations; 0 is off. A version is published after its evaluation."""
    num_prompts: int = Field(default=64, ge=1)
    """Held-out prompts, always the first ones."""
    num_per_prompt: int = Field(default=1, ge=1)
    """Completions of each prompt."""
    temperature: float = Field(default=0.0, ge=0)
    """Softmax temperature; 0 takes the most likely token."""
    batch_rows: int = Field(default=64, ge=1)
    """Completions generated at once."""
    seed: int = Field(default=0, ge=0)
    """Seed of sampled completions, the same for every version."""


class LearnerConfig(Config):
    """The learner of one run; a second learner may wait for its lease."""

    run_id: str = Field(default="run", pattern=r"^[A-Za-z0-9._-]{1,64}$")
    """Name of the run; the same as the coordinator's."""
    holder: str = Field(default="learner", pattern=r"^[A-Za-z0-9._-]{1,64}$")
    """Name of this learner. A restart from the same state_dir takes the lease back at once; another learner waits."""
    coordinator: Addresses = "127.0.0.1:50051"
    """host:port of the coordinator; a list where there is a standby."""
    tls: TlsConfig = TlsConfig()
    """Certificates of the connection."""
    model_dir: str = Field(default="", max_length=4096)
    """Hugging Face directory or hub id of the model to start from, with its tokenizer."""
    state_dir: Path = Path("runs/learner")
    """Directory of checkpoints and journals; keep it across restarts."""
    signing_key: Path | None = None
    """File of the private key that signs every version, mode 0600; `heterorl keys new` makes one. None: not signed."""
    trusted_keys: tuple[PublicKey, ...] = ()
    """Public keys of earlier learners of this run, accepted on resume."""
    task: TaskConfig = TaskConfig()
    """Prompts and reward; the same on every node."""
    sampling: SamplingConfig = SamplingConfig()
    """How samplers draw tokens; the same on every node."""
    use_chat_template: bool = False
    """Whether prompts go through the tokenizer's chat template; the same on every node."""
    chat_template_arguments: dict[str, JsonValue] = Field(default_factory=dict)
    """Arguments of the template, such as `enable_thinking = false`; the same on every node. `strftime_now =
    "2026-11-25"` sets the date for templates that write one; the default is 1 January 2025."""
    group_size: int = Field(default=8, ge=1, le=4096)
    """Rollouts of one prompt."""
    groups_per_step: int = Field(default=32, ge=1)
    """Groups of one optimizer step. Times steps_per_version it should be the coordinator's groups_per_version."""
    steps_per_version: int = Field(default=1, ge=1)
    """Optimizer steps between publications."""
    max_steps: int = Field(default=1000, ge=1)
    """Optimizer steps of the whole run, restarts included; then the run drains and the learner ends."""
    max_rejected_steps: int = Field(default=10, ge=1)
    """Steps in a row whose loss or gradient is not finite, after which the learner stops."""
    max_sequence_tokens: int = Field(default=0, ge=0)
    """Longest prompt plus completion, tokens; groups with a longer one are abandoned and counted. 0 is no bound."""
    prefetch_steps: int = Field(default=1, ge=1, le=64)
    """Steps' worth of groups that wait in memory, where they grow older."""
    verification: VerificationConfig = VerificationConfig()
    """Checks of rollouts before training."""
    dynamic_sampling: DynamicSamplingConfig = DynamicSamplingConfig()
    """Replacement of groups whose rewards are all equal."""
    loss: LossConfig = GepoConfig()
    """Algorithm, advantage, clip and KL."""
    adopt_without_optimizer: bool = False
    """Whether a learner without a usable checkpoint may go on from the published weights with a new optimizer."""
    backend: BackendConfig = TorchBackendConfig()
    """Device, precision and optimizer."""
    lora: LoraConfig = LoraConfig()
    """Low-rank adapters that are trained and sent instead of all weights; the same on every node."""
    variants: tuple[Literal["int8", "fp8_e4m3"], ...] = ()
    """Quantised forms in which every version is published too, for samplers on slow links."""
    snapshot_every_versions: int = Field(default=50, ge=1)
    """Versions between snapshots, published in addition to the delta; bounds what a new sampler downloads."""
    overlap_publication: bool = True
    """Whether the next step computes while a version is encoded, checkpointed, uploaded and committed."""
    checkpoint_every_versions: int = Field(default=0, ge=0)
    """Versions between checkpoints, k. 0 chooses 1 for checkpoints below 4 GiB, else 10; a checkpoint has 14 bytes a
    parameter. Masters and optimizer are copied into the host's memory at the end of a step and written during the next
    one; the version is published when all is on the disk. After a crash or a signal up to k - 1 published versions are
    abandoned and trained again; 1 abandons none."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Held-out accuracy."""
    retry_base_s: float = Field(default=0.2, gt=0)
    """First wait after a lost call, seconds; doubles with each attempt, with random jitter."""
    retry_cap_s: float = Field(default=10.0, gt=0)
    """Longest wait between attempts, seconds; the learner retries forever."""
    payload_urls: Allowed = "https"
    """Bucket addresses from the coordinator that this node reads from and writes to: `https` on other machines, `any`
    (http and loopback too) or `none`; every payload is compared with its digest."""
    payload_hosts: tuple[Host, ...] = ()
    """Hosts that such addresses may name, `*.amazonaws.com` for all below one; HTTPS_PROXY of the environment serves
    them. Empty: any host that does not resolve to this machine or its network, without proxy."""
    bandwidth: BandwidthConfig = BandwidthConfig()
    """Limits of received and sent bytes."""
    max_message_bytes: int = Field(default=16 << 20, ge=2 << 20, le=512 << 20)
    """Largest message, bytes; the same as the coordinator's."""
    metrics_port: int = Field(default=9102, ge=0, le=65535)
    """Port of the Prometheus metrics; 0 lets the system choose. Left out, the next free one in steps of 10."""
    metrics_host: str = Field(default="127.0.0.1", min_length=1, max_length=253)
    """Address that the metrics are served on; they hold no secrets and need no login."""
    metrics_push_s: float = Field(default=15.0, ge=0.0, le=45.0)
    """Seconds between two pushes of these metrics to the coordinator, which shows them too; 0 is never."""
    tracing: TracingConfig = TracingConfig()
    """Traces of groups by OpenTelemetry; off without an endpoint."""

    def drawn_semantics(self) -> SamplingSemantics:
        """The settings of `sampling` with the most drawn tokens of a rollout, which losses may divide by."""
        own, num_turns = self.sampling.semantics(), self.task.max_turns_of_all
        if num_turns == 1:
            return own
        longest = min(num_turns * own.max_new_tokens, self.sampling.max_trajectory_tokens)
        return dataclasses.replace(own, max_new_tokens=longest)

    @model_validator(mode="after")
    def _check_environment(self) -> LearnerConfig:
        if not self.task.has_environment:
            return self
        if not self.use_chat_template:
            raise ValueError("task.environment: turns need a chat template; set use_chat_template = true")
        if self.sampling.router_replay != "none":
            raise ValueError('task.environment with sampling.router_replay: set router_replay to "none"')
        if self.verification.require_seeded:
            raise ValueError("task.environment with verification.require_seeded: draws of turns are not repeated")
        return self

    @model_validator(mode="after")
    def _check_pairs(self) -> LearnerConfig:
        if self.trusted_keys and self.signing_key is None:
            raise ValueError("trusted_keys without signing_key: this learner would refuse its own versions on resume")
        if self.dynamic_sampling.max_replaced_per_step and self.group_size < 2:
            raise ValueError("dynamic_sampling with group_size 1: each group would be replaced; set it to 0")
        if len(set(self.variants)) != len(self.variants):
            raise ValueError("variants names one twice")
        if self.variants and self.lora.is_on:
            raise ValueError("variants with lora: adapters are small and published as they are; remove one of them")
        if self.retry_cap_s < self.retry_base_s:
            raise ValueError("retry_cap_s is below retry_base_s")
        return self

    @model_validator(mode="after")
    def _check_router_replay(self) -> LearnerConfig:
        if self.sampling.router_replay == "none":
            return self
        if self.backend.kind not in ("torch", "fsdp2"):
            raise ValueError(f"sampling.router_replay with backend {self.backend.kind}: use torch or fsdp2")
        if self.backend.compile or self.backend.sequence_parallel > 1:
            raise ValueError(
                "sampling.router_replay does not go with compile or sequence_parallel: set one of them off,"
                ' or router_replay to "none"'
            )
        if self.verification.logprob_floor > 0:
            raise ValueError(
                "sampling.router_replay with verification.logprob_floor: a site that has to be checked may record any"
                ' experts; set router_replay to "none", or logprob_floor to 0'
            )
        return self

    @model_validator(mode="after")
    def _check_replays(self) -> LearnerConfig:
        if self.backend.liger and self.verification.logprob_floor > 0 and self.verification.device == "cpu":
            raise ValueError(
                "verification.logprob_floor with backend.liger: its kernels, which every model of the kind has in this"
                " process, run on a GPU only; set verification.device to cuda, or liger to false"
            )
        return self
