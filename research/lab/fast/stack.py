"""The weights of many runs as one matrix: a row for each run, every tensor of the model at its place in the row.

What is done to each weight alone (AdamW, rounding, the norm of a gradient) is then one operation for all runs.
Suffixes: R runs, P weights of a model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from heterorl.common.errors import ConfigError
from heterorl.learner.train.model import load_model

Weights = dict[str, torch.Tensor]
"""Tensors [R, ...] by name, see `pieces`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a Qwen3 model of the lab is made of; `frequencies` are those of its rotary embedding, rad per token."""

    vocab_size: int
    hidden_size: int
    inner_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    eps: float
    frequencies: tuple[float, ...]

    @property
    def width(self) -> int:
        """Width of all heads together."""
        return self.num_heads * self.head_dim


def pieces(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor, in the order of a row; what reads the same input is one tensor."""
    hidden, inner, width = shape.hidden_size, shape.inner_size, shape.width
    sizes: dict[str, tuple[int, ...]] = {"embedding": (shape.vocab_size, hidden)}
    for layer in range(shape.num_layers):
        sizes |= {
            f"{layer}.norm_attention": (hidden,),
            f"{layer}.query_key_value": (3 * width, hidden),
            f"{layer}.norm_query": (shape.head_dim,),
            f"{layer}.norm_key": (shape.head_dim,),
            f"{layer}.output": (hidden, width),
            f"{layer}.norm_mlp": (hidden,),
            f"{layer}.gate_up": (2 * inner, hidden),
            f"{layer}.down": (hidden, inner),
        }
    return {**sizes, "norm": (hidden,)}


def views(rows_RP: torch.Tensor, shape: Shape) -> Weights:
    """The tensors [R, ...] of the rows, without a copy."""
    tensors: Weights = {}
    start = 0
    for name, size in pieces(shape).items():
        end = start + math.prod(size)
        tensors[name] = rows_RP[:, start:end].view(-1, *size)
        start = end
    return tensors


def read_model(model_dir: Path) -> tuple[Shape, torch.Tensor]:
    """The shape of a model in a directory and its weights, float32 [P].

    Raises:
        ConfigError: it is another architecture than the lab's own models.
    """
    model: Any = load_model(model_dir)
    config = model.config
    tensors: dict[str, torch.Tensor] = model.state_dict()
    is_ours = (
        config.model_type == "qwen3"
        and config.tie_word_embeddings
        and not config.attention_bias
        and config.num_key_value_heads == config.num_attention_heads
        and not config.use_sliding_window
        and config.hidden_act == "silu"
        and model.model.rotary_emb.attention_scaling == 1.0
    )
    if not is_ours:
        raise ConfigError("model_dir", f"{model_dir} is no model of the lab", action="choose the engine services")
    shape = Shape(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        inner_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        head_dim=config.head_dim,
        eps=config.rms_norm_eps,
        frequencies=tuple(model.model.rotary_emb.inv_freq.tolist()),
    )
    parts = [tensors["model.embed_tokens.weight"]]
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}."
        parts += [
            tensors[prefix + name + ".weight"]
            for name in (
                "input_layernorm",
                "self_attn.q_proj",
                "self_attn.k_proj",
                "self_attn.v_proj",
                "self_attn.q_norm",
                "self_attn.k_norm",
                "self_attn.o_proj",
                "post_attention_layernorm",
                "mlp.gate_proj",
                "mlp.up_proj",
                "mlp.down_proj",
            )
        ]
    parts.append(tensors["model.norm.weight"])
    row_P = torch.cat([part.detach().float().flatten() for part in parts])
    assert row_P.numel() == sum(math.prod(size) for size in pieces(shape).values())
    return shape, row_P


def published(rows_RP: torch.Tensor) -> torch.Tensor:
    """What samplers and evaluations compute with: the masters rounded to bf16, as float32."""
    return rows_RP.detach().to(torch.bfloat16).float()
