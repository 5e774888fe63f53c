"""What an export reads of a checkpoint, and the safetensors files that it writes, one tensor after another.

transformers may keep tensors in files otherwise than in the model: under other names, or apart what the model has in
one tensor, as experts. It is asked what it would write of tensors without values, so no model is held for the answer.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import nn

from heterorl.common.errors import ConfigError, StateMismatch
from heterorl.common.model import tensors
from heterorl.common.model.adapters import PARTS
from heterorl.common.types.policy import Manifest
from heterorl.common.weights.arena import (
    WIDTH,
    Chunk,
    Dtype,
    IntArray,
    Layout,
    TensorSpec,
    digest_integers,
    state_root,
    zeros,
)
from heterorl.common.weights.codec import apply_chunk
from heterorl.common.weights.file_plan import FilePlan
from heterorl.common.weights.payload import PayloadChunks
from heterorl.learner.backends.loading.tensor_file import INDEX_FILE, TYPE_NAMES

Report = Callable[[int, int], None]
"""Told how many bytes are written, of how many."""
Read = Callable[[str], torch.Tensor]
"""A tensor by its name in the model; not to be written to."""
_PATTERN = "model{suffix}.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Form:
    """What the files hold of a model."""

    types: Mapping[str, torch.dtype]
    """Of floating tensors by the model's names."""
    parts: Sequence[list[str]]
    """Names in the model of tensors that become tensors of files by themselves; mostly one."""
    same: Set[str]
    """Those whose tensor is the file's; of others transformers computes what is in the files."""
    tensors: Mapping[str, torch.Tensor]
    """Type and shape by the files' names, on the meta device."""
    files: Mapping[str, Sequence[str]]
    """Names of tensors by file."""

    @property
    def num_bytes(self) -> int:
        """Of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def snapshot_reader(path: Path, layout: Layout, manifest: Manifest) -> Read:
    """The tensors of a snapshot file; each chunk is compared with the manifest before its values are used.

    One decoded chunk is kept: tensors that are asked for in the order of their names are decoded once.

    Raises:
        StateMismatch: the manifest contradicts itself, or, when it is read, a chunk is not that of the version.
        MalformedPayload: the file breaks its format.
    """
    digests = manifest.chunk_digests
    if len(digests) != len(layout.chunks) or state_root(layout.layout_id, digests) != manifest.state_root:
        raise StateMismatch(f"the state root differs from version {manifest.version}")
    coded = PayloadChunks(path, layout_id=layout.layout_id, chunks=layout.chunks, expected_from_root=None)

    @functools.lru_cache(maxsize=1)
    def decoded(number: int) -> IntArray:
        method, data = coded.read(number)
        chunk = zeros(layout.chunks[number])
        apply_chunk(method, memoryview(data), chunk)
        if digest_integers(chunk) != digests[number]:
            raise StateMismatch(f"chunk {number} differs from version {manifest.version}")
        return chunk

    def read(name: str) -> torch.Tensor:
        spec = layout.spec(name)
        begin = layout.offsets[spec.name]
        whole = Chunk(width=WIDTH[spec.dtype], start=begin, stop=begin + spec.num_elements)
        bits = zeros(whole)
        for number, chunk in enumerate(layout.chunks):
            start, stop = max(whole.start, chunk.start), min(whole.stop, chunk.stop)
            if chunk.width == whole.width and start < stop:
                bits[start - whole.start : stop - whole.start] = decoded(number)[
                    start - chunk.start : stop - chunk.start
                ]
        return tensor_of(spec, bits)

    return read


def tensor_of(spec: TensorSpec, bits: IntArray) -> torch.Tensor:
    """A tensor of an arena's bits, without a copy."""
    return torch.from_numpy(bits).view(tensors.TORCH_DTYPE[spec.dtype]).view(spec.shape)


