"""Other code for the same forward pass: a compiled one, Liger's fused kernels, other attention.

Guarantees: names of tensors and the numbers, up to rounding, stay; what cannot be had is refused, never left
out silently.
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
    """Put Liger's norms, rotary positions and gated layers into a model that is loaded, if the configuration says so.

    Their losses stay out: log-probs are computed in chunks of the vocabulary already (`model.logprobs`). Liger replaces
    the model's classes in transformers too, so models of the same kind that this process loads later have them as well.

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
    """Let a model, opened with sdpa or else eager, compute attention as the configuration says."""
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
    """Let torch compile one block at its first pass, if the configuration says so.

    Blocks of one class share what is compiled, so the seconds do not grow with the number of layers. What surrounds the
    blocks stays as it is: on an H100 a model of two layers compiled whole took 89 s, and its block 17. The whole holds
    an operation on the CPU, for which torch builds one C++ program after another.

    The forward method alone, not the call: hooks around it gather the block's weights and stay as they are.
    """
    if config.compile:
        # For any length, because no two micro-batches have the same.
        setattr(block, "forward", torch.compile(block.forward, dynamic=True))  # noqa: B010 - mypy refuses a method
