"""Codec of dense changes (DENSE8) and of whole chunks (PLANES).

DENSE8, the steps of all n elements of w bytes, little-endian:

     0  u32 wide values v, at most n / 4; 0 when w = 1
     4  u32 size of the byte frame     8  u32 size of the wide frame
    12  byte frame     n bytes: the step s folded to 2 s, or -2 s - 1 when s < 0; 255 means "255 + next wide value", but
                       when w = 1 it means itself
        wide frame     v * w bytes: all lowest bytes, then all second lowest, ...

PLANES, the bytes of all elements by significance, highest first; for each of the w bytes of an element:

        u32 size s
        s bytes: the n bytes of the plane themselves when s = n, else (s < n) one zstandard frame of them

A frame is zstandard, or nothing when its stream is empty. Exponents compress, mantissas do not.
"""

from __future__ import annotations

import sys
from struct import Struct

import numpy as np

from heterorl.common.errors import MalformedPayload
from heterorl.common.weights.arena import IntArray
from heterorl.common.weights.sparse_codec import (
    ESCAPE,
    MAX_WIDE_SHARE,
    SCAN_ELEMENTS,
    U8Array,
    UnsignedArray,
    compress,
    decompress,
    from_planes,
    to_planes,
)

_HEADER = Struct("<3I")
_SIZE = Struct("<I")


def encode_dense(old: IntArray | None, new: IntArray) -> bytes | None:
    """Code the steps of all elements; without `old`, `new` holds them. None if too many are wide."""
    folded_bytes = np.empty(new.size, np.uint8)
    wide: list[UnsignedArray] = []
    num_wide = 0
    bits = 8 * new.itemsize
    for start in range(0, new.size, SCAN_ELEMENTS):
        part = slice(start, start + SCAN_ELEMENTS)
        step = new[part] if old is None else new[part] - old[part]
        folded: UnsignedArray = ((step << 1) ^ (step >> (bits - 1))).view(f"u{new.itemsize}")
        if new.itemsize == 1:
            folded_bytes[part] = folded
            continue
        folded_bytes[part] = np.minimum(folded, ESCAPE)
        rest = folded[folded >= ESCAPE] - np.uint8(ESCAPE)
        wide.append(rest)
        num_wide += rest.size
        if num_wide > new.size // MAX_WIDE_SHARE:
            return None
    byte_frame = compress(folded_bytes.data)
    del folded_bytes
    wide_frame = compress(to_planes(np.concatenate(wide))) if num_wide else b""
    return b"".join([_HEADER.pack(num_wide, len(byte_frame), len(wide_frame)), byte_frame, wide_frame])


def apply_dense(data: memoryview, chunk: IntArray) -> None:
    """Add the steps to `chunk`; on MalformedPayload or LimitExceeded it is unchanged."""
    if len(data) < _HEADER.size:
        raise MalformedPayload("a DENSE8 chunk is shorter than its header")
    num_wide, byte_size, wide_size = _HEADER.unpack_from(data)
    if num_wide > (chunk.size // MAX_WIDE_SHARE if chunk.itemsize > 1 else 0):
        raise MalformedPayload(f"{num_wide} wide steps in a chunk of {chunk.size} elements")
    if _HEADER.size + byte_size + wide_size != len(data):
        raise MalformedPayload("the streams of a DENSE8 chunk do not add up")
    unsigned: np.dtype[np.unsignedinteger] = np.dtype(f"u{chunk.itemsize}")
    content = np.frombuffer(decompress(data[12 : 12 + byte_size], num_bytes=chunk.size), np.uint8)
    wide = from_planes(decompress(data[12 + byte_size :], num_bytes=num_wide * chunk.itemsize), unsigned)
    if chunk.itemsize > 1 and int(np.count_nonzero(content == ESCAPE)) != num_wide:
        raise MalformedPayload("steps and wide steps disagree")
    if (wide > np.iinfo(unsigned).max - ESCAPE).any():
        raise MalformedPayload("a step leaves its width")
    position = 0
    for start in range(0, chunk.size, SCAN_ELEMENTS):
        folded: UnsignedArray = content[start : start + SCAN_ELEMENTS].astype(unsigned)
        if num_wide:
            place = np.flatnonzero(folded == ESCAPE)
            folded[place] += wide[position : position + place.size]
            position += place.size
        step: IntArray = (folded >> 1).view(chunk.dtype)
        step ^= -(folded & 1).view(chunk.dtype)
        chunk[start : start + SCAN_ELEMENTS] += step


def encode_planes(values: IntArray) -> bytes:
    """Code the elements themselves."""
    columns = _columns(values)
    parts: list[bytes] = []
    for column in reversed(range(values.itemsize)):
        plane = columns[:, column].tobytes()
        frame = compress(plane)
        data = frame if len(frame) < len(plane) else plane
        parts += [_SIZE.pack(len(data)), data]
        # Free it before the next plane.
        del plane, frame
    return b"".join(parts)


def apply_planes(data: memoryview, chunk: IntArray) -> None:
    """Set `chunk` to the values; on MalformedPayload or LimitExceeded it is unchanged."""
    planes: list[bytes | memoryview] = []
    position = 0
    for _ in range(chunk.itemsize):
        if position + _SIZE.size > len(data):
            raise MalformedPayload("a plane has no size")
        (size,) = _SIZE.unpack_from(data, position)
        position += _SIZE.size
        plane = data[position : position + size]
        position += size
        if size > chunk.size or position > len(data):
            raise MalformedPayload("a plane is longer than its chunk")
        planes.append(plane if size == chunk.size else decompress(plane, num_bytes=chunk.size))
    if position != len(data):
        raise MalformedPayload("bytes after the last plane")
    columns = _columns(chunk)
    for column in range(chunk.itemsize):
        columns[:, column] = np.frombuffer(planes.pop(), np.uint8)


def _columns(values: IntArray) -> U8Array:
    """The bytes of each element as a row, lowest first; a view."""
    rows: U8Array = values.view(np.uint8).reshape(-1, values.itemsize)
    return rows if sys.byteorder == "little" else rows[:, ::-1]
