"""Codec of one chunk of weights, exact and vectorised.

No bit is read as a float.

    0  SAME      empty: all elements are unchanged.
    1  GAPULP    changed elements by position and integer step (heterorl.common.weights.sparse_codec).
    2            unused; refused as unknown.
    3  DENSE8    the steps of all elements, one byte each (below).
    4  PLANES    the elements, byte planes by significance (below).
    5  RAW       little-endian integers.
    6  STEP_RAW  the steps of all elements as little-endian integers.

The encoder chooses by the share of changed elements: SAME, GAPULP up to DENSE_SHARE, DENSE8 above; steps that save less
than half are compared with the state itself. A step is the integer difference, wrapping in the element's width (1, 2 or
4 bytes). So steps add up without the state they start from. Method 6 appears only in composed deltas, where the state
is not there for method 5.

Equal inputs give equal bytes. Decoding checks every size before it allocates and every position before it writes; a
failure leaves the chunk unchanged. Memory besides the chunk: at most 20 MB for one of 8 MiB.

DENSE8, the steps of all n elements of w bytes, little-endian:

     0  u32 wide values v, at most n / 4; 0 when w = 1
     4  u32 size of the byte frame     8  u32 size of the wide frame
    12  byte frame     n bytes: the step s folded to 2 s, or -2 s - 1 when s < 0; 255 means "255 + next wide value", but
                       when w = 1 it means itself
        wide frame     v * w bytes: all lowest bytes, then all second lowest, ...

PLANES, the bytes of all elements by significance, highest first; for each of the w bytes of an element:

        u32 size s
        s bytes: the n bytes of the plane themselves when s = n, else (s < n) one zstandard frame of them

A frame is zstandard; an empty stream has an empty frame. Exponents compress, mantissas do not.
"""

import enum
import sys
from struct import Struct

import numpy as np

from heterorl.common.errors import MalformedPayload
from heterorl.common.weights.arena import IntArray
from heterorl.common.weights.sparse_codec import (
    ESCAPE,
    MAX_WIDE_SHARE,
    SCAN_ELEMENTS,
    StepReader,
    StepWriter,
    U8Array,
    UnsignedArray,
    changes,
    compress,
    count_changes,
    decompress,
    from_planes,
    to_planes,
)


class Method(enum.IntEnum):
    """Coding of a chunk; the numbers are part of the format."""

    SAME = 0
    GAPULP = 1
    DENSE8 = 3
    PLANES = 4
    RAW = 5
    STEP_RAW = 6


METHODS = frozenset(Method)
WHOLE_METHODS = frozenset({Method.PLANES, Method.RAW})
"""Methods that need no state before; the only ones in a snapshot."""
DENSE_SHARE = 0.6
"""Share of changed elements above which steps are coded densely."""


def encode_chunk(old: IntArray | None, new: IntArray) -> tuple[Method, bytes, int]:
    """Code a chunk against the state before, None without one.

    Returns (method, bytes, elements changed). The bytes are never more than the chunk's own.
    """
    if old is None:
        return *_whole(new), new.size
    best, num_changed = _steps(old, new)
    # Planes of weights save about a third; steps that save a half need no rival.
    if best is not None and len(best[1]) <= new.nbytes // 2:
        return *best, num_changed
    best = _smaller(_denser(best, old, new), _whole(new))
    return *best, num_changed


def encode_composed(values: IntArray, *, is_whole: bool) -> tuple[Method, bytes]:
    """Code a chunk that `apply_chunk` made from zeros.

    It is coded as steps, or as a state if `is_whole`: a whole method took part. The result depends on the values only:
    equal steps give equal bytes however deltas are composed. Where the direct difference is coded as steps, these are
    its bytes too. The bytes are never more than the chunk's own.
    """
    if is_whole:
        return _whole(values)
    best, _ = _steps(None, values)
    if best is None or len(best[1]) > values.nbytes // 2:
        best = _denser(best, None, values)
        if best is None or len(best[1]) > values.nbytes:
            best = (Method.STEP_RAW, _little(values).tobytes())
    return best


def apply_chunk(method: int, data: memoryview, chunk: IntArray) -> None:
    """Change `chunk` in place from the old state to the new.

    On MalformedPayload or LimitExceeded it is unchanged.
    """
    if method == Method.SAME:
        if len(data):
            raise MalformedPayload("a SAME chunk has bytes")
    elif method == Method.GAPULP:
        for index, step in StepReader(data, num_elements=chunk.size, dtype=chunk.dtype).blocks():
            # Positions ascend strictly, so plain addition (which wraps) touches each element once.
            chunk[index] += step
    elif method == Method.DENSE8:
        apply_dense(data, chunk)
    elif method == Method.PLANES:
        apply_planes(data, chunk)
    elif method in (Method.RAW, Method.STEP_RAW):
        if len(data) != chunk.nbytes:
            raise MalformedPayload(f"a {Method(method).name} chunk has {len(data)} bytes, not {chunk.nbytes}")
        values = np.frombuffer(data, chunk.dtype.newbyteorder("<"))
        if method == Method.RAW:
            chunk[:] = values
        else:
            chunk += values
    else:
        raise MalformedPayload(f"unknown method {method}")


def _steps(old: IntArray | None, new: IntArray) -> tuple[tuple[Method, bytes] | None, int]:
    """Steps as their density asks, and their number; None if too wide."""
    writer = StepWriter()
    for block in changes(old, new):
        writer.add(*block)
        if writer.num_wide > new.size // MAX_WIDE_SHARE:
            return None, count_changes(old, new)
        if writer.num_changed > DENSE_SHARE * new.size:
            del writer, block
            dense = encode_dense(old, new)
            return None if dense is None else (Method.DENSE8, dense), count_changes(old, new)
    if not writer.num_changed:
        return (Method.SAME, b""), 0
    return (Method.GAPULP, writer.finish()), writer.num_changed


def _denser(best: tuple[Method, bytes] | None, old: IntArray | None, new: IntArray) -> tuple[Method, bytes] | None:
    """Compare sparse steps that save little with DENSE8, if possible."""
    if best is None or best[0] is Method.DENSE8:
        return best
    dense = encode_dense(old, new)
    return best if dense is None else _smaller(best, (Method.DENSE8, dense))


def _whole(values: IntArray) -> tuple[Method, bytes]:
    planes = encode_planes(values)
    return (Method.PLANES, planes) if len(planes) <= values.nbytes else (Method.RAW, _little(values).tobytes())


def _smaller(one: tuple[Method, bytes] | None, other: tuple[Method, bytes]) -> tuple[Method, bytes]:
    return one if one is not None and len(one[1]) <= len(other[1]) else other


def _little(values: IntArray) -> IntArray:
    return values.astype(values.dtype.newbyteorder("<"), copy=False)


_HEADER = Struct("<3I")
_SIZE = Struct("<I")


def encode_dense(old: IntArray | None, new: IntArray) -> bytes | None:
    """Code the steps of all elements; None if too many are wide.

    Without `old`, `new` holds the steps.
    """
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
