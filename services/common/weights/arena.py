"""Arena: a model's tensors in flat integer arrays, cut into chunks.

There is one array for each element width.

Guarantees: equal tensor tables have equal layout ids; a tensor is a view into the arena, so applying a delta to a
chunk changes tensors in place; tied tensors exist once. Values are never interpreted: everything is an exact integer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import blake3
import numpy as np
import numpy.typing as npt

from heterorl.common.process.threads import in_order
from heterorl.common.types.common import Digest

Dtype = Literal["bf16", "fp16", "fp32", "fp8_e4m3", "int8"]
IntArray = npt.NDArray[np.signedinteger[Any]]
WIDTH: dict[Dtype, int] = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8_e4m3": 1, "int8": 1}
WIDTHS = (2, 4, 1)
"""Bytes of an element, in the order in which the arena holds the arrays."""
CHUNK_ELEMENTS = 4 << 20
_INTEGER: dict[int, type[np.int8] | type[np.int16] | type[np.int32]] = {1: np.int8, 2: np.int16, 4: np.int32}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One tensor; `alias_of` names the tensor whose storage it shares.

    Example: TensorSpec(name="lm_head.weight", dtype="bf16", shape=(32000, 64), alias_of="model.embed_tokens.weight")
    """

    name: str
    dtype: Dtype
    shape: tuple[int, ...]
    alias_of: str = ""

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Elements [start, stop) of the array of one width."""

    width: int
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        return self.width * (self.stop - self.start)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A model's canonical tensor table, with the place of each tensor."""

    specs: tuple[TensorSpec, ...]
    offsets: dict[str, int]
    lengths: dict[int, int]
    chunk_elements: int
    chunks: tuple[Chunk, ...]
    layout_id: Digest
    by_name: dict[str, TensorSpec]

    @classmethod
    def build(cls, specs: Iterable[TensorSpec], *, chunk_elements: int = CHUNK_ELEMENTS) -> Layout:
        """Sort, check and place tensors.

        All chunks but the last of a width have `chunk_elements` elements, at least 1; half of it for 4-byte elements.
        Raises ValueError if a name is repeated, a dtype is unknown or a size is impossible. It is also raised if an
        alias names a missing, aliased or differently shaped tensor.
        """
        if chunk_elements < 1:
            raise ValueError(f"a chunk cannot have {chunk_elements} elements")
        table = tuple(sorted(specs, key=lambda spec: spec.name))
        by_name = {spec.name: spec for spec in table}
        if len(by_name) != len(table):
            raise ValueError("tensor names repeat")
        offsets: dict[str, int] = {}
        lengths = dict.fromkeys(WIDTHS, 0)
        for spec in table:
            if spec.dtype not in WIDTH or min(spec.shape, default=0) < 0:
                raise ValueError(f"{spec.name} cannot be {spec.dtype} of shape {spec.shape}")
            if spec.alias_of:
                target = by_name.get(spec.alias_of)
                if target is None or target.alias_of or (target.shape, target.dtype) != (spec.shape, spec.dtype):
                    raise ValueError(f"{spec.name} cannot be an alias of {spec.alias_of}")
                continue
            width = WIDTH[spec.dtype]
            offsets[spec.name] = lengths[width]
            lengths[width] += spec.num_elements
        return cls(
            specs=table,
            offsets=offsets,
            lengths=lengths,
            chunk_elements=chunk_elements,
            chunks=cut(lengths, chunk_elements),
            layout_id=_layout_id(table, offsets, chunk_elements),
            by_name=by_name,
        )

    @property
    def num_elements(self) -> int:
        return sum(self.lengths.values())

    @property
    def full_bytes(self) -> int:
        return sum(width * length for width, length in self.lengths.items())

    def spec(self, name: str) -> TensorSpec:
        """Spec of the tensor that owns this name's storage; aliases are followed."""
        found = self.by_name[name]
        return self.by_name[found.alias_of] if found.alias_of else found


class Arena:
    """The bits of one state of a model; zero at first."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._arrays: dict[int, IntArray] = {
            width: np.zeros(length, _INTEGER[width]) for width, length in layout.lengths.items()
        }

    @property
    def num_chunks(self) -> int:
        return len(self.layout.chunks)

    def view(self, name: str) -> IntArray:
        """The tensor's integers in its shape; writes reach the arena."""
        spec = self.layout.spec(name)
        start = self.layout.offsets[spec.name]
        return self._arrays[WIDTH[spec.dtype]][start : start + spec.num_elements].reshape(spec.shape)

    def chunk(self, index: int) -> IntArray:
        """The chunk's integers, flat; writes reach the arena."""
        chunk = self.layout.chunks[index]
        return self._arrays[chunk.width][chunk.start : chunk.stop]

    def whole(self) -> Arena:
        """This arena; weights that are sharded gather theirs."""
        return self

    def copy(self) -> Arena:
        other = Arena(self.layout)
        for width, array in self._arrays.items():
            other._arrays[width][:] = array
        return other

    def digest_chunk(self, index: int) -> bytes:
        return digest_integers(self.chunk(index))

    def digests(self, *, threads: int = 1) -> tuple[bytes, ...]:
        return tuple(in_order(self.digest_chunk, range(self.num_chunks), threads=threads))

    def state_root(self, *, threads: int = 1) -> Digest:
        return state_root(self.layout.layout_id, self.digests(threads=threads))


def cut(lengths: dict[int, int], chunk_elements: int) -> tuple[Chunk, ...]:
    """Cut the array of each element width into chunks, in order.

    The last of a width may be shorter. A chunk has `chunk_elements` elements, or half as many of 4 bytes, so all need
    about the same memory.
    """
    return tuple(
        Chunk(width=width, start=start, stop=min(start + chunk_length(width, chunk_elements), length))
        for width, length in lengths.items()
        for start in range(0, length, chunk_length(width, chunk_elements))
    )


def chunk_length(width: int, chunk_elements: int) -> int:
    """Elements of a chunk of a width, except the last one."""
    return max(1, chunk_elements // 2) if width == 4 else chunk_elements


def zeros(chunk: Chunk) -> IntArray:
    """A chunk of zeros outside any arena."""
    return np.zeros(chunk.stop - chunk.start, _INTEGER[chunk.width])


def digest_integers(values: IntArray) -> bytes:
    """blake3 of an array's little-endian bytes, 16 bytes.

    A learner signs weights by these: a digest against damage alone, such as xxh3, could be forged.
    """
    little = np.ascontiguousarray(values).astype(values.dtype.newbyteorder("<"), copy=False)
    return blake3.blake3(little.view(np.uint8).data).digest(length=16)


def state_root(layout_id: Digest, digests: Sequence[bytes]) -> Digest:
    """blake3(layout_id || chunk digests), hex: the identity of a state."""
    return Digest(blake3.blake3(layout_id.encode("ascii") + b"".join(digests)).hexdigest())


def _layout_id(specs: Sequence[TensorSpec], offsets: dict[str, int], chunk_elements: int) -> Digest:
    # Length prefixes keep two different tables from spelling the same bytes.
    hasher = blake3.blake3(b"heterorl layout 3")
    hasher.update(chunk_elements.to_bytes(8, "little"))
    for spec in specs:
        for text in (spec.name, spec.dtype, spec.alias_of):
            data = text.encode()
            hasher.update(len(data).to_bytes(4, "little") + data)
        shape = [len(spec.shape), *spec.shape, offsets.get(spec.name, 0)]
        hasher.update(b"".join(size.to_bytes(8, "little") for size in shape))
    return Digest(hasher.hexdigest())