def write_weights(
    directory: Path, model: nn.Module, read: Read, *, dtype: Dtype, max_shard_size: str, report: Report
) -> None:
    """Write the files and, where they are several, their index. Memory: one tensor, or those that become one together.

    Args:
        directory: an empty one.
        model: its parameters may be on the meta device; adapters are taken as merged.
        read: gives the values.
        dtype: of the files, but for tensors that the model keeps in fp32.
        max_shard_size: such as "5GB"; a larger tensor has a file of its own.
        report: told of the progress.

    Raises:
        ConfigError: `max_shard_size` is not a size, or a value is not finite in the type of its file.
    """
    form = _form_of(model, dtype, max_shard_size=max_shard_size)
    state = model.state_dict()
    done = 0
    with ExitStack() as stack:
        places: dict[str, tuple[BinaryIO, int]] = {}
        for file_name, names in form.files.items():
            # safetensors sorts alike: wide types first, then names.
            order = sorted(names, key=lambda name: (-form.tensors[name].element_size(), name))
            table = [(name, TYPE_NAMES[form.tensors[name].dtype], tuple(form.tensors[name].shape)) for name in order]
            plan = FilePlan(table, metadata={"format": "pt"})
            file: BinaryIO = stack.enter_context((directory / file_name).open("wb"))
            file.write(plan.header)
            file.truncate(plan.num_bytes)
            places |= {name: (file, plan.place(name)) for name in names}
        for names in form.parts:
            for name, tensor in _written(model, form, names, read, state):
                out, place = places[name]
                out.seek(place)
                if tensor.numel():
                    out.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
                done += tensor.nbytes
                report(done, form.num_bytes)
                del tensor  # before the next one comes
    assert done == form.num_bytes, "every tensor of the files comes from one of the model"
    if len(form.files) > 1:
        total = sum(tensor.numel() for tensor in form.tensors.values())
        index = {
            "metadata": {"total_parameters": total, "total_size": form.num_bytes},
            "weight_map": {name: file_name for file_name, names in form.files.items() for name in names},
        }
        (directory / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _written(
    model: nn.Module, form: _Form, names: Sequence[str], read: Read, state: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of files that a part becomes, by their names there."""
    # What is no floating number is never published: it is the model's own.
    held = {
        name: _converted(read(name), form.types[name], name) if name in form.types else state[name] for name in names
    }
    yield from (held if form.same >= set(names) else _reverted(model, held)).items()


def _form_of(model: nn.Module, dtype: Dtype, *, max_shard_size: str) -> _Form:
    types = {name: tensors.TORCH_DTYPE[kind] for name, kind in tensors.types_of(model, dtype).items()}
    state = {
        name: torch.empty(tensor.shape, dtype=types.get(name, tensor.dtype), device="meta")
        # Layer 10 behind layer 9, as transformers fills files.
        for name, tensor in sorted(_saved(model).items(), key=lambda item: _natural(item[0]))
    }
    written = _reverted(model, state)
    like = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in written.items()}
    try:
        split = split_torch_state_dict_into_shards(like, filename_pattern=_PATTERN, max_shard_size=max_shard_size)
    except ValueError as error:
        raise ConfigError("max_shard_size", str(error), action='give a number and a unit, such as "5GB"') from error
    same = {name for name, tensor in state.items() if written.get(name) is tensor}
    parts = sorted([*([name] for name in same), *_parts(model, state, written, same)])
    return _Form(types=types, parts=parts, same=same, tensors=like, files=split.filename_to_tensors)


def _reverted(model: nn.Module, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What the files hold of tensors of a model."""
    from transformers.core_model_loading import revert_weight_conversion

    network: Any = model
    written: dict[str, torch.Tensor] = revert_weight_conversion(network, dict(state))
    return written


def _parts(
    model: nn.Module, state: Mapping[str, torch.Tensor], written: Mapping[str, torch.Tensor], same: Set[str]
) -> Iterator[list[str]]:
    missing = written.keys() - same
    rest = []
    for name in (name for name in state if name not in same):
        alone = _reverted(model, {name: state[name]})
        if all(key in missing and tensor.shape == written[key].shape for key, tensor in alone.items()):
            missing -= alone.keys()
            yield [name]
        else:
            rest.append(name)
    if rest:
        # Several of the model's tensors make one of a file: they are held together.
        yield rest


def _converted(tensor: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
    if tensor.dtype == dtype:
        return tensor
    converted = tensor.to(dtype)
    if not converted.isfinite().all():
        raise ConfigError("dtype", f"{name} is not finite as {dtype}", action="write a wider type")
    return converted


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
