"""Model tensors to and from arenas, in torch.

A GPU copies pinned memory several times faster than other memory; an arena is not pinned, so that it can be swapped
out. Four threads copy parts between arena and pinned buffers while the GPU copies others. On a CPU a tensor is one
part, and the caller's thread works.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from types import EllipsisType

import numpy as np
import torch
from torch import nn

from heterorl.common.errors import ConfigError, StateMismatch
from heterorl.common.model.adapters import PARTS, has_adapters
from heterorl.common.process.threads import in_order
from heterorl.common.weights.arena import Arena, Dtype, Layout, TensorSpec

TORCH_DTYPE: dict[Dtype, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp8_e4m3": torch.float8_e4m3fn,
}
"""Without int8, whose values depend on the quantiser's scales."""
INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32}
_STRICT = "_keep_in_fp32_modules_strict"
_KEPT: dict[Dtype, tuple[str, ...]] = {"bf16": (_STRICT,), "fp16": (_STRICT, "_keep_in_fp32_modules"), "fp32": ()}
"""Attributes of transformers models that list names kept in fp32."""
PART_ELEMENTS = 8 << 20
"""Elements of a part: 32 MiB in fp32; each thread holds one."""
THREADS = 4

Part = slice | EllipsisType


def published_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent floating-point buffers by name, tied names included.

    With adapters only the adapters: every node has the frozen weights.
    """
    tensors = {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if tensor.is_floating_point()}
    if has_adapters(model):
        return {name: tensor for name, tensor in tensors.items() if name.rpartition(".")[2] in PARTS}
    return tensors


def layout_of(model: nn.Module, dtype: Dtype) -> Layout:
    """Layout of a model published as `dtype`, with tensors kept in fp32.

    Tensors that share storage are aliases.
    """
    published = published_tensors(model)
    owners = _owners(published)
    types = types_of(model, dtype)
    wide = {owners[name] for name in published if types[name] == "fp32"}
    return Layout.build(
        TensorSpec(
            name=name,
            dtype="fp32" if owners[name] in wide else dtype,
            shape=tuple(tensor.shape),
            alias_of="" if owners[name] == name else owners[name],
        )
        for name, tensor in published.items()
    )


def types_of(model: nn.Module, dtype: Dtype) -> dict[str, Dtype]:
    """Type of each floating tensor: `dtype`, or fp32 where transformers keeps it.

    transformers lists tensors that must not be rounded, such as a router's corrections.
    """
    patterns = {str(pattern) for kind in _KEPT[dtype] for pattern in getattr(model, kind, None) or ()}
    is_kept = re.compile("|".join(pattern.replace("*", ".*") for pattern in sorted(patterns)) or "(?!)").search
    return {
        name: "fp32" if is_kept(name) else dtype
        for name, tensor in model.state_dict(keep_vars=True).items()
        if tensor.is_floating_point()
    }


@torch.no_grad()
def round_base(model: nn.Module, dtype: Dtype) -> None:
    """Round a model without adapters to the published type, in place.

    Adapters then have one base on every node, which may store and compute it in another type.
    """
    types = types_of(model, dtype)
    for name, tensor in model.state_dict().items():
        if name in types:
            tensor.copy_(tensor.to(TORCH_DTYPE[types[name]]))


def main_type(layout: Layout) -> Dtype:
    """A model's published type: the one of tensors not kept in fp32."""
    return next((spec.dtype for spec in layout.specs if spec.dtype != "fp32"), "fp32")


