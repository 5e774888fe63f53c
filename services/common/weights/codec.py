"""One chunk of weights as bytes: exact, canonical, without a Python loop over elements.

    SAME    empty: no element changed.
    GAPULP  changed elements by position and integer step (new bits - old bits, wrapping):
              u32 num_changed, u32 num_gap_bytes, u32 num_escapes, then u32 sizes of the three zstd frames, then
              gap frame        gaps to the previous changed element minus one; 255 means "add 255 and go on"
              sign bits        packed, 1 = negative, ceil(num_changed / 8) bytes, not compressed
              magnitude frame  |step| - 1 in 2 bits, four a byte, low bits first; 3 means "3 + next escape"
              escape frame     u32 each: |step| - 4
    PLANES  byte planes of all elements, high byte first: per plane u32 size, then a zstd frame, or the bytes
            themselves when the size equals the number of elements (zstd never helps the mantissa).
    RAW     little-endian integers.

All integers are little-endian. Decoding checks every size before it allocates and every index before it writes.
"""

from __future__ import annotations

import enum
import struct

import numpy as np
import numpy.typing as npt

from services.common.errors import MalformedPayload
from services.common.weights.arena import IntArray
from services.common.weights.zstd_reader import compress, decompress

_HEADER = struct.Struct("<6I")
_SIZE = struct.Struct("<I")
_GAP_ESCAPE = 255
U8Array = npt.NDArray[np.uint8]
I64Array = npt.NDArray[np.int64]


class Method(enum.IntEnum):
    """How a chunk is coded; the numbers are part of the format."""

    SAME = 0
    GAPULP = 1
    PLANES = 4
    RAW = 5


def encode_chunk(old: IntArray | None, new: IntArray) -> tuple[Method, bytes, int]:
    """Code a chunk against the state before (None: no such state); returns (method, bytes, elements changed)."""
    num_changed = new.size
    candidates: list[tuple[Method, bytes]] = []
    if old is not None:
        index = np.flatnonzero(old != new)
        num_changed = index.size
        if num_changed == 0:
            return Method.SAME, b"", 0
        candidates.append((Method.GAPULP, _encode_steps(old, new, index)))
    # A dense state costs at least about 1.3x less than its size in planes; below that no attempt is worth its time.
    if not candidates or len(candidates[0][1]) > new.nbytes // 2:
        candidates += [(Method.PLANES, _encode_planes(new)), (Method.RAW, _raw(new))]
    method, data = min(candidates, key=lambda candidate: len(candidate[1]))
    return method, data, num_changed


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
        index, step = _decode_steps(data, chunk)
        # Indices are strictly increasing, so plain addition (which wraps) touches each element once.
        chunk[index] += step
    elif method == Method.PLANES:
        chunk[:] = _decode_planes(data, chunk)
    elif method == Method.RAW:
        if len(data) != chunk.nbytes:
            raise MalformedPayload(f"a RAW chunk has {len(data)} bytes, not {chunk.nbytes}")
        chunk[:] = np.frombuffer(data, chunk.dtype.newbyteorder("<"))
    else:
        raise MalformedPayload(f"unknown method {method}")


def _raw(new: IntArray) -> bytes:
    return new.astype(new.dtype.newbyteorder("<"), copy=False).tobytes()


