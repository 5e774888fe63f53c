"""A trained model as a Hugging Face directory, bit for bit.

The published weights are held in memory once; transformers names, splits and writes them.
"""

import functools
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import nn

from heterorl.common.errors import ConfigError, CorruptStore
from heterorl.common.model import tensors
from heterorl.common.model.adapters import PARTS, LoraLinear, attach
from heterorl.common.model.model_directory import config_of, copy_files
from heterorl.common.process.files import appearing
from heterorl.common.text.prompter import Prompter, end_token_ids
from heterorl.common.types.common import LoraSettings
from heterorl.common.types.policy import Manifest
from heterorl.common.weights.arena import Arena, Dtype, Layout
from heterorl.common.weights.manifest import verify_state
from heterorl.common.weights.payload import apply_payload
from heterorl.common.wire.policy_messages import manifest_from_bytes
from heterorl.learner.backends.loading import digest_of_opened, empty_model, open_model
from heterorl.learner.backends.optimizer_state import read_lora
from heterorl.learner.publish.checkpoint_store import (
    BACKEND_DIRECTORY,
    DONE_FILE,
    PUBLISHED_FILE,
    CheckpointStore,
    linked,
    read_checkpoint,
)

Read = Callable[[str], torch.Tensor]
"""A tensor by its name in the model; not to be written to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSource:
    """A version of a run; `layout_id` and `lora` come from its contract."""

    layout_id: str
    lora: LoraSettings
    pull: Callable[[Layout], Arena]
    """Builds and verifies the version's weights, in memory."""


_DTYPES: tuple[Dtype, ...] = ("bf16", "fp16", "fp32")