def _owners(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    first: dict[int, str] = {}
    owners = {}
    for name, tensor in sorted(tensors.items()):
        # A tensor without storage is the same as another only where it is the same object.
        place = id(tensor) if tensor.is_meta else tensor.data_ptr()
        owners[name] = first.setdefault(place, name) if tensor.numel() else name
    return owners


def store(model: nn.Module, arena: Arena) -> None:
    """Round a model's masters to the published type into an arena.

    Raises ConfigError for a weight that is not finite in the published type: it would reach every sampler.
    """
    tensors = published_tensors(model)
    owned = [(spec, tensors[spec.name]) for spec in arena.layout.specs if not spec.alias_of]
    store_tensors(owned, arena)


def store_tensors(owned: Sequence[tuple[TensorSpec, torch.Tensor]], arena: Arena) -> None:
    """`store` of tensors that own their storage."""
    masters = [tensor.detach() for _, tensor in owned]

    def store_part(number: int, part: Part) -> None:
        spec = owned[number][0]
        rounded = part_of(masters[number], part).to(TORCH_DTYPE[spec.dtype])
        if not rounded.to(torch.float32).isfinite().all():
            raise ConfigError(
                "published_dtype", f"{spec.name} is not finite as {spec.dtype}", action="publish a wider type"
            )
        to_host(rounded.contiguous(), part_of(read_tensor(arena, spec.name), part))

    each_part(store_part, masters)


def read_tensor(arena: Arena, name: str) -> torch.Tensor:
    """A tensor of its published type; writes reach the arena."""
    return torch.from_numpy(arena.view(name)).view(TORCH_DTYPE[arena.layout.spec(name).dtype])


def load(arena: Arena, model: nn.Module) -> None:
    """Copy an arena's values into a model of any floating type.

    Raises StateMismatch if the model has other tensors than the arena, or ties tensors that the arena keeps apart.
    """
    tensors = published_tensors(model)
    # Shapes too: copying would broadcast a smaller tensor silently.
    if {name: tuple(tensor.shape) for name, tensor in tensors.items()} != {
        spec.name: spec.shape for spec in arena.layout.specs
    }:
        raise StateMismatch("the model has other tensors than the weights", action="check model_dir")
    written: dict[int, str] = {}
    for spec in arena.layout.specs:
        tensor, source = tensors[spec.name], spec.alias_of or spec.name
        if tensor.numel() and written.setdefault(tensor.data_ptr(), source) != source:
            raise StateMismatch(f"the model ties {spec.name}, the weights do not", action="check model_dir")
    copied = [
        (spec, tensors[spec.name].detach())
        for spec in arena.layout.specs
        if not spec.alias_of or tensors[spec.name].data_ptr() != tensors[spec.alias_of].data_ptr()
    ]

    def load_part(number: int, part: Part) -> None:
        spec, tensor = copied[number]
        to_device(part_of(read_tensor(arena, spec.name), part), part_of(tensor, part))

    each_part(load_part, [tensor for _, tensor in copied])


def each_part(work: Callable[[int, Part], None], tensors: Sequence[torch.Tensor]) -> None:
    """Call `work` for each part, with the index of its tensor.

    Raises the first error in their order.
    """
    parts = [(number, part) for number, tensor in enumerate(tensors) for part in _parts_of(tensor)]
    threads = THREADS if any(tensor.is_cuda for tensor in tensors) else 1
    for _ in in_order(lambda entry: work(*entry), parts, threads=threads):
        pass


def part_of(tensor: torch.Tensor, part: Part) -> torch.Tensor:
    """A part of a tensor, sharing its storage.

    It is flat, except where it is the whole.
    """
    return tensor[...] if isinstance(part, EllipsisType) else tensor.view(-1)[part]


def to_device(host: torch.Tensor, target: torch.Tensor) -> None:
    """Copy into a part on any device, which may have another type."""
    if target.is_cuda:
        # Converted on the device: `copy_` between types would convert on the host.
        buffer = torch.empty(host.shape, dtype=host.dtype, pin_memory=True)
        _copy_bytes(host, buffer)
        host = buffer.to(target.device)
    target.copy_(host)


def to_host(part: torch.Tensor, target: torch.Tensor) -> None:
    """Copy a part into the host's memory, of the same type."""
    if part.is_cuda:
        buffer = torch.empty(part.shape, dtype=part.dtype, pin_memory=True)
        part = buffer.copy_(part)
    _copy_bytes(part, target)


def _copy_bytes(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy between contiguous tensors of the host, by one thread.

    Torch would use all cores in each of ours.
    """
    np.copyto(_bytes(target), _bytes(source))


def _bytes(tensor: torch.Tensor) -> np.ndarray:
    return tensor.reshape(-1).view(torch.uint8).numpy()


def _parts_of(tensor: torch.Tensor) -> Iterator[Part]:
    if not tensor.is_cuda or not tensor.is_contiguous():
        yield ...
        return
    for start in range(0, tensor.numel(), PART_ELEMENTS):
        yield slice(start, min(start + PART_ELEMENTS, tensor.numel()))
