"""Arenas with random bits for tests of the weight path."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from heterorl.common.weights.arena import Arena, IntArray, Layout, TensorSpec
from heterorl.common.weights.sparse_codec import StepWriter, changes

SPECS: tuple[TensorSpec, ...] = (
    TensorSpec(name="embed", dtype="bf16", shape=(31, 7)),
    TensorSpec(name="head", dtype="bf16", shape=(31, 7), alias_of="embed"),
    TensorSpec(name="norm", dtype="fp16", shape=(5,)),
    TensorSpec(name="gate", dtype="fp32", shape=(3, 11)),
    TensorSpec(name="scale", dtype="fp32", shape=()),
)
"""Two widths, a tied pair, odd sizes, a scalar: 217 + 5 elements of two bytes and 33 + 1 of four."""


def small_layout(*, chunk_elements: int = 50, specs: Sequence[TensorSpec] = SPECS) -> Layout:
    """Chunks that are smaller than the largest tensor and cross the borders of the others."""
    return Layout.build(specs, chunk_elements=chunk_elements)


def random_bits(generator: np.random.Generator, like: IntArray) -> IntArray:
    """Any bit pattern, NaN and Inf included."""
    data = generator.bytes(like.nbytes)
    values: IntArray = np.frombuffer(data, like.dtype).reshape(like.shape)
    return values


def random_arena(layout: Layout, *, seed: int) -> Arena:
    """An arena of random bits."""
    generator = np.random.default_rng(seed)
    arena = Arena(layout)
    for number in range(arena.num_chunks):
        arena.chunk(number)[:] = random_bits(generator, arena.chunk(number))
    return arena


def changed_arena(arena: Arena, *, seed: int, density: float = 0.1) -> Arena:
    """A copy in which about `density` of the elements have other random bits."""
    generator = np.random.default_rng(seed)
    other = arena.copy()
    for number in range(other.num_chunks):
        chunk = other.chunk(number)
        mask = generator.random(chunk.size) < density
        chunk[mask] = random_bits(generator, chunk)[mask]
    return other


def encode_steps(old: IntArray | None, new: IntArray) -> tuple[bytes, int]:
    """Code the elements where `old` and `new` differ, at least one; without `old`, `new` holds the steps."""
    writer = StepWriter()
    for block in changes(old, new):
        writer.add(*block)
    return writer.finish(), writer.num_changed
