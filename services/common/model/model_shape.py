"""Shape of a dense, gated decoder: Llama, Mistral, Qwen2, Qwen3.

`ModelShape.parameters` equals the count of the model that transformers builds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heterorl.common.errors import ConfigError

KEPT = {2: 1.67, 4: 1.24}
"""Kept activations over those that `activations` counts of each layer, by width: norms keep fp32 too. Of 513 M on an
H100 (benchmarks/results/gpu), and of 135 M on a CPU."""
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Tensor sizes from a model's config.json.

    Example: SHAPES["Qwen3-8B"].parameters == 8_190_735_360
    """

    name: str
    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    is_tied: bool
    has_qk_norm: bool = True
    has_qkv_bias: bool = False

    @property
    def block(self) -> int:
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = 2 * self.hidden * queries + 2 * self.hidden * keys
        biases = (queries + 2 * keys) * self.has_qkv_bias
        norms = 2 * self.hidden + 2 * self.head_dim * self.has_qk_norm
        return attention + biases + norms + 3 * self.hidden * self.intermediate

    @property
    def outside(self) -> int:
        """Parameters outside of layers: embeddings, untied output embeddings, last norm."""
        return self.vocab * self.hidden * (1 if self.is_tied else 2) + self.hidden

    @property
    def parameters(self) -> int:
        return self.layers * self.block + self.outside

    def activations(self, tokens: float, *, width: int, is_checkpointed: bool) -> float:
        """Bytes that a backward pass reads; a product has `width` bytes."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        # Two norms, two sums; queries, keys, values, output; gate, its sigmoid's product, up, their product.
        layer = 4 * self.hidden + 2 * queries + 2 * keys + 4 * self.intermediate
        numbers = self.layers * self.hidden + layer if is_checkpointed else KEPT[width] * self.layers * layer
        return tokens * width * numbers


def _qwen3(name: str, hidden: int, intermediate: int, layers: int, heads: int, *, is_tied: bool = False) -> ModelShape:
    return ModelShape(
        name=name, vocab=151936, hidden=hidden, intermediate=intermediate, layers=layers, heads=heads, kv_heads=8,
        head_dim=128, is_tied=is_tied,
    )  # fmt: skip


SHAPES: Mapping[str, ModelShape] = {
    shape.name: shape
    for shape in (
        _qwen3("Qwen3-0.6B", 1024, 3072, 28, 16, is_tied=True),
        _qwen3("Qwen3-1.7B", 2048, 6144, 28, 16, is_tied=True),
        _qwen3("Qwen3-4B", 2560, 9728, 36, 32, is_tied=True),
        _qwen3("Qwen3-8B", 4096, 12288, 36, 32),
        _qwen3("Qwen3-14B", 5120, 17408, 40, 40),
        _qwen3("Qwen3-32B", 5120, 25600, 64, 64),
    )
}
"""Published models that stand for a bare number of parameters."""


def nearest(parameters: float) -> ModelShape:
    """The published shape nearest in size, by ratio."""
    return min(SHAPES.values(), key=lambda shape: abs(math.log(shape.parameters / parameters)))


def shape_of_directory(model_dir: Path) -> ModelShape:
    """The shape in config.json; raises ConfigError if missing or of unknown family."""
    try:
        config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
        return _shape_of(config, name=model_dir.name)
    except (OSError, ValueError, KeyError, TypeError, ArithmeticError, RecursionError) as error:
        problem = "lacks" if isinstance(error, KeyError | TypeError) else "cannot be read:"
        action = "name a model's directory, or give --params"
        raise ConfigError("--model-dir", f"{model_dir}: config.json {problem} {error}", action=action) from error


def _shape_of(config: Mapping[str, Any], *, name: str) -> ModelShape:
    family = config["model_type"]
    if family not in FAMILIES:
        problem = f"{family} is not supported; known are {', '.join(FAMILIES)}"
        raise ConfigError("--model-dir", problem, action="give --params, the number of parameters")
    if family != "qwen2" and (config.get("attention_bias") or config.get("mlp_bias")):
        raise ConfigError("--model-dir", f"{family} with biases is not supported", action="give --params")
    heads = int(config["num_attention_heads"])
    return ModelShape(
        name=name,
        vocab=int(config["vocab_size"]),
        hidden=int(config["hidden_size"]),
        intermediate=int(config["intermediate_size"]),
        layers=int(config["num_hidden_layers"]),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
        is_tied=bool(config.get("tie_word_embeddings", False)),
        has_qk_norm=family == "qwen3",
        has_qkv_bias=family == "qwen2",
    )
