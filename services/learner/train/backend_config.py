"""Configuration of the backends: optimizer, step size, precision, devices, micro-batches, number of processes.

A step's size depends on the configuration and two counts that outlive every process: steps of the run, which a version
states, and steps of the optimizer, which a checkpoint holds. A new optimizer warms up again and goes on with the decay.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from heterorl.common.process.config_file import Config

Shape = Literal["constant", "linear", "cosine"]
OptimizerName = Literal["adamw", "adafactor"]
_Decay = Annotated[float, Field(ge=0.0, lt=1.0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A warm-up and a decay; see `rate`.

    Example: Schedule(lr=1e-6, warmup_steps=10, shape="cosine", decay_steps=500, final_ratio=0.1)
    """

    lr: float
    warmup_steps: int = 0
    shape: Shape = "constant"
    decay_steps: int = 0
    final_ratio: float = 0.0

    def rate(self, *, step: int, applied_steps: int) -> float:
        """Step size: lr * min(1, (applied_steps + 1) / warmup_steps) * decay(step - 1).

        With p = (s - warmup_steps) / (decay_steps - warmup_steps) in [0, 1] after s steps of the run, and f the final
        ratio: decay = f + (1 - f) (1 - p) of `linear`, f + (1 - f) (1 + cos(pi p)) / 2 of `cosine`, 1 of `constant`.
        Source of the cosine: arXiv 1608.03983 equation 5, without restarts. Steps of the run count from 1;
        `applied_steps` this optimizer has taken before.
        """
        warmth = min(1.0, (applied_steps + 1) / self.warmup_steps) if self.warmup_steps else 1.0
        return self.lr * warmth * self._decay(step - 1)

    def _decay(self, num_done: int) -> float:
        if self.shape == "constant":
            return 1.0
        progress = (num_done - self.warmup_steps) / (self.decay_steps - self.warmup_steps)
        progress = min(1.0, max(0.0, progress))
        left = 1.0 - progress if self.shape == "linear" else (1.0 + math.cos(math.pi * progress)) / 2.0
        return self.final_ratio + (1.0 - self.final_ratio) * left


