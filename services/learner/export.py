"""A trained model as a Hugging Face directory: what samplers generate with, bit for bit."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from heterorl.common.errors import ConfigError, CorruptStore
from heterorl.common.model import tensors
from heterorl.common.model.adapters import LoraLinear, attach
from heterorl.common.process.files import sync_directory
from heterorl.common.types.common import NO_LORA, LoraSettings
from heterorl.common.weights.arena import Arena, Dtype, Layout
from heterorl.common.weights.manifest import verify_state
from heterorl.common.weights.payload import apply_payload
from heterorl.common.wire.policy import manifest_from_bytes
from heterorl.learner.backends.loading.empty import empty_model
from heterorl.learner.backends.loading.opened import digest_of_opened, open_model
from heterorl.learner.backends.state import read_lora
from heterorl.learner.export_files import Read, Report, snapshot_reader, tensor_of, write_weights
from heterorl.learner.publish.checkpoint import (
    BACKEND_DIRECTORY,
    DONE_FILE,
    PUBLISHED_FILE,
    CheckpointStore,
    read_checkpoint,
)

MAX_SHARD_SIZE = "50GB"
"""Of a file, as transformers has it."""
_DTYPES: tuple[Dtype, ...] = ("bf16", "fp16", "fp32")
_TOKENIZER_FILES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "chat_template*", "*.model",
    "*.tiktoken",
)  # fmt: skip


def export_model(
    *,
    model_dir: str | Path,
    source: Path | Arena,
    out_dir: Path,
    adapter_only: bool = False,
    dtype: Dtype | None = None,
    max_shard_size: str = MAX_SHARD_SIZE,
    report: Report = lambda _done, _all: None,
) -> None:
    """Write safetensors in the published type, config, generation config and tokenizer.

    The model is never held: one tensor of it is, and a chunk of the published weights.

    A checkpoint of adapters is added to the base model in fp32, which samplers never do: they compute the sum of the
    two outputs, so the merged model is theirs up to rounding. The adapters alone are what was published, bit for bit.

    Args:
        model_dir: the model that the run started from.
        source: published weights; a checkpoint directory; or a state directory, of which the newest valid checkpoint
            is taken.
        out_dir: must not exist, or be empty; appears complete or not at all.
        adapter_only: write the adapters of a checkpoint as files for `peft`, without the base model.
        dtype: of the files; None for the published type. A narrower one rounds all but what the model keeps in fp32.
        max_shard_size: of a file, such as "5GB"; a larger tensor has a file of its own.
        report: told how many bytes of weights are written, of how many.

    Raises:
        ConfigError: `out_dir` is in use, `model_dir` is another model, there are no adapters to write, or a value is
            not finite in `dtype`.
        CorruptStore: there is no valid checkpoint.
        StateMismatch: the weights are not those that the checkpoint's manifest names.
    """
    if out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir())):
        raise ConfigError("out", f"{out_dir} is not empty", action="name a new directory")
    path = source if isinstance(source, Arena) or (source / DONE_FILE).exists() else _newest(source)
    lora = NO_LORA if isinstance(path, Arena) else read_lora(path / BACKEND_DIRECTORY)
    if adapter_only and not lora.rank:
        raise ConfigError("adapter", "the run trains all weights", action="export without it")
    if lora.rank:
        assert isinstance(path, Path), "an arena is of a whole model"
        model, published, read = _adapted(model_dir, path, lora)
    else:
        model, published, read = _trained(model_dir, path)
    dtype = dtype or published
    out_dtype = tensors.TORCH_DTYPE[dtype]
    with _appearing(out_dir) as directory:
        if adapter_only:
            _write_adapter(directory, model, lora, dtype=out_dtype, model_dir=str(model_dir))
        else:
            write_weights(directory, model, read, dtype=dtype, max_shard_size=max_shard_size, report=report)
            _write_config(directory, model, dtype=out_dtype, model_dir=str(model_dir))
        _copy_tokenizer(str(model_dir), directory)


def _adapted(model_dir: str | Path, path: Path, lora: LoraSettings) -> tuple[nn.Module, Dtype, Read]:
    """Adapters, which are small and held, over weights that stay on the disk."""
    opened = open_model(model_dir)
    if digest_of_opened(opened) != lora.base_digest:
        raise ConfigError(
            "model_dir", "is not the model that the adapters were trained on", action="name the run's model_dir"
        )
    model = opened.model
    attach(model, lora)
    adapted = {f"{name}.weight": module for name, module in model.named_modules() if isinstance(module, LoraLinear)}
    for module in adapted.values():
        module.lora_a = nn.Parameter(torch.empty(module.lora_a.shape))
        module.lora_b = nn.Parameter(torch.empty(module.lora_b.shape))
    arena = read_published(path, model)
    tensors.load(arena, model)
    state = model.state_dict(keep_vars=True)

    def read(name: str) -> torch.Tensor:
        tensor = state[name].detach()
        if tensor.is_meta:
            tensor = opened.flat(name).view(tensor.shape)
        return adapted[name].merged_weight(tensor) if name in adapted else tensor

    return model, tensors.main_type(arena.layout), read


def _trained(model_dir: str | Path, source: Path | Arena) -> tuple[nn.Module, Dtype, Read]:
    """Weights that were all trained: of the directory, what it says of the model is enough."""
    manifest = None if isinstance(source, Arena) else manifest_from_bytes(read_checkpoint(source).manifest)
    layout_id = source.layout.layout_id if isinstance(source, Arena) else manifest.layout_id  # type: ignore[union-attr]
    model = empty_model(str(model_dir))
    layout = _layout_for(model, layout_id)
    if layout is None or any(not tensor.is_floating_point() for tensor in model.state_dict().values()):
        # What is tied, and what is no weight, the files decide.
        model = open_model(model_dir).model
        layout = _layout_for(model, layout_id)
    if layout is None:
        raise _of_another_model()
    if isinstance(source, Arena):
        arena = source
        return model, tensors.main_type(layout), lambda name: tensor_of(arena.layout.spec(name), arena.view(name))
    assert manifest is not None, "it was read of the path"
    return model, tensors.main_type(layout), snapshot_reader(source / PUBLISHED_FILE, layout, manifest)


@contextmanager
def _appearing(out_dir: Path) -> Iterator[Path]:
    """A directory that gets its name when all in it is durable, and is gone when the body fails."""
    temporary = out_dir.with_name(f"{out_dir.name}.writing")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        for path in temporary.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        sync_directory(temporary)
        # Takes the place of an empty directory too.
        temporary.rename(out_dir)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync_directory(out_dir.parent)


def _write_config(directory: Path, model: nn.Module, *, dtype: torch.dtype, model_dir: str) -> None:
    from transformers import GenerationConfig

    network: Any = model
    with suppress(OSError):
        # A directory without one leaves what the model's configuration says.
        network.generation_config = GenerationConfig.from_pretrained(model_dir)
    network.config.dtype = str(dtype).removeprefix("torch.")
    network.config.architectures = [type(network).__name__]
    network.config.save_pretrained(directory)
    network.generation_config.save_pretrained(directory)


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
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": model_dir, "r": lora.rank,
        "lora_alpha": lora.alpha, "lora_dropout": 0.0, "bias": "none", "target_modules": list(lora.target_modules),
        "inference_mode": True,
    }  # fmt: skip
    (directory / "adapter_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")


def read_published(path: Path, model: nn.Module) -> Arena:
    """The published weights of a checkpoint, verified against its manifest.

    Raises:
        ConfigError: the checkpoint is of another model.
        CorruptStore: no valid checkpoint is there.
    """
    manifest = manifest_from_bytes(read_checkpoint(path).manifest)
    layout = _layout_for(model, manifest.layout_id)
    if layout is None:
        raise _of_another_model()
    arena = Arena(layout)
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


def _layout_for(model: nn.Module, layout_id: str) -> Layout | None:
    # A layout's id covers its type, so the type need not be told.
    layouts = (tensors.layout_of(model, dtype) for dtype in _DTYPES)
    return next((layout for layout in layouts if layout.layout_id == layout_id), None)


def _of_another_model() -> ConfigError:
    return ConfigError(
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
