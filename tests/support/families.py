"""Tiny random models of many architectures, and what becomes of each: trained, or refused by a key and a word."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import transformers

from tests.support.training import VOCAB_SIZE

SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One row of the table of models in docs/recipes.md."""

    shown: str
    """The first cell of its row."""
    kind: str
    """Of the classes in transformers."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    batching: str = "both"
    """"padded" where texts of one row are not kept apart."""
    refused: str = ""
    """Key and words of the error at the start; empty where it trains."""
    change: Callable[[torch.nn.Module], None] = lambda _: None
    """What the random model needs so that a fault would show."""
    config: str = ""
    """Class of the configuration where its name is not that of the family."""


def _correct(model: torch.nn.Module) -> None:
    """Corrections of routers as published models have them: an offset with a spread below a unit of bf16."""
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            tensor.data.copy_(34.5 + 0.14 * torch.randn(tensor.shape))


def _scale(model: torch.nn.Module) -> None:
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.copy_(1 + 0.3 * torch.rand(buffer.shape))


def _freeze(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data.normal_()


HEAD = {"head_dim": 8}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "decoder_sparse_step": 1}
ROUTED = {
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 0,
    "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
}  # fmt: skip
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
LONG = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 32,
}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "qwen3": Family(shown="Qwen3, tied", kind="Qwen3", settings={**HEAD, "tie_word_embeddings": True}),
        "qwen3-untied": Family(shown="Qwen3, untied", kind="Qwen3", settings={**HEAD, "tie_word_embeddings": False}),
        "qwen2": Family(shown="Qwen2", kind="Qwen2", settings={"tie_word_embeddings": True}),
        "llama": Family(shown="Llama", kind="Llama", settings={"tie_word_embeddings": False}),
        "mistral": Family(shown="Mistral", kind="Mistral", settings={"sliding_window": 4}),
        "gemma3": Family(
            shown="Gemma3",
            kind="Gemma3",
            config="Gemma3Text",
            settings={**HEAD, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
        ),
        "gemma4": Family(
            shown="Gemma4",
            kind="Gemma4",
            config="Gemma4Text",
            settings={
                **HEAD,
                "global_head_dim": 8,
                "sliding_window": 4,
                "layer_types": ["sliding_attention", "full_attention"],
                "hidden_size_per_layer_input": 0,
                "vocab_size_per_layer_input": 50,
                "num_kv_shared_layers": 0,
                "final_logit_softcapping": None,
            },
            change=_scale,
        ),
        "gemma2": Family(shown="Gemma2", kind="Gemma2", settings=HEAD),
        "phi": Family(shown="Phi", kind="Phi"),
        "granite": Family(shown="Granite", kind="Granite", settings={"logits_scaling": 2.0}),
        "qwen3-moe": Family(shown="Qwen3Moe", kind="Qwen3Moe", settings={**HEAD, **MOE}),
        "glm4-moe": Family(shown="GLM", kind="Glm4Moe", settings={**HEAD, **ROUTED}, change=_correct),
        "deepseek-v3": Family(
            shown="DS", kind="DeepseekV3", settings={**ROUTED, **LATENT, "num_key_value_heads": 4}, change=_correct
        ),
        "ernie4.5-moe": Family(
            shown="Ernie",
            kind="Ernie4_5_Moe",
            settings={
                "moe_num_experts": 4,
                "moe_k": 2,
                "moe_intermediate_size": 16,
                "moe_num_shared_experts": 1,
                "moe_layer_start_index": 0,
                "moe_layer_end_index": 1,
                "tie_word_embeddings": False,
            },
            change=_correct,
        ),
        "hrm": Family(shown="HRM", kind="HrmText", settings=HEAD, change=_freeze),
        "phi3-longrope": Family(
            shown="Phi3", kind="Phi3", settings={"rope_parameters": LONG, "original_max_position_embeddings": 32}
        ),
        "phimoe": Family(
            shown="Phimoe",
            kind="Phimoe",
            settings={"num_local_experts": 4, "rope_parameters": {**LONG, "short_mscale": 1.2, "long_mscale": 1.5}},
        ),
        "llama-dynamic": Family(shown="Llama dyn", kind="Llama", settings={"rope_parameters": DYNAMIC}),
        "llama4": Family(
            shown="Llama4",
            kind="Llama4",
            config="Llama4Text",
            settings={**HEAD, "intermediate_size_mlp": 48, "num_local_experts": 2},
        ),
        "gpt-oss": Family(
            shown="GptOss", kind="GptOss", settings={**HEAD, "num_local_experts": 4, "num_experts_per_tok": 2}
        ),
        "lfm2": Family(shown="Lfm2", kind="Lfm2", settings={"layer_types": ["conv", "full_attention"]}),
        "mamba": Family(shown="Mamba", kind="Mamba", settings={"state_size": 8}),
        "mamba2": Family(
            shown="Mamba2", kind="Mamba2", settings={"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 1}
        ),
        "falcon-h1": Family(
            shown="FalconH1",
            kind="FalconH1",
            settings={
                "mamba_d_ssm": 64,
                "mamba_n_heads": 8,
                "mamba_d_head": 8,
                "mamba_n_groups": 1,
                "mamba_d_state": 8,
            },
        ),
        "qwen3-next": Family(
            shown="q3next",
            kind="Qwen3Next",
            settings={
                **HEAD,
                **MOE,
                "shared_expert_intermediate_size": 16,
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 2,
                "linear_key_head_dim": 8,
                "linear_value_head_dim": 8,
                "layer_types": ["linear_attention", "full_attention"],
            },
        ),
        "olmo2": Family(shown="olmo2", kind="Olmo2"),
    }
)


def write_family(name: str, directory: Path, *, seed: int = 5) -> Path:
    """Save a model of a family, the same for a name and a seed; returns its directory."""
    family = FAMILIES[name]
    config = getattr(transformers, f"{family.config or family.kind}Config")(
        **copy.deepcopy({**SHAPE, **family.settings})
    )
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        model = getattr(transformers, f"{family.kind}ForCausalLM")(config)
        family.change(model)
        model.save_pretrained(directory)
    return directory
