"""Attention over slices, under a name of its own in transformers' table of attention functions.

A rank gives its columns of all heads, attends from all columns to all columns of its own heads, and gets its columns
back. Under a name for which transformers knows no mask it makes none, which would be of the slice; what may see what is
decided here, sequence by sequence, so that no mask of S x S is held.

Suffixes: R rows, H heads, K heads of keys and values, C columns of a slice, S of all, D width of a head.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from heterorl.common.errors import ConfigError
from heterorl.learner.backends.slices.exchange import columns_for_heads, heads_for_columns
from heterorl.learner.backends.slices.group import SliceGroup

KEY = "backend.sequence_parallel"
NAME = "heterorl_slices"
"""With a number: each model of a process has its own."""
_ACTION = "set it to 1, or train another model"
# What models hand to an attention function beside queries, keys and values, and changes its result.
_UNKNOWN = ("position_bias", "softcap", "s_aux")
_NUMBERS = itertools.count()


class SlicedAttention:
    """As transformers calls it."""

    def __init__(self, group: SliceGroup) -> None:
        """Serve one group; `segments` are to be set before each pass."""
        self._group = group
        self.segments: tuple[tuple[int, int], ...] = ()
        """Of the micro-batch that passes, forward and backward; see Slice."""

    def __call__(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        scaling: float | None = None,
        sliding_window: int | None = None,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attend from this slice's columns: queries [R, H, C, D], keys and values [R, K, C, D] -> [R, C, H, D].

        Raises:
            ConfigError: the model asks for what is not causal attention within a window.
        """
        is_causal = options.get("is_causal")
        is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if attention_mask is not None or not is_causal or any(options.get(name) is not None for name in _UNKNOWN):
            raise ConfigError(KEY, f"{type(module).__name__} is not plain causal attention", action=_ACTION)
        check_heads(query.shape[1], key.shape[1], size=self._group.size)
        whole = heads_for_columns(query, self._group)
        keys, values = (heads_for_columns(self._for_each(states), self._group) for states in (key, value))
        parts = [
            _attend(
                *(states[:, :, start:end] for states in (whole, keys, values)), scaling=scaling, window=sliding_window
            )
            for start, end in self.segments
        ]
        own_RHCD = columns_for_heads(torch.cat(parts, dim=2), self._group)
        return own_RHCD.transpose(1, 2).contiguous(), None

    def _for_each(self, states_RKCD: torch.Tensor) -> torch.Tensor:
        """With a head for each rank at least: those that share one get a copy, and its gradients add up."""
        copies = self._group.size // states_RKCD.shape[1]
        return states_RKCD.repeat_interleave(copies, dim=1) if copies > 1 else states_RKCD


def install(model: nn.Module, attention: SlicedAttention) -> None:
    """Let a model attend over slices from its next pass on.

    Raises:
        ConfigError: its attention is written out, or is another than torch's own.
    """
    from transformers import AttentionInterface

    network: Any = model
    if network.config._attn_implementation != "sdpa":
        problem = f"attention over slices is by torch's fused kernels, not {network.config._attn_implementation}"
        raise ConfigError(KEY, problem, action="leave the choice of attention at sdpa, or set it to 1")
    name = f"{NAME}_{next(_NUMBERS)}"
    AttentionInterface.register(name, attention)
    network.set_attn_implementation(name)
    if network.config._attn_implementation != name:
        problem = f"{type(model).__name__} does not call transformers' attention interface"
        raise ConfigError(KEY, problem, action=_ACTION)


def check_model(model: nn.Module, *, size: int) -> None:
    """See that a model's own configuration allows slices.

    Raises:
        ConfigError: its heads cannot be divided, or its attention is cut into chunks.
    """
    network: Any = model
    config = network.config.get_text_config()
    heads = config.num_attention_heads
    check_heads(heads, getattr(config, "num_key_value_heads", None) or heads, size=size)
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        raise ConfigError(KEY, "attention in chunks does not go over slices", action=_ACTION)


def check_heads(num_heads: int, num_key_value_heads: int, *, size: int) -> None:
    """See that heads can be divided among the ranks of a group.

    Raises:
        ConfigError: they cannot.
    """
    if num_heads % size:
        problem = f"{num_heads} attention heads cannot be divided among {size} ranks"
        raise ConfigError(KEY, problem, action=f"set a divisor of {num_heads}")
    if num_key_value_heads % size and size % num_key_value_heads:
        problem = f"{num_key_value_heads} heads of keys and values are neither a multiple nor a divisor of {size}"
        raise ConfigError(KEY, problem, action=f"set a divisor or a multiple of {num_key_value_heads}")


def _attend(
    query_RHSD: torch.Tensor,
    key_RKSD: torch.Tensor,
    value_RKSD: torch.Tensor,
    *,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """Causal attention of one sequence a row."""
    length = query_RHSD.shape[2]
    mask_SS: torch.Tensor | None = None
    if window is not None and window < length:
        columns_S = torch.arange(length, device=query_RHSD.device)
        distances_SS = columns_S[:, None] - columns_S
        mask_SS = (distances_SS >= 0) & (distances_SS < window)
    return functional.scaled_dot_product_attention(
        query_RHSD,
        key_RKSD,
        value_RKSD,
        attn_mask=mask_SS,
        is_causal=mask_SS is None,
        scale=scaling,
        enable_gqa=query_RHSD.shape[1] != key_RKSD.shape[1],
    )
