"""Configuration of the backends: optimizer, step size, precision, devices, micro-batches, processes.

A step's size depends on the configuration and two counts that outlive every process. A version states the steps of the
run, a checkpoint holds the steps of the optimizer. A new optimizer warms up again and goes on with the decay.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from heterorl.common.process.config_file import Config

_Decay = Annotated[float, Field(ge=0.0, lt=1.0)]


class _Training(Config):
    """Keys of every backend."""

    lr: float = Field(default=1e-6, gt=0.0, le=1.0)
    """Step size after warm-up, before decay."""
    betas: tuple[_Decay, _Decay] = (0.9, 0.999)
    """AdamW's decay rates of first and second moments, in [0, 1)."""
    weight_decay: float = Field(default=0.0, ge=0.0, le=1.0)
    """Decoupled weight decay of every parameter."""
    grad_clip: float = Field(default=1.0, gt=0.0)
    """Largest norm of the gradient; larger gradients are scaled down."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps of linear growth to lr; repeated with a new optimizer."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Decay after warm-up, by steps of the run, restarts included."""
    lr_decay_steps: int = Field(default=0, ge=0)
    """Steps after which `linear` and `cosine` have reached lr * lr_final_ratio; both need it, usually max_steps."""
    lr_final_ratio: float = Field(default=0.0, ge=0.0, le=1.0)
    """Share of lr left after lr_decay_steps; 0 ends learning then."""
    micro_batch_tokens: int = Field(default=16384, ge=1)
    """Tokens of one pass, padding included; a longer rollout has its own pass."""
    batching: Literal["padded", "packed"] = "padded"
    """Rollouts of similar length as rows (`padded`), or in one row with block-diagonal attention (`packed`)."""
    published_dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Type of the published weights. Tensors that transformers keeps in fp32 stay fp32."""
    forward_weights: Literal["published", "masters"] = "published"
    """Weights of the loss: `published` (masters rounded, gradients passed through), or `masters`, which are never
    sampled from or exported."""
    threads: int = Field(default=0, ge=0)
    """CPU threads of torch and the weight codec; 0: torch's choice (ranks: a share of the cores), and one a core."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, a third more time."""
    attn_implementation: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    """`sdpa` (torch's fused kernels), `eager` (plain products) or `flash_attention_2` (package flash-attn, bf16 on a
    GPU)."""
    compile: bool = False
    """Compile the model's blocks at the first step; needs a C++ compiler (CPU) or Triton (GPU). Not in ZeRO stage 3 or
    with sequence_parallel."""
    sequence_parallel: int = Field(default=1, ge=1, le=1024)
    """Ranks that split the positions of each pass (Ulysses). Ranks and attention heads must be multiples of it;
    micro_batch_tokens is the total of those ranks. fsdp2 only; 1: off."""
    liger: bool = False
    """Liger's fused kernels: less memory and time. GPU only; needs the extra `gpu`."""
    compute_dtype: Literal["fp32", "bf16"] = "fp32"
    """Type of passes (torch and ZeRO stage 0: of matrix products); masters, moments, gradient sums and log-probs stay
    fp32."""

    @model_validator(mode="after")
    def _check_pairs(self) -> Self:
        if self.lr_schedule == "constant":
            if self.lr_decay_steps or self.lr_final_ratio:
                raise ValueError(
                    "lr_decay_steps and lr_final_ratio need lr_schedule linear or cosine: set it, or leave them out"
                )
        elif self.lr_decay_steps <= self.warmup_steps:
            raise ValueError(
                f"lr_schedule {self.lr_schedule} needs lr_decay_steps above warmup_steps: set it to the run's max_steps"
            )
        if self.sequence_parallel > 1 and getattr(self, "kind", "") != "fsdp2":
            raise ValueError("sequence_parallel needs backend fsdp2: set backend.kind to it, or sequence_parallel to 1")
        settings = (self.compute_dtype, getattr(self, "device", "")[:4])
        if self.attn_implementation == "flash_attention_2" and settings != ("bf16", "cuda"):
            raise ValueError(
                "attn_implementation flash_attention_2 needs compute_dtype bf16 and device cuda: set both, or take sdpa"
            )
        if self.liger and getattr(self, "device", "cpu") == "cpu":
            raise ValueError("liger's kernels run on a GPU only: set device to cuda, or liger to false")
        return self

    @property
    def has_whole_weights(self) -> bool:
        """Whether a rank has all weights."""
        return True

    @property
    def has_reference(self) -> bool:
        """Whether it computes log-probs of a reference model."""
        return isinstance(self, _Reference)

    def rate(self, *, step: int, applied_steps: int) -> float:
        """Step size: lr * min(1, (applied_steps + 1) / warmup_steps) * decay(step - 1).

        With p = (s - warmup_steps) / (lr_decay_steps - warmup_steps) in [0, 1] after s steps of the run, and f the
        final ratio: decay = f + (1 - f) (1 - p) of `linear`, f + (1 - f) (1 + cos(pi p)) / 2 of `cosine`, 1 of
        `constant`. Source of the cosine: arXiv 1608.03983 equation 5, without restarts. Steps of the run count from 1;
        `applied_steps` this optimizer has taken before.
        """
        warmth = min(1.0, (applied_steps + 1) / self.warmup_steps) if self.warmup_steps else 1.0
        return self.lr * warmth * self._decay(step - 1)

    def _decay(self, num_done: int) -> float:
        if self.lr_schedule == "constant":
            return 1.0
        progress = (num_done - self.warmup_steps) / (self.lr_decay_steps - self.warmup_steps)
        progress = min(1.0, max(0.0, progress))
        left = 1.0 - progress if self.lr_schedule == "linear" else (1.0 + math.cos(math.pi * progress)) / 2.0
        return self.lr_final_ratio + (1.0 - self.lr_final_ratio) * left


