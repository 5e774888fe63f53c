"""What the files of a model directory hold of a model: names, shapes, and in which file each tensor is.

transformers may keep tensors in files otherwise than in the model: under other names, or apart what the model has in
one tensor, as experts. It is asked what it would write of tensors without values, so no model is held for the answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import nn

from heterorl.common.errors import ConfigError
from heterorl.common.model import tensors
from heterorl.common.model.adapters import PARTS
from heterorl.common.weights.arena import Dtype

_PATTERN = "model{suffix}.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Tensors of the model that become tensors of files by themselves."""

    names: tuple[str, ...]
    """In the model."""
    in_files: tuple[str, ...]
    is_equal: bool
    """Whether it is one tensor whose values stay as they are; otherwise transformers computes what is in the files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """All files of a model."""

    parts: Sequence[Part]
    """Sorted by the model's names."""
    tensors: Mapping[str, torch.Tensor]
    """Type and shape by the files' names, on the meta device."""
    files: Mapping[str, Sequence[str]]
    """Names of tensors by file."""
    types: Mapping[str, torch.dtype]
    """Of floating tensors by the model's names."""
    num_bytes: int


def form_of(model: nn.Module, dtype: Dtype, *, max_shard_size: str) -> Form:
    """Ask transformers what it would write of a model in a type.

    Args:
        model: its parameters may be on the meta device; adapters are taken as merged.
        dtype: of the files, but for tensors that the model keeps in fp32.
        max_shard_size: such as "5GB"; a larger tensor has a file of its own.

    Raises:
        ConfigError: that is not a size.
    """
    types = {name: tensors.TORCH_DTYPE[kind] for name, kind in tensors.types_of(model, dtype).items()}
    state = {
        name: torch.empty(tensor.shape, dtype=types.get(name, tensor.dtype), device="meta")
        # Layer 10 behind layer 9, as transformers fills files.
        for name, tensor in sorted(_saved(model).items(), key=lambda item: _natural(item[0]))
    }
    written = revert(model, state)
    parts = list(_parts(model, state, written))
    like = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in written.items()}
    try:
        split = split_torch_state_dict_into_shards(like, filename_pattern=_PATTERN, max_shard_size=max_shard_size)
    except ValueError as error:
        raise ConfigError("max_shard_size", str(error), action='give a number and a unit, such as "5GB"') from error
    return Form(
        parts=sorted(parts, key=lambda part: part.names),
        tensors=like,
        files=split.filename_to_tensors,
        types=types,
        num_bytes=sum(tensor.numel() * tensor.element_size() for tensor in like.values()),
    )


def revert(model: nn.Module, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What the files hold of tensors of a model."""
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:
        # Older ones keep in files what the model has.
        return dict(state)
    network: Any = model
    written: dict[str, torch.Tensor] = revert_weight_conversion(network, dict(state))
    return written


def _parts(model: nn.Module, state: Mapping[str, torch.Tensor], written: Mapping[str, torch.Tensor]) -> Iterator[Part]:
    rest = dict(state)
    for name, tensor in state.items():
        if written.get(name) is tensor:
            del rest[name]
            yield Part(names=(name,), in_files=(name,), is_equal=True)
    missing = written.keys() - (state.keys() - rest.keys())
    for name, tensor in list(rest.items()):
        alone = revert(model, {name: tensor})
        if all(key in missing and values.shape == written[key].shape for key, values in alone.items()):
            del rest[name]
            missing -= alone.keys()
            is_equal = len(alone) == 1 and next(iter(alone.values())) is tensor
            yield Part(names=(name,), in_files=tuple(alone), is_equal=is_equal)
    if rest or missing:
        # Several of the model's tensors make one of a file: they are held together.
        yield Part(names=tuple(rest), in_files=tuple(sorted(missing)), is_equal=False)


def _saved(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state without adapters, and of tied tensors the one under whose name transformers looks for it."""
    network: Any = model
    ignored = set(getattr(network, "_keys_to_ignore_on_save", None) or ())
    state = {
        name: tensor
        for name, tensor in model.state_dict(keep_vars=True).items()
        if name.rpartition(".")[2] not in PARTS and name not in ignored
    }
    tied: dict[int, list[str]] = {}
    for name, tensor in state.items():
        tied.setdefault(id(tensor), []).append(name)
    patterns = [
        f"{path}.{pattern}" if path else pattern
        for path, module in model.named_modules()
        for pattern in getattr(module, "_tied_weights_keys", None) or ()
    ]
    for names in tied.values():
        own = [name for name in sorted(names) if not any(re.search(pattern, name) for pattern in patterns)]
        kept = own[0] if own else max(names)
        for name in names:
            if name != kept:
                del state[name]
    return state


def _natural(name: str) -> list[tuple[bool, int, str]]:
    return [(not part.isdigit(), int(part) if part.isdigit() else 0, part) for part in name.split(".")]
