"""One chunk of weights as bytes: exact, without a Python loop over elements and without reading a bit as a float.

    0  SAME    nothing: no element changed.
    1  GAPULP  changed elements by position and integer step; written out in services.common.weights.steps.
    4 PLANES  the bytes of all elements by significance, highest first; for each of the w bytes of an element:
                u32 size s, little-endian
                s bytes: the n bytes of the plane themselves when s = n, else (s < n) one zstandard frame of them
              Exponents compress, mantissas do not.
    5  RAW     little-endian integers.
    6  STEP_RAW  the steps of all elements as little-endian integers.

A step is the integer difference, wrapping in the element's width, so steps add up without the state they start from.
Methods 3 and 6 appear only where deltas were composed: with the state at hand 4 and 5 are as small.

Decoding checks every size before it allocates; what fails leaves the chunk as it was.
"""

from __future__ import annotations

import enum
import struct

import numpy as np

from services.common.errors import MalformedPayload
from services.common.weights.arena import IntArray
from services.common.weights.steps import decode_steps, encode_differences, encode_steps
from services.common.weights.zstd_reader import compress, decompress

_SIZE = struct.Struct("<I")


class Method(enum.IntEnum):
    """How a chunk is coded; the numbers are part of the format."""

    SAME = 0
    GAPULP = 1
    STEP_PLANES = 3
    PLANES = 4
    RAW = 5
    STEP_RAW = 6


METHODS = frozenset(Method)
WHOLE_METHODS = frozenset({Method.PLANES, Method.RAW})
"""Methods that need no state before; all that a snapshot may use."""
DENSE_SHARE = 0.6
"""Share of changed elements above which composed steps are not coded by position."""


def encode_chunk(old: IntArray | None, new: IntArray) -> tuple[Method, bytes, int]:
    """Code a chunk against the state before (None: no such state); returns (method, bytes, elements changed).

    The bytes are never more than those of the chunk itself.
    """
    num_changed = new.size
    steps: list[tuple[Method, bytes]] = []
    if old is not None:
        index = np.flatnonzero(old != new)
        num_changed = index.size
        if num_changed == 0:
            return Method.SAME, b"", 0
        steps = [(Method.GAPULP, encode_steps(old, new, index))]
        # Planes of weights save about a third; steps that save a half need no rival.
        if len(steps[0][1]) <= new.nbytes // 2:
            return *steps[0], num_changed
    return *_smallest(steps + _whole(new)), num_changed


def encode_composed(values: IntArray, *, is_whole: bool) -> tuple[Method, bytes, int]:
    """Code a chunk that `apply_chunk` made from zeros: steps, or a state when a whole method took part.

    The result depends on the values alone, so however deltas are composed, equal steps give equal bytes. Returns
    (method, bytes, elements changed); the bytes are never more than those of the chunk itself.
    """
    if is_whole:
        return *_smallest(_whole(values)), values.size
    index = np.flatnonzero(values)
    if index.size == 0:
        return Method.SAME, b"", 0
    steps: list[tuple[Method, bytes]] = []
    # Positions of almost everything cost more than planes, and most of the memory.
    if index.size <= DENSE_SHARE * values.size:
        steps = [(Method.GAPULP, encode_differences(values[index], index))]
        if len(steps[0][1]) <= values.nbytes // 2:
            return *steps[0], index.size
    num_changed = index.size
    del index
    steps += [(Method.STEP_PLANES, _encode_planes(_zigzag(values))), (Method.STEP_RAW, _little(values).tobytes())]
    return *_smallest(steps), num_changed


def apply_chunk(method: int, data: memoryview, chunk: IntArray) -> None:
    """Change `chunk` in place from the old state to the new.

    Raises:
        MalformedPayload: the bytes break the format; the chunk is unchanged.
        LimitExceeded: a stated size is impossible for this chunk; the chunk is unchanged.
    """
    if method == Method.SAME:
        if len(data):
            raise MalformedPayload("a SAME chunk has bytes")
    elif method == Method.GAPULP:
        index, step = decode_steps(data, chunk)
        # Positions ascend strictly, so plain addition (which wraps) touches each element once.
        chunk[index] += step
    elif method == Method.PLANES:
        chunk[:] = _decode_planes(data, chunk)
    elif method == Method.RAW:
        if len(data) != chunk.nbytes:
            raise MalformedPayload(f"a RAW chunk has {len(data)} bytes, not {chunk.nbytes}")
        chunk[:] = np.frombuffer(data, chunk.dtype.newbyteorder("<"))
    elif method == Method.STEP_PLANES:
        chunk += _unzigzag(_decode_planes(data, chunk))
    elif method == Method.STEP_RAW:
        if len(data) != chunk.nbytes:
            raise MalformedPayload(f"a STEP_RAW chunk has {len(data)} bytes, not {chunk.nbytes}")
        chunk += np.frombuffer(data, chunk.dtype.newbyteorder("<"))
    else:
        raise MalformedPayload(f"unknown method {method}")


def _whole(values: IntArray) -> list[tuple[Method, bytes]]:
    return [(Method.PLANES, _encode_planes(values)), (Method.RAW, _little(values).tobytes())]


def _smallest(candidates: list[tuple[Method, bytes]]) -> tuple[Method, bytes]:
    return min(candidates, key=lambda candidate: len(candidate[1]))


def _zigzag(steps: IntArray) -> IntArray:
    # Small steps of both signs have the same high bytes, zeros, which the planes then compress away.
    zigzag: IntArray = (steps << 1) ^ (steps >> (8 * steps.itemsize - 1))
    return zigzag


def _unzigzag(values: IntArray) -> IntArray:
    unsigned = values.astype(values.dtype.newbyteorder("="), copy=False).view(f"u{values.itemsize}")
    steps: IntArray = (unsigned >> 1).view(f"i{values.itemsize}")
    steps ^= -(unsigned & 1).view(f"i{values.itemsize}")
    return steps


def _little(values: IntArray) -> IntArray:
    return values.astype(values.dtype.newbyteorder("<"), copy=False)


def _encode_planes(new: IntArray) -> bytes:
    columns = _little(new).view(np.uint8).reshape(-1, new.itemsize)
    parts: list[bytes] = []
    for column in reversed(range(new.itemsize)):
        plane = columns[:, column].tobytes()
        frame = compress(plane)
        data = frame if len(frame) < len(plane) else plane
        parts += [_SIZE.pack(len(data)), data]
    return b"".join(parts)


def _decode_planes(data: memoryview, chunk: IntArray) -> IntArray:
    columns = np.empty((chunk.size, chunk.itemsize), np.uint8)
    position = 0
    for column in reversed(range(chunk.itemsize)):
        if position + _SIZE.size > len(data):
            raise MalformedPayload("a plane has no size")
        (size,) = _SIZE.unpack_from(data, position)
        position += _SIZE.size
        plane = data[position : position + size]
        position += size
        if size > chunk.size or position > len(data):
            raise MalformedPayload("a plane is longer than its chunk")
        content = plane if size == chunk.size else decompress(plane, num_bytes=chunk.size)
        columns[:, column] = np.frombuffer(content, np.uint8)
    if position != len(data):
        raise MalformedPayload("bytes after the last plane")
    values: IntArray = columns.reshape(-1).view(chunk.dtype.newbyteorder("<"))
    return values