class _Training(Config):
    """Keys of every backend."""

    lr: float = Field(default=1e-6, gt=0.0, le=1.0)
    """Step size of the optimizer after warm-up, before any decay."""
    optimizer: OptimizerName = "adamw"
    """adamw, or adafactor, which keeps a mean square of each row and column instead of two moments: 8 bytes a parameter
    less on the device and in a checkpoint. Adafactor's step is lr times the root mean square of each tensor, at least
    0.001: on weights of 0.02 the same lr moves 50 times less than AdamW's. Backend torch only."""
    betas: tuple[_Decay, _Decay] = (0.9, 0.999)
    """AdamW decay rates of the first and second moments, each in [0, 1)."""
    weight_decay: float = Field(default=0.0, ge=0.0, le=1.0)
    """Decoupled weight decay, applied to every parameter."""
    grad_clip: float = Field(default=1.0, gt=0.0)
    """Largest norm of the whole gradient; larger gradients are scaled down to it."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the step size grows linearly from lr / warmup_steps to lr; repeated with a new optimizer."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Decay of the step size after warm-up, by the steps of the run, restarts included."""
    lr_decay_steps: int = Field(default=0, ge=0)
    """Step of the run at which linear and cosine reach lr * lr_final_ratio and stay there, usually max_steps; both need
    it."""
    lr_final_ratio: float = Field(default=0.0, ge=0.0, le=1.0)
    """Share of lr left at lr_decay_steps; 0 ends learning there."""
    micro_batch_tokens: int = Field(default=16384, ge=1)
    """Tokens of one forward and backward pass, padding included; a longer rollout gets a pass of its own."""
    batching: Literal["padded", "packed"] = "padded"
    """Rollouts of similar length side by side, or packed into one row with block-diagonal attention."""
    published_dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Type of the weights that samplers receive. Tensors that transformers keeps in fp32, such as a router's
    correction, stay fp32."""
    forward_weights: Literal["published", "masters"] = "published"
    """Weights of the loss: as published, that is fp32 masters rounded to published_dtype with gradients passed straight
    through; or the masters themselves, which are never sampled from or exported."""
    dead_band_ulp: float = Field(default=0.0, ge=0.0, le=4.0)
    """Weights within this many units in the last place of their published value keep it: 0.75 makes deltas about a
    quarter smaller. Values below 0.5 gain nothing; 0 rounds every weight. Changes that are held back are published
    later."""
    threads: int = Field(default=0, ge=0)
    """CPU threads of torch and of the weight codec; 0 leaves torch's choice, and one for each core."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    attn_implementation: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    """Attention by torch's fused kernels, by plain products that hold every score, or by the package flash-attn, which
    runs in bf16 on a GPU only."""
    compile: bool = False
    """Compile the model's blocks at the first step; needs a C++ compiler on the CPU, Triton on a GPU. Numbers stay up
    to rounding. Not in ZeRO stage 3."""
    sequence_parallel: int = Field(default=1, ge=1, le=1024)
    """Ranks that share each pass, every one with a slice of the positions (Ulysses), for rollouts too long for one
    device; a divisor of the number of ranks and of the attention heads. micro_batch_tokens then count for all that
    share. Backend fsdp2 only; 1 is off."""
    liger: bool = False
    """Liger's fused kernels for norms, positions and gated layers: less memory and time. GPU only; needs `pip install
    'heterorl[gpu]'`."""

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
        if self.optimizer == "adafactor" and "betas" in self.model_fields_set:
            raise ValueError("betas are AdamW's: leave them out, or set optimizer to adamw")
        settings = (getattr(self, "compute_dtype", ""), getattr(self, "device", "")[:4])
        if self.attn_implementation == "flash_attention_2" and settings != ("bf16", "cuda"):
            raise ValueError(
                "attn_implementation flash_attention_2 needs compute_dtype bf16 and device cuda: set both, or take sdpa"
            )
        return self

    @property
    def schedule(self) -> Schedule:
        """The step size of every step."""
        return Schedule(
            lr=self.lr,
            warmup_steps=self.warmup_steps,
            shape=self.lr_schedule,
            decay_steps=self.lr_decay_steps,
            final_ratio=self.lr_final_ratio,
        )


def _refuse_slices(config: _Training) -> None:
    if config.sequence_parallel > 1:
        raise ValueError("sequence_parallel needs backend fsdp2: set backend.kind to it, or sequence_parallel to 1")


class TorchBackendConfig(_Training):
    """One process, CPU or one GPU; weights are kept in fp32 and published in a narrower type."""

    kind: Literal["torch"] = "torch"
    compute_dtype: Literal["fp32", "bf16"] = "fp32"
    """Type of matrix products; log-probabilities are normalised in fp32 either way."""
    device: str = Field(default="cpu", pattern=r"^(cpu|cuda(:[0-9]+)?)$")
    """Device of the weights: cpu, cuda or cuda:N."""
    reference_model_dir: str = ""
    """Frozen model for `loss.reference_kl` and custom losses with `loss.reads_reference`, loaded for them only; empty
    is model_dir, that is version 0."""

    @model_validator(mode="after")
    def _check_slices(self) -> TorchBackendConfig:
        _refuse_slices(self)
        return self


class _Ranks(_Training):
    """Keys of backends with several processes."""

    rank_timeout_s: float = Field(default=60.0, ge=2.0, le=3600.0)
    """Seconds without a heartbeat after which all processes of a learner that a launcher started end, with exit code 1,
    or by SIGKILL where one is stopped; at most a quarter more passes. Also how long another process than the first
    waits, after an error, for the first one to meet it too."""
    overlap_checkpoint: bool = True
    """Copy masters and moments to the host's memory, 12 bytes a parameter of each process's share, and write the copy
    while the next step computes; false writes them between two steps, without a copy. Only with overlap_publication."""
    device: Literal["cpu", "cuda"] = "cpu"
    """cuda gives each process the GPU of its number on its machine, LOCAL_RANK."""

    @model_validator(mode="after")
    def _check_elementwise(self) -> Self:
        if self.optimizer == "adafactor":
            raise ValueError(
                "optimizer adafactor takes statistics of whole matrices, of which a rank has some rows:"
                " use adamw, or backend torch"
            )
        return self


class DeepSpeedBackendConfig(_Ranks):
    """One process for each device of one machine (`heterorl learner --nproc N`) or of many (torchrun), joined by
    DeepSpeed's ZeRO."""

    kind: Literal["deepspeed"] = "deepspeed"
    stage: Literal[0, 1, 2, 3] = 2
    """What is sharded among the ranks: 0 nothing, 1 optimizer and masters, 2 gradients too, 3 the weights too."""
    offload_optimizer: bool = False
    """Keep masters and moments in host memory and step there; stages 1 to 3."""
    compute_dtype: Literal["fp32", "bf16"] = "fp32"
    """bf16: type of passes and of the weights that they use, independent of forward_weights; masters, moments and
    accumulated gradients stay fp32. In stage 0 only matrix products are bf16."""

    @model_validator(mode="after")
    def _check_stage(self) -> DeepSpeedBackendConfig:
        _refuse_slices(self)
        if self.offload_optimizer and self.stage == 0:
            raise ValueError(
                "offload_optimizer needs stage 1, 2 or 3: stage 0 keeps the optimizer where the weights are"
            )
        if self.compile and self.stage == 3:
            raise ValueError("compile needs stage 0, 1 or 2: stage 3 gathers weights between the layers")
        return self


class Fsdp2BackendConfig(_Ranks):
    """One process for each device of one machine (`heterorl learner --nproc N`) or of many (torchrun); torch's
    `fully_shard` shards weights, gradients, masters and optimizer among all of them."""

    kind: Literal["fsdp2"] = "fsdp2"
    compute_dtype: Literal["fp32", "bf16"] = "fp32"
    """bf16: weights are gathered and passes computed in it, independent of forward_weights; masters, moments and
    accumulated gradients stay fp32."""
    reference_model_dir: str = ""
    """Frozen model for `loss.reference_kl` and custom losses with `loss.reads_reference`, loaded for them only and
    sharded, 4 bytes a parameter among all ranks. Empty is model_dir, that is version 0."""
    offload_optimizer: bool = False
    """Keep masters, gradients and moments in host memory and step there; every pass copies this rank's rows of each
    block to its device as fp32."""

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
