"""Contexts in which a model computes with other weights.

Samplers draw from the published rounding, which is another policy than the fp32 masters: after a few steps log-probs of
the two differ by a tenth of a nat per token.

Guarantees: gradients of such a pass arrive at the parameters (straight through); afterwards the model has its own
tensors, bit for bit, also after an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from heterorl.common.model.tensors import TORCH_DTYPE, published_tensors, round_to
from heterorl.common.weights.arena import Arena, Layout


@contextmanager
def arena_weights(model: nn.Module, weights: Arena) -> Iterator[None]:
    """Give the model an arena's weights, in memory of their own; tensors that the arena lacks stay."""
    tensors = published_tensors(model)
    values = {
        spec.name: torch.from_numpy(weights.view(spec.name)).view(TORCH_DTYPE[spec.dtype])
        for spec in weights.layout.specs
        if not spec.alias_of
    }
    with _swapped(tensors, {name: values[name].to(tensors[name].device, tensors[name].dtype) for name in values}):
        yield


class Rounding:
    """A model's masters rounded as published, for the passes of a step."""

    def __init__(self, model: nn.Module, layout: Layout, *, dead_band_ulp: float) -> None:
        """For a model whose tensors stay the same objects.

        Passes apply the dead band of publications; a copy in the published type is then held.
        """
        self._tensors = published_tensors(model)
        self._specs = [
            spec
            for spec in layout.specs
            if not spec.alias_of and self._tensors[spec.name].dtype != TORCH_DTYPE[spec.dtype]
        ]
        self._band = dead_band_ulp
        self._published: dict[str, torch.Tensor] = {}

    def note_published(self, arena: Arena) -> None:
        """Remember the newest version, from which a dead band counts."""
        if self._band:
            for spec in self._specs:
                bits = torch.from_numpy(arena.view(spec.name)).view(TORCH_DTYPE[spec.dtype])
                self._published[spec.name] = bits.to(self._tensors[spec.name].device, copy=True)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Let the model compute with the rounded weights; costs one copy of them."""
        with torch.no_grad():
            values = {
                spec.name: round_to(
                    self._tensors[spec.name],
                    TORCH_DTYPE[spec.dtype],
                    published=self._published.get(spec.name),
                    dead_band_ulp=self._band,
                ).to(self._tensors[spec.name].dtype)
                for spec in self._specs
            }
        with _swapped(self._tensors, values):
            yield


@contextmanager
def _swapped(tensors: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Other data in the same tensor objects, so that gradients and optimizer stay with these."""
    own = [(tensors[name], tensors[name].data) for name in values]
    try:
        for name, value in values.items():
            tensors[name].data = value
        yield
    finally:
        for tensor, data in own:
            tensor.data = data
