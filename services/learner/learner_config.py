"""Configuration of the learner."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from heterorl.common.errors import ConfigError
from heterorl.common.identity.signing import PublicKey
from heterorl.common.model.contract import ContractConfig
from heterorl.common.process.config_file import Config, checked
from heterorl.common.process.tracing import TracingConfig
from heterorl.common.types.common import SamplingSemantics
from heterorl.learner.checks.findings import VerificationConfig
from heterorl.learner.loss.loss_config import GepoConfig, LossConfig
from heterorl.learner.train.backend_config import BackendConfig, TorchBackendConfig


class DynamicSamplingConfig(Config):
    """Replacement of groups of equal rewards (DAPO, arXiv 2503.14476 section 3.2)."""

    max_replaced_per_step: int = Field(default=0, ge=0, le=1 << 20)
    """Most groups of equal rewards that a step replaces; others are trained on. With a share u of such groups it
    replaces groups_per_step u / (1 - u). 0: none."""


class EvaluationConfig(Config):
    """Held-out accuracy while training."""

    every_versions: int = Field(default=0, ge=0)
    """Versions between evaluations, which delay the publication; 0: off."""
    num_prompts: int = Field(default=64, ge=1)
    """Held-out prompts, from the first on."""
    samples_per_prompt: int = Field(default=1, ge=1)
    """Completions of each prompt."""
    temperature: float = Field(default=0.0, ge=0)
    """Softmax temperature; 0 is greedy."""
    batch_rows: int = Field(default=64, ge=1)
    """Completions generated at once."""
    seed: int = Field(default=0, ge=0)
    """Seed of the draws, the same for every version."""


class LearnerConfig(ContractConfig):
    """The learner of one run; a second may wait for its lease.
    It can continue only with a copy of the first one's `state_dir`."""

    run_id: str = Field(default="run", pattern=r"^[A-Za-z0-9._-]{1,64}$")
    """Name of the run, equal at coordinator and learner."""
    holder: str = Field(default="learner", pattern=r"^[A-Za-z0-9._-]{1,64}$")
    """Name of this learner, which regains its lease at once after a restart with its state_dir; other names wait."""
    state_dir: Path = Path("runs/learner")
    """Directory of checkpoints and journals; keep it across restarts."""
    signing_key: Path | None = None
    """Private key file (`heterorl keys new`), mode 0600, that signs versions; none: unsigned."""
    trusted_keys: tuple[PublicKey, ...] = ()
    """Public keys of the run's earlier learners, accepted on resume."""
    group_size: int = Field(default=8, ge=2, le=4096)
    """Rollouts of one prompt; equal on every node."""
    groups_per_step: int = Field(default=32, ge=1)
    """Groups of one optimizer step; times steps_per_version: the coordinator's groups_per_version."""
    steps_per_version: int = Field(default=1, ge=1)
    """Optimizer steps between versions."""
    max_steps: int = Field(default=1000, ge=1)
    """Optimizer steps of the run, restarts included; then it drains and ends."""
    max_rejected_steps: int = Field(default=10, ge=1)
    """Consecutive steps with non-finite loss or gradient that end the learner."""
    max_sequence_tokens: int = Field(default=0, ge=0)
    """Longest prompt plus completion; groups with a longer one are abandoned. 0: no bound."""
    prefetch_steps: int = Field(default=1, ge=1, le=64)
    """Steps' worth of groups that wait in memory, where they grow older."""
    verification: VerificationConfig = VerificationConfig()
    """Checks of rollouts before training."""
    dynamic_sampling: DynamicSamplingConfig = DynamicSamplingConfig()
    """Replacement of groups whose rewards are all equal."""
    loss: LossConfig = GepoConfig()
    """Algorithm, advantage, clip and KL. p is the learner's probability, q the sampler's. Good and bad rollouts are
    better and worse than their group's mean."""
    adopt_without_optimizer: bool = False
    """Whether a learner without usable checkpoint continues from the published weights with a new optimizer."""
    backend: BackendConfig = TorchBackendConfig()
    """Device, precision and optimizer."""
    variants: tuple[Literal["int8", "fp8_e4m3"], ...] = ()
    """Quantised forms of every version, for samplers on slow links."""
    snapshot_every_versions: int = Field(default=50, ge=1)
    """Versions between snapshots, which bound the download of a new sampler."""
    overlap_publication: bool = True
    """Whether the next step computes during a publication, from encoding (several ranks: after it) to commit."""
    checkpoint_every_versions: int = Field(default=0, ge=0)
    """Versions between checkpoints, k; 0: every version if a checkpoint is below 4 GiB (14 bytes a parameter),
    else 10. A crash or signal abandons up to k - 1 published versions."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Held-out accuracy."""
    retry_base_s: float = Field(default=0.2, gt=0)
    """First wait after a lost call; doubles with each attempt, with jitter."""
    retry_cap_s: float = Field(default=10.0, gt=0)
    """Longest wait between attempts, which never end."""
    max_message_bytes: int = Field(default=16 << 20, ge=2 << 20, le=512 << 20)
    """Largest message, which bounds a group. Learner and relay: at least the coordinator's."""
    metrics_port: int = Field(default=9102, ge=0, le=65535)
    """Port of the Prometheus metrics; 0: any free one. Left out: the default or the next free one in steps of 10."""
    tracing: TracingConfig = TracingConfig()
    """Traces of groups by OpenTelemetry."""

    def drawn_semantics(self) -> SamplingSemantics:
        """The settings of `sampling`, with a rollout's most drawn tokens.
        Losses may divide by these."""
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
        if self.task.max_turns_of_all > 1 and self.evaluation.every_versions:
            raise ValueError(
                "evaluation.every_versions with task.max_turns above 1: the learner draws one turn of an episode; set"
                " it to 0 and add [[evaluation]] to the coordinator and the samplers"
            )
        sampling = self.sampling
        if self.task.max_turns_of_all > 1 and sampling.max_new_tokens > sampling.max_trajectory_tokens:
            raise ValueError(
                f"sampling.max_new_tokens {sampling.max_new_tokens} is above max_trajectory_tokens"
                f" {sampling.max_trajectory_tokens}: groups with a longer first turn are refused; raise the latter"
            )
        return self

    def to_text(self) -> str:
        """The stated keys as JSON: sources of a mixture inherit the others."""
        return json.dumps(self.stated())

    @classmethod
    def of_text(cls, text: str) -> LearnerConfig:
        """An equal configuration, in another process."""
        return cls.model_validate(json.loads(text))

    def check_backend(self) -> None:
        """Raise ConfigError for keys that the backend cannot follow."""
        if self.lora.is_on and self.backend.kind == "deepspeed":
            raise ConfigError("lora", "backend deepspeed trains all weights", action="use backend fsdp2 or torch")
        key = self.loss.reference_key
        if key and not self.backend.has_reference:
            problem = "needs log-probs of a reference model, which this backend does not divide"
            action = 'set backend.kind to "fsdp2" or "torch", or take another loss'
            raise ConfigError(f"loss.{key}", problem, action=action)
        if getattr(self.backend, "reference_model_dir", "") and not key:
            action = "set loss.reference_kl above 0, or remove backend.reference_model_dir"
            raise ConfigError("backend.reference_model_dir", "the loss reads no reference model", action=action)

    @model_validator(mode="after")
    def _check_pairs(self) -> LearnerConfig:
        checked(self.sampling.members, self.group_size)
        checked(self.check_backend)
        if self.trusted_keys and self.signing_key is None:
            raise ValueError(
                "trusted_keys without signing_key: the learner would refuse its own versions on resume; set signing_key"
            )
        if len(set(self.variants)) != len(self.variants):
            raise ValueError("variants names one twice: remove it")
        if self.variants and self.lora.is_on:
            raise ValueError("variants with lora: adapters are small and published as they are; remove one of them")
        if self.retry_cap_s < self.retry_base_s:
            raise ValueError("retry_cap_s is below retry_base_s: raise it, or lower retry_base_s")
        if self.backend.liger and self.verification.logprob_floor > 0 and self.verification.device == "cpu":
            raise ValueError(
                "verification.logprob_floor with backend.liger: its kernels, which every model of the kind has in this"
                " process, run on a GPU only; set verification.device to cuda, or liger to false"
            )
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
        # The reference model would route by itself, and the loss pull the policy towards other experts.
        if key := self.loss.reference_key:
            off = "0" if key == "reference_kl" else "false"
            raise ValueError(
                f"sampling.router_replay with loss.{key}: the reference model does not replay; set loss.{key} to {off},"
                ' or router_replay to "none"'
            )
        if self.verification.logprob_floor > 0:
            raise ValueError(
                "sampling.router_replay with verification.logprob_floor: a site that has to be checked may record any"
                ' experts; set router_replay to "none", or logprob_floor to 0'
            )
        return self
