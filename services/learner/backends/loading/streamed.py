"""A model that computes with weights on the disk: its blocks have theirs while they compute, what is outside always."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from heterorl.learner.backends.loading.opened import OpenedModel

_Places = list[tuple[nn.Module, str, nn.Parameter]]


@contextmanager
def streamed(opened: OpenedModel) -> Iterator[nn.Module]:
    """The model with fp32 weights for forward passes without gradients; afterwards it has none again.

    Memory: embeddings and head, and one block of the outermost lists of modules. Blocks, not single modules: within a
    block, modules read each other's weights.
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
    """The members of the outermost lists of modules, such as a model's layers."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from child.children()
        else:
            yield from blocks_of(child)


def _put_back(places: _Places) -> None:
    for owner, attribute, meta in places:
        owner._parameters[attribute] = meta
