"""Loading a causal language model for training: any Hugging Face directory or hub id."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from services.common.errors import ConfigError

_UNSUPPORTED = ("final_logit_softcapping", "logit_scale", "logits_scaling")
"""Settings by which logits are more than hidden @ embedding; the chunked log-probs would be wrong."""


def load_model(model_dir: str, *, gradient_checkpointing: bool = False) -> nn.Module:
    """Load fp32 masters.

    Raises:
        ConfigError: not a causal language model, or one whose logits are scaled in a way that is not supported.
    """
    from transformers import AutoModelForCausalLM

    try:
        model: nn.Module = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    except (OSError, ValueError) as error:
        raise ConfigError("model_dir", f"cannot load {model_dir}: {error}") from error
    config: Any = model.config
    for name in _UNSUPPORTED:
        if getattr(config, name, None) not in (None, 1, 1.0):
            raise ConfigError("model_dir", f"models with {name} are not supported")
    if gradient_checkpointing:
        model.gradient_checkpointing_enable()  # type: ignore[operator]
    # Dropout would make the learner's log-probs another policy's.
    model.eval()
    return model


def hidden_states(model: nn.Module, *, input_ids_RS: Tensor, position_ids_RS: Tensor, attention: Tensor) -> Tensor:
    """Last hidden states [R, S, D], before the output embedding."""
    base: Any = model.base_model
    output = base(input_ids=input_ids_RS, position_ids=position_ids_RS, attention_mask=attention, use_cache=False)
    hidden: Tensor = output.last_hidden_state
    return hidden


def output_embedding(model: nn.Module) -> Tensor:
    """Weight [V, D] of the output embedding (the input embedding where they are tied)."""
    embedding: Tensor = model.get_output_embeddings().weight  # type: ignore[operator]
    return embedding
