"""A trained model as a Hugging Face directory: what samplers generate with, bit for bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from heterorl.common.errors import ConfigError, CorruptStore
from heterorl.common.model import tensors
from heterorl.common.model.adapters import LoraLinear, attach, base_digest, merge
from heterorl.common.types.common import NO_LORA, Digest, LoraSettings
from heterorl.common.weights.arena import Arena, Dtype
from heterorl.common.weights.manifest import verify_state
from heterorl.common.weights.payload import apply_payload
from heterorl.common.wire.policy import manifest_from_bytes
from heterorl.learner.backends.state import read_lora
from heterorl.learner.publish.checkpoint import (
    BACKEND_DIRECTORY,
    DONE_FILE,
    PUBLISHED_FILE,
    CheckpointStore,
    read_checkpoint,
)

_DTYPES: tuple[Dtype, ...] = ("bf16", "fp16", "fp32")
_TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "*.model",
    "*.tiktoken",
)


def export_model(*, model_dir: str | Path, source: Path | Arena, out_dir: Path, adapter_only: bool = False) -> None:
    """Write safetensors in the published type, config, generation config and tokenizer.

    A checkpoint of adapters is added to the base model in fp32, which samplers never do: they compute the sum of the
    two outputs, so the merged model is theirs up to rounding. The adapters alone are what was published, bit for bit.

    Args:
        model_dir: the model that the run started from.
        source: published weights; a checkpoint directory; or a state directory, of which the newest valid checkpoint
            is taken.
        out_dir: must not exist, or be empty; appears complete or not at all.
        adapter_only: write the adapters of a checkpoint as files for `peft`, without the base model.

    Raises:
        ConfigError: `out_dir` is in use, `model_dir` is another model, or there are no adapters to write.
        CorruptStore: there is no valid checkpoint.
    """
    from transformers import AutoModelForCausalLM

    if out_dir.exists() and any(out_dir.iterdir()):
        raise ConfigError("out", f"{out_dir} is not empty", action="name a new directory")
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(str(model_dir), dtype="float32")
    except (OSError, ValueError) as error:
        raise ConfigError("model_dir", f"cannot load {model_dir}: {error}") from error
    path = source if isinstance(source, Arena) or (source / DONE_FILE).exists() else _newest(source)
    lora = NO_LORA if isinstance(path, Arena) else read_lora(path / BACKEND_DIRECTORY)
    if adapter_only and not lora.rank:
        raise ConfigError("adapter", "the run trains all weights", action="export without it")
    if lora.rank:
        _attach(model, lora)
    arena = path if isinstance(path, Arena) else read_published(path, model)
    dtype = next(spec.dtype for spec in arena.layout.specs)
    if not lora.rank:
        model = model.to(tensors.TORCH_DTYPE[dtype])
    tensors.load(arena, model)
    temporary = out_dir.with_name(f"{out_dir.name}.writing")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    if adapter_only:
        _write_adapter(temporary, model, lora, dtype=tensors.TORCH_DTYPE[dtype], model_dir=str(model_dir))
    else:
        merge(model)
        model.to(tensors.TORCH_DTYPE[dtype]).save_pretrained(temporary, safe_serialization=True)
    _copy_tokenizer(str(model_dir), temporary)
    if out_dir.exists():
        out_dir.rmdir()
    temporary.rename(out_dir)


def _attach(model: Any, lora: LoraSettings) -> None:
    if base_digest(model) != lora.base_digest:
        raise ConfigError(
            "model_dir", "is not the model that the adapters were trained on", action="name the run's model_dir"
        )
    attach(model, lora)


def _write_adapter(
    directory: Path, model: nn.Module, lora: LoraSettings, *, dtype: torch.dtype, model_dir: str
) -> None:
    """The adapters as the files that `peft` reads, in the type that they were published in."""
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


def read_published(path: Path, model: Any) -> Arena:
    """The published weights of a checkpoint, verified against its manifest.

    Raises:
        ConfigError: the checkpoint is of another model.
        CorruptStore: no valid checkpoint is there.
    """
    manifest = manifest_from_bytes(read_checkpoint(path).manifest)
    arena = _arena_for(model, manifest.layout_id)
    apply_payload(path / PUBLISHED_FILE, arena, expected_from_root=None)
    verify_state(manifest, arena)
    return arena


def _newest(state_dir: Path) -> Path:
    root = state_dir / "checkpoints"
    problems = [] if root.is_dir() else [f"{root} does not exist"]
    for path in CheckpointStore(root).paths() if root.is_dir() else []:
        try:
            read_checkpoint(path)
        except CorruptStore as error:
            problems.append(str(error))
        else:
            return path
    raise CorruptStore(f"no valid checkpoint under {state_dir}: {'; '.join(problems) or 'none was written yet'}")


def _arena_for(model: Any, layout_id: Digest) -> Arena:
    # A layout's id covers its type, so the type need not be told.
    for dtype in _DTYPES:
        layout = tensors.layout_of(model, dtype)
        if layout.layout_id == layout_id:
            return Arena(layout)
    raise ConfigError(
        "model_dir", "has other tensors than the checkpoint", action="name the one that the run started from"
    )


def _copy_tokenizer(model_dir: str, out_dir: Path) -> None:
    """Copy the files as they are, so that the tokenizer's digest stays; a hub id goes through transformers."""
    if Path(model_dir).is_dir():
        for pattern in _TOKENIZER_FILES:
            for path in Path(model_dir).glob(pattern):
                if path.is_file():
                    shutil.copyfile(path, out_dir / path.name)
        return
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(model_dir).save_pretrained(out_dir)
