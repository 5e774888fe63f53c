"""Faster code for the same forward pass: torch.compile, Liger's fused kernels, attention kernels.

Guarantees: names of tensors stay, and numbers up to rounding. A missing kernel is refused, never left out silently.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from heterorl.common.errors import ConfigError, DependencyMissing
from heterorl.common.model.model_directory import first_line
from heterorl.learner.train.backend_config import BackendConfig


def apply_liger(model: nn.Module, config: BackendConfig) -> None:
    """Put Liger's norms, rotary positions and gated layers into a loaded model, if configured.

    Its losses stay out, since log-probs are computed in chunks of the vocabulary. Liger replaces the classes in
    transformers, so models of the same kind that this process loads later have its kernels too.

    Raises:
        ConfigError: the device is the CPU, or Liger does not know the architecture.
        DependencyMissing: liger-kernel is not installed.
    """
    if not config.liger:
        return
    if config.device == "cpu":
        raise ConfigError("backend.liger", "Liger's kernels run on a GPU only", action="set backend.liger to false")
    try:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
    except ImportError as error:
        raise DependencyMissing("liger-kernel", "gpu") from error
    kind = str(getattr(model.config, "model_type", ""))
    if kind not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise ConfigError("backend.liger", f"Liger has no kernels for {kind}", action="set backend.liger to false")
    apply: Any = MODEL_TYPE_TO_APPLY_LIGER_FN[kind]
    losses = {"cross_entropy", "fused_linear_cross_entropy"} & set(inspect.signature(apply).parameters)
    apply(model=model, **dict.fromkeys(losses, False))


def choose_attention(model: nn.Module, config: BackendConfig) -> None:
    """Set the configured attention of a model that was opened with sdpa or eager."""
    wanted = config.attn_implementation
    network: Any = model
    if wanted == network.config._attn_implementation:
        return
    try:
        network.set_attn_implementation(wanted)
    except (ImportError, ValueError) as error:
        raise ConfigError(
            "backend.attn_implementation",
            f"{wanted} cannot be had: {first_line(error)}",
            action='set it to "eager"' if wanted == "sdpa" else "install its package (flash-attn), or set it to sdpa",
        ) from error
    if network.config._attn_implementation != wanted:
        kind = str(getattr(network.config, "model_type", ""))
        raise ConfigError("backend.attn_implementation", f"{kind} has no {wanted}", action="set it to sdpa")


def compile_block(block: nn.Module, config: BackendConfig) -> None:
    """Let torch compile one block at its first pass, if configured.

    Blocks of one class share the compiled code. The whole model is not compiled: on an H100 a model of two layers took
    89 s whole and 17 s by block, because an operation on the CPU makes torch build C++ programs.

    Only the forward method is compiled: hooks around the call gather the block's weights.
    """
    if config.compile:
        # For any length: micro-batches differ in length.
        setattr(block, "forward", torch.compile(block.forward, dynamic=True))  # noqa: B010 - mypy refuses a method
