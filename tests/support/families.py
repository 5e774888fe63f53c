"""Tiny random models of many architectures, and what becomes of each: trained in some layouts, or refused by a key."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
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
VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8,
    "patch_size": 4,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A row of the table of models in docs/models.md."""

    shown: str
    kind: str
    """Of the classes in transformers: KINDForCausalLM and KINDConfig."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    model: str = ""
    """Another class of the model."""
    config: str = ""
    """Another class of the configuration."""
    change: Callable[[torch.nn.Module], None] = lambda _: None
    """Values that published models have, and by which a fault shows."""
    batching: tuple[str, ...] = ("padded", "packed")
    """Layouts in which it trains; another one is refused by `backend.batching`."""
    attention: str = "sdpa"
    refused: tuple[str, str] | None = None
    """Key and words of the error at the learner's start."""
    engine: tuple[str, str] | None = None
    """The same of engine hf's."""

    @property
    def row(self) -> str:
        """Its row of the table."""
        if self.refused:
            return f"| {self.shown} | no | `{self.refused[0]}`: {self.refused[1]} |"
        notes = [] if self.attention == "sdpa" else [f'`backend.attn_implementation = "{self.attention}"`']
        notes += [] if len(self.batching) == 2 else ['`backend.batching = "padded"`']
        notes += ["not engine `hf`"] if self.engine else []
        return f"| {self.shown} | yes | {', '.join(notes)} |".replace("|  |", "| |")


