"""Where an export has a model's values from: runs of one tensor after another, and never the model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from heterorl.common.errors import StateMismatch
from heterorl.common.model import tensors
from heterorl.common.model.adapters import LoraLinear
from heterorl.common.types.policy import Manifest
from heterorl.common.weights.arena import (
    WIDTH,
    Arena,
    Dtype,
    IntArray,
    Layout,
    chunk_length,
    digest_integers,
    state_root,
    zeros,
)
from heterorl.common.weights.codec import apply_chunk
from heterorl.common.weights.payload import PayloadChunks
from heterorl.learner.backends.loading.opened import OpenedModel

RUN_ELEMENTS = 4 << 20
"""Of a run, at most; as many as a chunk has."""


class Values(Protocol):
    """Values by the model's own names."""

    @property
    def dtype(self) -> Dtype:
        """Type in which they were published, but for those that the model keeps in fp32."""
        ...

    def runs(self, name: str) -> Iterator[torch.Tensor]:
        """A flattened tensor in runs, in order; none is to be kept or written to."""
        ...


class SnapshotValues:
    """The snapshot of a version on the disk. One decoded chunk is in memory.

    Every chunk is compared with the manifest before any of its values is given out. Tensors that are asked for in the
    order of their names are decoded once.
    """

    def __init__(self, path: Path, *, layout: Layout, manifest: Manifest) -> None:
        """Read the index.

        Raises:
            StateMismatch: the manifest is of another layout, or contradicts itself.
            MalformedPayload: the file breaks its format.
        """
        stated = manifest.chunk_digests
        if layout.layout_id != manifest.layout_id or len(stated) != len(layout.chunks):
            raise StateMismatch(f"version {manifest.version} has another layout")
        if state_root(layout.layout_id, stated) != manifest.state_root:
            raise StateMismatch(f"the state root differs from version {manifest.version}")
        self.layout = layout
        self.dtype = tensors.main_type(layout)
        self._manifest = manifest
        self._coded = PayloadChunks(path, layout_id=layout.layout_id, chunks=layout.chunks, expected_from_root=None)
        self._first = {chunk.width: number for number, chunk in reversed(list(enumerate(layout.chunks)))}
        self._number = -1
        self._chunk: IntArray = np.empty(0, np.int8)

    def runs(self, name: str) -> Iterator[torch.Tensor]:
        """See Values.

        Raises:
            StateMismatch: a chunk is not that of the version.
            MalformedPayload: a chunk breaks its format.
        """
        spec = self.layout.spec(name)
        width, start = WIDTH[spec.dtype], self.layout.offsets[spec.name]
        stop = start + spec.num_elements
        while start < stop:
            number = self._first[width] + start // chunk_length(width, self.layout.chunk_elements)
            place = self.layout.chunks[number]
            end = min(stop, place.stop)
            values = self._decoded(number)[start - place.start : end - place.start]
            yield torch.from_numpy(values).view(tensors.TORCH_DTYPE[spec.dtype])
            start = end

    def _decoded(self, number: int) -> IntArray:
        if number != self._number:
            self._number, self._chunk = -1, np.empty(0, np.int8)
            method, data = self._coded.read(number)
            chunk = zeros(self.layout.chunks[number])
            apply_chunk(method, memoryview(data), chunk)
            if digest_integers(chunk) != self._manifest.chunk_digests[number]:
                raise StateMismatch(f"chunk {number} differs from version {self._manifest.version}")
            self._number, self._chunk = number, chunk
        return self._chunk


class ArenaValues:
    """Weights that are in memory already."""

    def __init__(self, arena: Arena) -> None:
        self.layout = arena.layout
        self.dtype = tensors.main_type(arena.layout)
        self._arena = arena

    def runs(self, name: str) -> Iterator[torch.Tensor]:
        """See Values."""
        spec = self.layout.spec(name)
        bits = torch.from_numpy(self._arena.view(name)).view(tensors.TORCH_DTYPE[spec.dtype])
        yield from bits.reshape(-1).split(RUN_ELEMENTS)


class MergedValues:
    """A base model on the disk with adapters added to it in fp32; one tensor that has an adapter is in memory."""

    def __init__(self, opened: OpenedModel, dtype: Dtype) -> None:
        """Merge as they are asked for.

        Args:
            opened: the base, with adapters attached that have their values.
            dtype: in which these were published.
        """
        self.dtype = dtype
        self._weights = opened.weights
        self._state = opened.model.state_dict(keep_vars=True)
        self._adapters = {
            f"{name}.weight": module for name, module in opened.model.named_modules() if isinstance(module, LoraLinear)
        }

    def runs(self, name: str) -> Iterator[torch.Tensor]:
        """See Values."""
        tensor = self._state[name]
        if not tensor.is_meta:
            yield tensor.detach().reshape(-1)
        elif name in self._adapters:
            base = self._weights.flat(name).view(tensor.shape)
            yield self._adapters[name].merged_weight(base).reshape(-1)
        else:
            yield from self._weights.flat(name).split(RUN_ELEMENTS)
