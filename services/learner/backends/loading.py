"""Opened model directories: a model without weights, and named weights.

A rank reads one tensor at a time, or block by block while a model computes, and keeps only its part.

Guarantees: the values are bit for bit what transformers loads. If names or values in the files differ from the
model's (merged experts, quantised weights, tied tensors that differ, no safetensors), transformers reads the whole
model, and the log says so.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from heterorl.common.errors import ConfigError, CorruptStore
from heterorl.common.model.adapters import digest_of
from heterorl.common.model.model_directory import first_line
from heterorl.common.model.model_loading import BUILDING, check_unread, choose_kernels, hold_positions
from heterorl.common.model.tensors import published_tensors
from heterorl.common.types.common import Digest
from heterorl.learner.backends.tensor_file import TensorFile, weight_files
from heterorl.learner.train.model import load_model, prepare

_LOG = logging.getLogger(__name__)
_EXACT_IN_FP32 = (torch.float32, torch.bfloat16, torch.float16)
_Places = list[tuple[nn.Module, str, nn.Parameter]]


def empty_model(model_dir: str) -> nn.Module:
    """A causal language model with parameters on the meta device.
    Its buffers are real, since they are computed.

    Raises ConfigError: there is no such model, or its code needs values.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    choose_kernels()
    try:
        config = AutoConfig.from_pretrained(model_dir)
        with BUILDING, _parameters_on_meta():
            model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except Exception as error:
        action = "name a directory with config.json of a transformers model"
        raise ConfigError("model_dir", f"cannot load {model_dir}: {first_line(error)}", action=action) from error
    hold_positions(model)
    return model


def replace_parameters(
    model: nn.Module, make: Callable[[str, nn.Parameter], torch.Tensor]
) -> Iterator[tuple[str, nn.Parameter]]:
    """Replace a model's parameters one at a time, as the caller iterates.

    Tied parameters stay tied. Yields the new ones by name, each already in its place.
    """
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for owner in model.modules():
        for attribute, parameter in owner._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((owner, attribute))
    for name, parameter in list(model.named_parameters()):
        new = nn.Parameter(make(name, parameter), requires_grad=parameter.requires_grad)
        for owner, attribute in places[id(parameter)]:
            owner._parameters[attribute] = new
        yield name, new


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """A context in which this process's modules register parameters without storage.

    BUILDING is held. Not torch's meta device: buffers such as the frequencies of positions are computed, and in no
    file.
    """
    register = nn.Module.register_parameter

    def register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        # A parameter on meta is tied to another: it must stay that object.
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    module: Any = nn.Module
    module.register_parameter = register_on_meta
    try:
        yield
    finally:
        module.register_parameter = register


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedModel:
    """A model on the meta device, with real buffers, ready for weights."""

    model: nn.Module
    flat: Callable[[str], torch.Tensor]
    """The flattened tensor of a name of the model, of a type that fp32 holds exactly; not to be written to."""
    is_held: bool
    """Whether the weights are in this process's memory; else they stay on the disk, or rank 0 sends them."""


class _NotByName(Exception):
    """The files do not have the model's tensors by name."""


def open_model(model_dir: str | Path, *, gradient_checkpointing: bool = False, may_hold: bool = True) -> OpenedModel:
    """Open a local directory or hub id.

    Reads only types and shapes of its weights. Without `may_hold` a model that cannot be read by name has no weights,
    and its untrained tensors keep computed values.

    Raises ConfigError: it is not a causal language model, or cannot be read.
    """
    like: nn.Module | None = None
    try:
        like = _built(str(model_dir))
        opened = _by_name(str(model_dir), like)
    except _NotByName as reason:
        if may_hold:
            opened = _whole(model_dir, reason, like)
        else:
            nothing: dict[str, torch.Tensor] = {}
            opened = OpenedModel(model=like or empty_model(str(model_dir)), flat=nothing.__getitem__, is_held=True)
    except CorruptStore as error:
        action = "copy the safetensors files and their index again"
        raise ConfigError("model_dir", f"cannot load {model_dir}: {first_line(error)}", action=action) from error
    prepare(opened.model, gradient_checkpointing=gradient_checkpointing)
    return opened


def fill(opened: OpenedModel, *, device: torch.device | str = "cpu") -> nn.Module:
    """Fill the model with fp32 masters on a device; returns it."""
    # Mapped tensors are the file's: copy them. Held ones belong to this model.
    names = replace_parameters(
        opened.model,
        lambda name, meta: opened.flat(name).to(device, torch.float32, copy=not opened.is_held).view(meta.shape),
    )
    for _ in names:
        pass
    return opened.model.to(device)


@torch.no_grad()
def hold_untrained(opened: OpenedModel) -> None:
    """Turn published parameters that are not trained into buffers with their values.

    An example is a router's correction. An engine that shards a model shards what is trained, so all that it publishes
    is trained or a buffer. If ranks share the weights of one, all of them call.
    """
    frozen = {
        id(tensor)
        for tensor in published_tensors(opened.model).values()
        if isinstance(tensor, nn.Parameter) and not tensor.requires_grad
    }
    made: dict[int, torch.Tensor] = {}
    for path, owner in opened.model.named_modules():
        for attribute, parameter in list(owner._parameters.items()):
            if parameter is None or id(parameter) not in frozen:
                continue
            if id(parameter) not in made:
                whole = opened.flat(f"{path}.{attribute}".lstrip("."))
                made[id(parameter)] = whole.to(torch.float32, copy=True).view(parameter.shape)
            del owner._parameters[attribute]
            owner.register_buffer(attribute, made[id(parameter)])