def _encode_steps(old: IntArray, new: IntArray, index: I64Array) -> bytes:
    step = new[index] - old[index]
    # int64: the most negative step has no positive twin in its own width.
    rest = np.abs(step.astype(np.int64)) - 1
    gaps = _encode_gaps(index)
    codes = np.minimum(rest, 3).astype(np.uint8)
    escapes = (rest[rest >= 3] - 3).astype("<u4")
    padded = np.zeros((codes.size + 3) // 4 * 4, np.uint8)
    padded[: codes.size] = codes
    quads = padded.reshape(-1, 4)
    packed = quads[:, 0] | (quads[:, 1] << 2) | (quads[:, 2] << 4) | (quads[:, 3] << 6)
    frames = [compress(gaps.data), compress(np.ascontiguousarray(packed).data), compress(escapes.tobytes())]
    header = _HEADER.pack(index.size, gaps.size, escapes.size, *(len(frame) for frame in frames))
    return b"".join([header, frames[0], np.packbits(step < 0).tobytes(), frames[1], frames[2]])


def _decode_steps(data: memoryview, chunk: IntArray) -> tuple[I64Array, IntArray]:
    if len(data) < _HEADER.size:
        raise MalformedPayload("a GAPULP chunk is shorter than its header")
    num_changed, num_gaps, num_escapes, *sizes = _HEADER.unpack_from(data)
    num_signs = (num_changed + 7) // 8
    # Each escape byte of a gap skips 255 elements, so their number is bounded by the chunk's size.
    if not 0 < num_changed <= chunk.size or num_escapes > num_changed:
        raise MalformedPayload(f"{num_changed} changes and {num_escapes} escapes in {chunk.size} elements")
    if not num_changed <= num_gaps <= num_changed + chunk.size // _GAP_ESCAPE:
        raise MalformedPayload(f"{num_gaps} gap bytes for {num_changed} changes")
    if _HEADER.size + sum(sizes) + num_signs != len(data):
        raise MalformedPayload("the streams of a GAPULP chunk do not add up")
    position = _HEADER.size
    gap_frame, position = data[position : position + sizes[0]], position + sizes[0]
    sign_bits, position = data[position : position + num_signs], position + num_signs
    code_frame, position = data[position : position + sizes[1]], position + sizes[1]
    gaps = np.frombuffer(decompress(gap_frame, num_bytes=num_gaps), np.uint8)
    packed = np.frombuffer(decompress(code_frame, num_bytes=(num_changed + 3) // 4), np.uint8)
    escapes = np.frombuffer(decompress(data[position:], num_bytes=4 * num_escapes), "<u4")
    index = _decode_gaps(gaps)
    if index.size != num_changed or index[-1] >= chunk.size:
        raise MalformedPayload("positions leave the chunk")
    quads = np.stack([packed & 3, (packed >> 2) & 3, (packed >> 4) & 3, packed >> 6], axis=1).reshape(-1)
    if quads[num_changed:].any():
        raise MalformedPayload("bits after the last magnitude")
    magnitude = quads[:num_changed].astype(np.int64)
    escaped = magnitude == 3
    if int(np.count_nonzero(escaped)) != num_escapes:
        raise MalformedPayload("escapes and magnitudes disagree")
    magnitude[escaped] += escapes
    magnitude += 1
    signs = np.unpackbits(np.frombuffer(sign_bits, np.uint8))
    if signs[num_changed:].any():
        raise MalformedPayload("bits after the last sign")
    negative = signs[:num_changed].astype(bool)
    bits = 8 * chunk.itemsize
    if (magnitude > (1 << (bits - 1)) - 1 + negative).any():
        raise MalformedPayload("a step leaves its width")
    return index, np.where(negative, -magnitude, magnitude).astype(chunk.dtype)


def _encode_gaps(index: I64Array) -> U8Array:
    gaps = np.diff(index, prepend=-1) - 1
    num_escapes = gaps // _GAP_ESCAPE
    if not num_escapes.any():
        return gaps.astype(np.uint8)
    out = np.full(gaps.size + int(num_escapes.sum()), _GAP_ESCAPE, np.uint8)
    out[np.cumsum(num_escapes) + np.arange(gaps.size)] = gaps - num_escapes * _GAP_ESCAPE
    return out


def _decode_gaps(gaps: U8Array) -> I64Array:
    last = np.flatnonzero(gaps != _GAP_ESCAPE)
    if gaps[-1] == _GAP_ESCAPE:
        raise MalformedPayload("the last gap does not end")
    index: I64Array = np.cumsum(gaps, dtype=np.int64)[last] + np.arange(last.size)
    return index


def _encode_planes(new: IntArray) -> bytes:
    planes = new.astype(new.dtype.newbyteorder("<"), copy=False).view(np.uint8).reshape(-1, new.itemsize)
    parts: list[bytes] = []
    for column in reversed(range(new.itemsize)):
        plane = np.ascontiguousarray(planes[:, column])
        frame = compress(plane.data)
        data = frame if len(frame) < plane.size else plane.tobytes()
        parts += [_SIZE.pack(len(data)), data]
    return b"".join(parts)


def _decode_planes(data: memoryview, chunk: IntArray) -> IntArray:
    planes = np.empty((chunk.size, chunk.itemsize), np.uint8)
    position = 0
    for column in reversed(range(chunk.itemsize)):
        if position + _SIZE.size > len(data):
            raise MalformedPayload("a plane has no size")
        (size,) = _SIZE.unpack_from(data, position)
        position += _SIZE.size
        if size > chunk.size or position + size > len(data):
            raise MalformedPayload("a plane is longer than its chunk")
        plane = data[position : position + size]
        position += size
        content = bytes(plane) if size == chunk.size else decompress(plane, num_bytes=chunk.size)
        planes[:, column] = np.frombuffer(content, np.uint8)
    if position != len(data):
        raise MalformedPayload("bytes after the last plane")
    values: IntArray = planes.reshape(-1).view(chunk.dtype.newbyteorder("<")).astype(chunk.dtype, copy=False)
    return values