def _write_weights(directory: Path, model: nn.Module, read: Read, *, dtype: Dtype, max_shard_size: str) -> None:
    """Let transformers write the weights.

    The model's parameters may be on the meta device.
    """
    types = tensors.types_of(model, dtype)
    state: dict[str, torch.Tensor] = {}
    written: dict[int, torch.Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name.rpartition(".")[2] in PARTS:
            continue
        if id(tensor) not in written:
            # Tensors that are not floating are never published; they are the model's own.
            is_own = name not in types
            written[id(tensor)] = tensor if is_own else _converted(read(name), tensors.TORCH_DTYPE[types[name]], name)
        state[name] = written[id(tensor)]
    network: Any = model
    network.save_pretrained(directory, state_dict=state, max_shard_size=max_shard_size)


def _converted(tensor: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
    if tensor.dtype == dtype:
        return tensor
    converted = tensor.to(dtype)
    if not converted.isfinite().all():
        raise ConfigError("dtype", f"{name} is not finite as {dtype}", action="write a wider type")
    return converted


def export_model(
    *,
    model_dir: str | Path,
    source: Path | VersionSource,
    out_dir: Path,
    adapter_only: bool = False,
    dtype: Dtype | None = None,
    max_shard_size: str = "5GB",
) -> Manifest | None:
    """Write safetensors in the published type, config, generation config and tokenizer.
    Returns a checkpoint's manifest.

    A checkpoint of adapters is merged into the base model in fp32. Samplers add the two outputs instead, so the merged
    model equals theirs up to rounding; with `adapter_only` the adapters are those that were published, bit for bit.

    Args:
        model_dir: the model that the run started from.
        source: a checkpoint directory, a state directory, of which the newest valid checkpoint is taken, or a version.
        out_dir: must not exist, or be empty; appears complete or not at all.
        adapter_only: write the adapters as files for `peft`, without the base model.
        dtype: None for the published type. A narrower one rounds all tensors that the model does not keep in fp32.
        max_shard_size: largest file of weights; a larger tensor has a file of its own.

    Raises:
        ConfigError: `out_dir` is in use or cannot be made, `model_dir` is another model, there are no adapters to
            write, `max_shard_size` is not a size, a value is not finite in `dtype`, or the checkpoint may not be read
            or was removed by a learner.
        CorruptStore: there is no valid checkpoint.
        DiskFull: there is no room for the files.
        StateMismatch: the weights are not those that the checkpoint's manifest names.
    """
    # A rename would take the place of a link, not of its directory.
    out_dir = out_dir.resolve()
    _check_place(out_dir)
    _check_shard_size(max_shard_size)
    manifest: Manifest | None = None
    with ExitStack() as stack:
        if isinstance(source, Path):
            path = stack.enter_context(_kept(source))
            lora = read_lora(path / BACKEND_DIRECTORY)
            manifest = manifest_from_bytes(read_checkpoint(path).manifest)
        else:
            lora = source.lora
        if adapter_only and not lora.rank:
            raise ConfigError("adapter", "the run trains all weights", action="export without it")
        if lora.rank:
            model, layout, read = _adapted(model_dir, path if isinstance(source, Path) else source, lora)
        elif manifest is not None:
            model, layout = _model_of(model_dir, manifest.layout_id)
            read = functools.partial(tensors.read_tensor, _verified(path, manifest, layout))
        else:
            assert not isinstance(source, Path), "a checkpoint has a manifest"
            model, layout = _model_of(model_dir, source.layout_id)
            read = functools.partial(tensors.read_tensor, source.pull(layout))
        dtype = dtype or tensors.main_type(layout)
        with appearing(out_dir) as directory:
            if adapter_only:
                _write_adapter(directory, model, lora, dtype=tensors.TORCH_DTYPE[dtype], model_dir=str(model_dir))
            else:
                _write_weights(directory, model, read, dtype=dtype, max_shard_size=max_shard_size)
                config = config_of(str(model_dir), model, dtype=dtype)
                (directory / "config.json").write_text(config, encoding="utf-8")
            copy_files(str(model_dir), directory)
            if not adapter_only:
                _write_ends(directory, str(model_dir))
            for file in directory.glob("*.safetensors"):
                # safetensors writes files for their owner only.
                shutil.copymode(next(directory.glob("*config.json")), file)
    return manifest


def _check_shard_size(max_shard_size: str) -> None:
    try:
        split_torch_state_dict_into_shards({}, max_shard_size=max_shard_size)
    except ValueError as error:
        raise ConfigError("max_shard_size", str(error), action='give a number and a unit, such as "5GB"') from error


def _check_place(out_dir: Path) -> None:
    if out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir())):
        raise ConfigError("out", f"{out_dir} is not empty", action="name a new directory")
    place = next(parent for parent in out_dir.parents if parent.exists())
    if not (place.is_dir() and os.access(place, os.W_OK)):
        raise ConfigError("out", f"{place} is no directory that this user can write", action="name another place")
    if out_dir.is_mount() or out_dir == Path.cwd():
        kind = "is mounted" if out_dir.is_mount() else "is the working directory"
        raise ConfigError(
            "out", f"{out_dir} {kind}: no other directory can take its place", action="name a new directory in it"
        )


def _adapted(model_dir: str | Path, source: Path | VersionSource, lora: LoraSettings) -> tuple[nn.Module, Layout, Read]:
    """Adapters, held in memory, over weights that stay on the disk."""
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
    if isinstance(source, Path):
        arena = read_published(source, model)
    else:
        arena = source.pull(_layout_for(model, source.layout_id))
    tensors.load(arena, model)
    state = model.state_dict(keep_vars=True)
    types = tensors.types_of(model, tensors.main_type(arena.layout))

    def read(name: str) -> torch.Tensor:
        tensor = state[name].detach()
        if tensor.is_meta:
            tensor = opened.flat(name).view(tensor.shape).to(tensors.TORCH_DTYPE[types[name]])
        return adapted[name].merged_weight(tensor) if name in adapted else tensor

    return model, arena.layout, read