class _Reference(_Training):
    """Keys of backends with a reference model."""

    reference_model_dir: str = ""
    """Frozen model for loss.reference_kl and loss.reads_reference; empty: model_dir. fsdp2 shards it, 4 bytes a
    parameter."""


class TorchBackendConfig(_Reference):
    """One process on a CPU or one GPU."""

    kind: Literal["torch"] = "torch"
    device: str = Field(default="cpu", pattern=r"^(cpu|cuda(:[0-9]+)?)$")
    """Device of the weights."""


class _Ranks(_Training):
    """Keys of backends with several processes."""

    rank_timeout_s: float = Field(default=60.0, ge=2.0, le=3600.0)
    """A rank without heartbeats for this time ends all processes, at most a quarter later. After an error a rank waits
    this long for rank 0."""
    overlap_checkpoint: bool = True
    """Write a checkpoint during the next step from a copy in host memory, 12 bytes a parameter of the share; false:
    between steps, without copy. Needs overlap_publication."""
    device: Literal["cpu", "cuda"] = "cpu"
    """`cpu`, or `cuda`: the GPU that LOCAL_RANK numbers."""
    offload_optimizer: bool = False
    """Keep masters and moments in host memory and step there; not in ZeRO stage 0. fsdp2: gradients too, and each pass
    copies weights as fp32."""


class DeepSpeedBackendConfig(_Ranks):
    """DeepSpeed's ZeRO, with one process a device.
    On one machine: `heterorl learner --nproc N`; on many: torchrun."""

    kind: Literal["deepspeed"] = "deepspeed"
    stage: Literal[0, 1, 2, 3] = 2
    """Ranks shard `0` nothing, `1` optimizer and masters, `2` gradients too, `3` weights too."""

    @model_validator(mode="after")
    def _check_stage(self) -> DeepSpeedBackendConfig:
        if self.offload_optimizer and self.stage == 0:
            raise ValueError(
                "offload_optimizer needs stage 1, 2 or 3: stage 0 keeps the optimizer where the weights are"
            )
        if self.compile and self.stage == 3:
            raise ValueError("compile needs stage 0, 1 or 2: stage 3 gathers weights between the layers")
        return self

    @property
    def has_whole_weights(self) -> bool:
        return self.stage < 3


class Fsdp2BackendConfig(_Ranks, _Reference):
    """The same processes with torch's `fully_shard` of weights, gradients, masters and optimizer."""

    kind: Literal["fsdp2"] = "fsdp2"

    @property
    def has_whole_weights(self) -> bool:
        return False

    @model_validator(mode="after")
    def _check_compile(self) -> Fsdp2BackendConfig:
        if self.compile and self.sequence_parallel > 1:
            raise ValueError("compile does not go with sequence_parallel: set one of them, or sequence_parallel to 1")
        return self


RanksConfig = DeepSpeedBackendConfig | Fsdp2BackendConfig


def _kind(value: Any) -> str:
    # A table without `kind` is of an earlier release: one process.
    kind = value.get("kind", "torch") if isinstance(value, dict) else getattr(value, "kind", "")
    return str(kind)


BackendConfig = Annotated[
    Annotated[TorchBackendConfig, Tag("torch")]
    | Annotated[DeepSpeedBackendConfig, Tag("deepspeed")]
    | Annotated[Fsdp2BackendConfig, Tag("fsdp2")],
    Discriminator(_kind),
]