def _correct(model: torch.nn.Module) -> None:
    """Corrections of routers: an offset with a spread below a unit of bf16."""
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name.endswith("e_score_correction_bias"):
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
WINDOWED = {**HEAD, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "decoder_sparse_step": 1}
ROUTED = {
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 0,
    "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "num_key_value_heads": 4,
}  # fmt: skip
ERNIE = {
    "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16, "moe_num_shared_experts": 1,
    "moe_layer_start_index": 0, "moe_layer_end_index": 1, "tie_word_embeddings": False,
}  # fmt: skip
GEMMA_4 = {
    "global_head_dim": 8, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": VOCAB_SIZE,
    "num_kv_shared_layers": 0, "final_logit_softcapping": None,
}  # fmt: skip
STATE_SPACE = {
    "mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8,
}  # fmt: skip
LINEAR = {
    "shared_expert_intermediate_size": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
LONG = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 32,
}  # fmt: skip
COMPRESSED = {
    **HEAD, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "q_lora_rank": 16,
    "qk_rope_head_dim": 8, "o_groups": 2, "o_lora_rank": 16, "index_n_heads": 2, "index_head_dim": 8, "hc_mult": 2,
    "sliding_window": 8, "layer_types": ["compressed_sparse_attention"] * 2, "mlp_layer_types": ["moe"] * 2,
}  # fmt: skip
LOGITS = ("model_dir", "changes its logits after the output embedding")
FAMILIES = {
    "qwen3": Family(shown="Qwen3, tied embeddings", kind="Qwen3", settings={**HEAD, "tie_word_embeddings": True}),
    "qwen3-untied": Family(
        shown="Qwen3, untied embeddings", kind="Qwen3", settings={**HEAD, "tie_word_embeddings": False}
    ),
    "qwen2": Family(shown="Qwen2", kind="Qwen2", settings={"tie_word_embeddings": True}),
    "llama": Family(shown="Llama", kind="Llama", settings={"tie_word_embeddings": False}),
    "mistral": Family(shown="Mistral, windowed attention", kind="Mistral", settings={"sliding_window": 4}),
    "gemma3": Family(
        shown="Gemma 3, some layers windowed", kind="Gemma3", config="Gemma3TextConfig", settings=WINDOWED
    ),
    "gemma3-vision": Family(
        shown="Gemma 3 with vision, its text part", kind="Gemma3", model="Gemma3ForConditionalGeneration",
        settings={
            "text_config": {**SHAPE, **WINDOWED}, "vision_config": VISION, "mm_tokens_per_image": 1,
            "image_token_index": 49, "boi_token_index": 48, "eoi_token_index": 47,
        },
    ),
    "gemma4": Family(
        shown="Gemma 4 without softcapping, with scalars that are buffers", kind="Gemma4", config="Gemma4TextConfig",
        settings={**WINDOWED, **GEMMA_4}, change=_scale,
    ),
    "phi3": Family(
        shown="Phi-3 with longrope, within its first window", kind="Phi3",
        settings={"rope_parameters": LONG, "original_max_position_embeddings": 32},
    ),
    "llama-dynamic": Family(
        shown="Llama with dynamic positions, within its window", kind="Llama",
        settings={"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "qwen3-moe": Family(shown="Qwen3 MoE", kind="Qwen3Moe", settings={**HEAD, **EXPERTS}),
    "glm4-moe": Family(
        shown="GLM-4.5, router corrections in fp32", kind="Glm4Moe", settings={**HEAD, **ROUTED}, change=_correct
    ),
    "deepseek-v3": Family(
        shown="DeepSeek-V3, router corrections in fp32", kind="DeepseekV3", settings={**ROUTED, **LATENT},
        change=_correct,
    ),
    "ernie4.5-moe": Family(
        shown="Ernie 4.5 MoE, routers in fp32, corrections frozen", kind="Ernie4_5_Moe", settings=ERNIE,
        change=_correct,
    ),
    "llama4": Family(
        shown="Llama 4, its text model", kind="Llama4", config="Llama4TextConfig",
        settings={**HEAD, "intermediate_size_mlp": 48, "num_local_experts": 2},
    ),
    "gpt-oss": Family(
        shown="gpt-oss, attention with sinks", kind="GptOss", attention="eager", batching=("padded",),
        settings={**HEAD, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "hrm": Family(shown="HRM-Text, a state that its code freezes", kind="HrmText", settings=HEAD, change=_freeze),
    "lfm2": Family(
        shown="LFM2, convolutions and attention", kind="Lfm2", batching=("padded",),
        settings={"layer_types": ["conv", "full_attention"]},
    ),
    "falcon-h1": Family(
        shown="Falcon-H1, state space and attention", kind="FalconH1", batching=("padded",), settings=STATE_SPACE
    ),
    "qwen3-next": Family(
        shown="Qwen3-Next, linear attention and experts", kind="Qwen3Next", batching=("padded",),
        settings={**HEAD, **EXPERTS, **LINEAR},
    ),
    "mamba": Family(
        shown="Mamba, state space only", kind="Mamba", batching=("padded",), attention="eager",
        settings={"state_size": 8}, engine=("engine.kind", "has no cache of keys and values"),
    ),
    "deepseek-v4": Family(
        shown="DeepSeek-V4, compressed attention", kind="DeepseekV4", batching=("padded",), attention="eager",
        settings=COMPRESSED, engine=("engine.kind", "draws with other log-probs"),
    ),
    "gemma2": Family(shown="Gemma 2, softcapped logits", kind="Gemma2", settings=HEAD, refused=LOGITS),
    "granite": Family(shown="Granite, scaled logits", kind="Granite", settings={"logits_scaling": 2.0}, refused=LOGITS),
    "phimoe": Family(
        shown="Phi-3.5 MoE with longrope", kind="Phimoe", refused=("model_dir", "rotary positions of type longrope"),
        settings={"num_local_experts": 4, "rope_parameters": {**LONG, "short_mscale": 1.2, "long_mscale": 1.5}},
    ),
    "qwen2.5-vl": Family(
        shown="Qwen2.5-VL", kind="Qwen2_5_VL", model="Qwen2_5_VLForConditionalGeneration",
        settings={"text_config": {**SHAPE, "rope_parameters": {
            "rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}},
            "vision_config": {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2,
                              "out_hidden_size": 32}},
        refused=("model_dir", "Unrecognized configuration class"),
    ),
}  # fmt: skip
TRAINED = [name for name, family in FAMILIES.items() if not family.refused]


def write_family(name: str, directory: Path, *, seed: int = 5) -> Path:
    """Save a model of a family, the same for a name and a seed; returns its directory."""
    family = FAMILIES[name]
    make_config = getattr(transformers, family.config or f"{family.kind}Config")
    shape = {} if "text_config" in family.settings else SHAPE
    # A copy: some write into their tables.
    config = make_config(**copy.deepcopy({**shape, **family.settings}))
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        model = getattr(transformers, family.model or f"{family.kind}ForCausalLM")(config)
        family.change(model)
        model.save_pretrained(directory)
    return directory