def read_published(path: Path, model: nn.Module) -> Arena:
    """The published weights of a checkpoint, verified against its manifest.

    Raises:
        ConfigError: the checkpoint is of another model.
        CorruptStore: no valid checkpoint is there.
    """
    manifest = manifest_from_bytes(read_checkpoint(path).manifest)
    return _verified(path, manifest, _layout_for(model, manifest.layout_id))


def _verified(path: Path, manifest: Manifest, layout: Layout) -> Arena:
    arena = Arena(layout)
    apply_payload(path / PUBLISHED_FILE, arena, expected_from_root=None)
    verify_state(manifest, arena)
    return arena


def _model_of(model_dir: str | Path, layout_id: str) -> tuple[nn.Module, Layout]:
    """A model whose weights were all trained, so its configuration is enough."""
    model = empty_model(str(model_dir))
    is_integer = any(not tensor.is_floating_point() for tensor in model.state_dict().values())
    if is_integer or layout_id not in _layouts_of(model):
        # Ties and integer tensors are read from the files.
        model = open_model(model_dir).model
    return model, _layout_for(model, layout_id)


def _write_ends(directory: Path, model_dir: str) -> None:
    """Let engines end an answer where the template does, as samplers do.
    A base model's files name only the end of a text."""
    with suppress(ConfigError):
        prompter = Prompter(model_dir, use_chat_template=True)
        if prompter.end_token_ids != end_token_ids(model_dir, prompter.tokenizer):
            path = directory / "generation_config.json"
            settings = json.loads(path.read_text(encoding="utf-8")) | {"eos_token_id": [*prompter.end_token_ids]}
            path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _write_adapter(
    directory: Path, model: nn.Module, lora: LoraSettings, *, dtype: torch.dtype, model_dir: str
) -> None:
    """Write adapters as `peft` reads them, in their published type."""
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


@contextmanager
def _kept(source: Path) -> Iterator[Path]:
    """The checkpoint to read, held while a learner removes older ones."""
    held = source
    with ExitStack() as stack:
        try:
            held = stack.enter_context(linked(source)) if (source / DONE_FILE).exists() else _newest(source, stack)
            yield held
        except PermissionError as error:
            # safetensors writes files for their owner only.
            action = "run it as the learner's user, or on a copy of state_dir"
            raise ConfigError("checkpoint", f"{error.filename} may not be read", action=action) from error
        except (FileNotFoundError, CorruptStore) as error:
            # A learner that starts also removes the links, and what lacks DONE counts as corrupt.
            name = str(error.filename) if isinstance(error, FileNotFoundError) else ""
            if not name.startswith(str(source)) and (held == source or (held / DONE_FILE).exists()):
                raise
            raise ConfigError(
                "checkpoint", f"{name or held} was removed while it was read",
                action="run it again, or on a copy of state_dir",
            ) from error  # fmt: skip


def _newest(state_dir: Path, stack: ExitStack) -> Path:
    root = state_dir / "checkpoints"
    if not root.is_dir():
        problem = f"{state_dir} is no checkpoint and has no directory checkpoints"
        raise ConfigError("checkpoint", problem, action="name a learner's state_dir")
    problems = []
    for path in CheckpointStore(root).paths():
        held = stack.enter_context(linked(path))
        try:
            read_checkpoint(held)
        except CorruptStore as error:
            problems.append(str(error).replace(str(held), str(path)))
        else:
            return held
    raise CorruptStore(f"no valid checkpoint under {state_dir}: {'; '.join(problems) or 'none was written yet'}")


def _layouts_of(model: nn.Module) -> dict[str, Layout]:
    # A layout's id covers its type.
    return {layout.layout_id: layout for layout in (tensors.layout_of(model, dtype) for dtype in _DTYPES)}


def _layout_for(model: nn.Module, layout_id: str) -> Layout:
    layout = _layouts_of(model).get(layout_id)
    if layout is None:
        problem = "has other tensors than the run's model"
        raise ConfigError("model_dir", problem, action="name the one that the run started from")
    return layout
