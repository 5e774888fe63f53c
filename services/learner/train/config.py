"""How the learner computes: optimizer, precision, devices, micro-batches, and how many processes share the work."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from heterorl.common.process.config import Config

_Decay = Annotated[float, Field(ge=0.0, lt=1.0)]


class _Training(Config):
    """What every backend has."""

    lr: float = Field(default=1e-6, gt=0.0, le=1.0)
    """AdamW step size after warm-up."""
    betas: tuple[_Decay, _Decay] = (0.9, 0.999)
    """AdamW decay rates of the first and second moments, each in [0, 1)."""
    weight_decay: float = Field(default=0.0, ge=0.0, le=1.0)
    """AdamW decoupled weight decay, applied to every parameter."""
    grad_clip: float = Field(default=1.0, gt=0.0)
    """Largest norm of the whole gradient; longer gradients are scaled down to it."""
    warmup_steps: int = Field(default=0, ge=0)
    """Applied steps over which the step size grows linearly from lr / warmup_steps to lr."""
    micro_batch_tokens: int = Field(default=16384, ge=1)
    """Tokens of one forward and backward pass, padding included; a longer rollout gets a pass of its own."""
    batching: Literal["padded", "packed"] = "padded"
    """Rollouts of similar length side by side, or one after another in one row with block-diagonal attention."""
    published_dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Type of the weights that samplers receive."""
    forward_weights: Literal["published", "masters"] = "published"
    """What the loss is computed with: the weights as samplers have them, fp32 masters rounded to published_dtype and
    gradients passed straight through, or the masters themselves, which never sample and are never exported."""
    dead_band_ulp: float = Field(default=0.0, ge=0.0, le=4.0)
    """Weights within this many units in the last place of what was published last keep it: 0.75 makes deltas about a
    quarter smaller. 0 rounds every weight; below 0.5 nothing is gained. What is kept back is published later."""
    threads: int = Field(default=0, ge=0)
    """Threads of torch and of the weight codec on the CPU; 0 leaves torch's choice, and one for each core."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    compile: bool = False
    """Compile the forward and backward pass at the first step, which then takes minutes for a large model; needs a C++
    compiler on the CPU, Triton on a GPU. The numbers stay, up to rounding. Not in ZeRO stage 3."""
    sequence_parallel: int = Field(default=1, ge=1, le=1024)
    """Ranks that share each forward and backward pass, every one with a slice of its positions (Ulysses), for rollouts
    that are too long for one device; a divisor of the number of ranks and of the attention heads. micro_batch_tokens
    are then those of all that share. Backend fsdp2 only; 1 is off."""
    liger: bool = False
    """Liger's fused kernels for norms, positions and gated layers: less memory and time on a GPU; refused on the CPU.
    Needs `pip install 'heterorl[gpu]'`."""


def _refuse_slices(config: _Training) -> None:
    if config.sequence_parallel > 1:
        raise ValueError("sequence_parallel needs backend fsdp2: set backend.kind to it, or sequence_parallel to 1")


class TorchBackendConfig(_Training):
    """One process, CPU or one GPU; weights are kept in fp32 and published in a narrower type."""

    kind: Literal["torch"] = "torch"
    compute_dtype: Literal["fp32", "bf16"] = "fp32"
    """Type of matrix products; log-probabilities are normalised in fp32 either way."""
    device: str = Field(default="cpu", pattern=r"^(cpu|cuda(:[0-9]+)?)$")
    """Where the weights live: cpu, cuda or cuda:N."""
    reference_model_dir: str = ""
    """Frozen model that `loss.reference_kl` and `loss.kind = "tba"` compare with, loaded beside the learner's for them
    only; empty is model_dir, that is version 0."""

    @model_validator(mode="after")
    def _check_slices(self) -> TorchBackendConfig:
        _refuse_slices(self)
        return self


class _Ranks(_Training):
    """What backends of several processes have."""

    rank_timeout_s: float = Field(default=60.0, ge=2.0, le=3600.0)
    """How long a process of the learner may give no sign of life, seconds, where they were started by torchrun; then
    all of them end, on all machines, with exit code 1. A quarter more passes at most."""
    device: Literal["cpu", "cuda"] = "cpu"
    """cuda gives each process the GPU of its number on its machine, LOCAL_RANK."""


class DeepSpeedBackendConfig(_Ranks):
    """One process for each device of one machine (`heterorl learner --nproc N`) or of many (torchrun), joined by
    DeepSpeed's ZeRO."""

    kind: Literal["deepspeed"] = "deepspeed"
    stage: Literal[0, 1, 2, 3] = 2
    """What is divided among the ranks: 0 nothing, 1 optimizer and masters, 2 gradients too, 3 the weights too."""
    offload_optimizer: bool = False
    """Keep masters and moments in host memory and step there; stages 1 to 3."""
    compute_dtype: Literal["fp32", "bf16"] = "fp32"
    """bf16: forward, backward and the copy of the weights they use, whatever forward_weights says; masters, moments and
    accumulated gradients stay fp32. In stage 0 the weights are the masters, and matrix products alone are bf16."""

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
    `fully_shard` divides weights, gradients, masters and optimizer among all of them."""

    kind: Literal["fsdp2"] = "fsdp2"
    compute_dtype: Literal["fp32", "bf16"] = "fp32"
    """bf16: weights are gathered and passes computed in it, whatever forward_weights says; masters, moments and
    accumulated gradients stay fp32."""

    @model_validator(mode="after")
    def _check_compile(self) -> Fsdp2BackendConfig:
        if self.compile:
            raise ValueError("compile needs backend torch, or deepspeed below stage 3: fsdp2 gathers weights by layer")
        return self


RanksConfig = DeepSpeedBackendConfig | Fsdp2BackendConfig


def _kind(value: Any) -> str:
    # A table without `kind` is the one process of before.
    kind = value.get("kind", "torch") if isinstance(value, dict) else getattr(value, "kind", "")
    return str(kind)


BackendConfig = Annotated[
    Annotated[TorchBackendConfig, Tag("torch")]
    | Annotated[DeepSpeedBackendConfig, Tag("deepspeed")]
    | Annotated[Fsdp2BackendConfig, Tag("fsdp2")],
    Discriminator(_kind),
]