def digest_of_opened(opened: OpenedModel) -> Digest:
    """`base_digest` of its weights, with one tensor at a time in memory."""
    state = opened.model.state_dict(keep_vars=True)

    def read(name: str) -> torch.Tensor:
        tensor = state[name]
        return opened.flat(name).view(tensor.shape) if tensor.is_meta else tensor

    return digest_of(state, read)


def _built(model_dir: str) -> nn.Module:
    try:
        return empty_model(model_dir)
    except ConfigError as error:
        # The model's code may fail on tensors without values. Reading the files reports their errors.
        raise _NotByName(first_line(error)) from error


def _by_name(model_dir: str, model: nn.Module) -> OpenedModel:
    from transformers.conversion_mapping import get_model_conversion_mapping

    if (Path(model_dir) / "adapter_config.json").is_file():
        raise _NotByName("it has an adapter")
    try:
        files = weight_files(model_dir)
    except (ConfigError, OSError, ValueError) as error:
        raise _NotByName(first_line(error)) from error
    if not files:
        raise _NotByName("it has no safetensors")
    network: Any = model
    if getattr(network.config, "quantization_config", None) is not None:
        raise _NotByName("it is quantised")
    if any(getattr(step, "operations", None) for step in get_model_conversion_mapping(network)):
        raise _NotByName("transformers computes its tensors from those in the files")
    file_of = {name: file for file in map(TensorFile, files) for name in file.tensors}
    names = _names(model, file_of)
    check_unread(model_dir, file_of.keys() - names.keys(), names)

    def flat(name: str) -> torch.Tensor:
        return file_of[names[name]].flat(names[name])

    with torch.no_grad():
        for name, tensor in model.state_dict(keep_vars=True).items():
            if not isinstance(tensor, nn.Parameter):
                tensor.copy_(flat(name).view(tensor.shape))
    return OpenedModel(model=model, flat=flat, is_held=False)


def _whole(model_dir: str | Path, reason: _NotByName, like: nn.Module | None) -> OpenedModel:
    _LOG.warning("model %s is read whole before sharding: %s", model_dir, reason)
    model = load_model(model_dir)
    # transformers also trains parameters that the model's own code freezes.
    trained = {name: parameter.requires_grad for name, parameter in like.named_parameters()} if like else {}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained.get(name, True))
    held = {name: parameter.detach() for name, parameter in model.named_parameters(remove_duplicate=False)}
    for _ in replace_parameters(model, lambda _, parameter: parameter.detach().to("meta")):
        pass
    return OpenedModel(model=model, flat=lambda name: held[name].reshape(-1), is_held=True)


def _names(model: nn.Module, file_of: Mapping[str, TensorFile]) -> dict[str, str]:
    """The file's name of each tensor of a model.
    Tied ones are one tensor, under any of their names."""
    tied: dict[int, list[str]] = {}
    state = model.state_dict(keep_vars=True)
    for name, tensor in state.items():
        if not isinstance(tensor, nn.Parameter) and tensor.dtype != torch.float32:
            raise _NotByName(f"{name} is {tensor.dtype}")
        tied.setdefault(id(tensor), []).append(name)
    where: dict[str, str] = {}
    for names in tied.values():
        found = [name for name in names if name in file_of]
        if not found:
            raise _NotByName(f"{names[0]} is not in the files")
        for name in found:
            like = file_of[name].tensors[name]
            if like.shape != state[name].shape or like.dtype not in _EXACT_IN_FP32:
                raise _NotByName(f"{name} is {like.dtype} {tuple(like.shape)} in the files")
        if any(not torch.equal(file_of[found[0]].flat(found[0]), file_of[name].flat(name)) for name in found[1:]):
            raise _NotByName(f"{' and '.join(found)} are tied and differ")
        where.update(dict.fromkeys(names, found[0]))
    return where


@contextmanager
def streamed(opened: OpenedModel) -> Iterator[nn.Module]:
    """A context with the model's fp32 weights for passes without gradients.

    Memory: embeddings, head, and one block. Blocks, not single modules: modules of a block read each other's weights.
    """
    model = opened.model
    names = {id(owner): name for name, owner in model.named_modules()}
    blocks = list(blocks_of(model))
    inside = {id(owner) for block in blocks for owner in block.modules()}
    held: dict[int, _Places] = {}

    def read(owners: Iterable[nn.Module]) -> _Places:
        places, made = [], dict[int, nn.Parameter]()
        for owner in owners:
            for attribute, meta in list(owner._parameters.items()):
                if meta is None:
                    continue
                if id(meta) not in made:
                    name = f"{names[id(owner)]}.{attribute}".lstrip(".")
                    values = opened.flat(name).to(torch.float32).view(meta.shape)
                    made[id(meta)] = nn.Parameter(values, requires_grad=False)
                places.append((owner, attribute, meta))
                owner._parameters[attribute] = made[id(meta)]
        return places

    def begin(block: nn.Module, _: Any) -> None:
        held[id(block)] = read(block.modules())

    def end(block: nn.Module, _: Any, __: Any) -> None:
        _put_back(held.pop(id(block)))

    hooks = [block.register_forward_pre_hook(begin) for block in blocks]
    hooks += [block.register_forward_hook(end) for block in blocks]
    outside = read(owner for owner in model.modules() if id(owner) not in inside)
    try:
        yield model
    finally:
        for hook in hooks:
            hook.remove()
        for places in (outside, *held.values()):
            _put_back(places)


def blocks_of(module: nn.Module) -> Iterator[nn.Module]:
    """The members of the outermost lists of modules, such as layers."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from child.children()
        else:
            yield from blocks_of(child)


def _put_back(places: _Places) -> None:
    for owner, attribute, meta in places:
        owner._parameters[attribute] = meta
