"""Adapters as the files that `peft` reads: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from heterorl.common.model.adapters import LoraLinear
from heterorl.common.types.common import LoraSettings


def write_adapter(directory: Path, model: nn.Module, lora: LoraSettings, *, dtype: torch.dtype, model_dir: str) -> None:
    """Write the adapters of a model into an existing directory, in the type that they were published in."""
    weights = {}
    for name, module in model.named_modules():
        if isinstance(module, LoraLinear):
            for part, tensor in (("lora_A", module.lora_a), ("lora_B", module.lora_b)):
                weights[f"base_model.model.{name}.{part}.weight"] = tensor.detach().cpu().to(dtype).contiguous()
    save_file(weights, directory / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model_dir,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(lora.target_modules),
        "inference_mode": True,
    }
    (directory / "adapter_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")
