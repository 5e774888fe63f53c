"""Changed elements of a chunk as positions and exact integer steps (method GAPULP).

A step is new bits - old bits, wrapping in the element's width w bytes; it is never 0. Layout, little-endian:

     0  u32 number of changed elements k, 1 <= k <= elements of the chunk
     4  u32 gap bytes g      8  u32 escapes e     12  u32 wide escapes v
    16  u32 size of the gap frame       20  of the code frame
    24  u32 size of the escape frame    28  of the wide frame
    32  gap frame       g bytes: elements since the previous changed one, less 1; 255 means "255, and go on"
        signs           ceil(k / 8) bytes as they are: 1 bit an element, high bit first, 1 = negative, then zeros
        code frame      ceil(k / 4) bytes: |step| - 1 in 2 bits, low bits first, then zeros; 3 means "3 + next escape"
        escape frame    e bytes; 255 means "255 + next wide escape"
        wide frame      v * w bytes: all lowest bytes, then all second lowest, ...

A frame is zstandard, or nothing when its stream is empty. At learning rates of RL almost all steps are +-1, so a
change costs about 7.6 bits for where and 1.8 bits for how much. Decoding checks every size before it allocates and
every position before the caller writes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from services.common.errors import MalformedPayload
from services.common.weights.arena import IntArray
from services.common.weights.zstd_reader import compress, decompress

U8Array = npt.NDArray[np.uint8]
IndexArray = npt.NDArray[np.int64]
UnsignedArray = npt.NDArray[np.unsignedinteger[Any]]
UnsignedType = np.dtype[np.unsignedinteger[Any]]

_HEADER = struct.Struct("<8I")
_ESCAPE = 255
_BYTE = np.arange(256, dtype=np.uint8)
# One uint32 for each byte: the four 2-bit codes in it as four bytes.
_FOUR_CODES = np.stack([_BYTE & 3, (_BYTE >> 2) & 3, (_BYTE >> 4) & 3, _BYTE >> 6], axis=1).copy().view(np.uint32)[:, 0]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Magnitudes:
    """|step| - 1 in three streams, each holding what the one before could not."""

    codes: U8Array
    escapes: U8Array
    wide: UnsignedArray


def encode_steps(old: IntArray, new: IntArray, index: IndexArray) -> bytes:
    """Code the elements at `index`, ascending and not empty, where `old` and `new` differ."""
    return encode_differences(new[index] - old[index], index)


def encode_differences(step: IntArray, index: IndexArray) -> bytes:
    """Code steps, none of them 0, of the elements at `index`, ascending and not empty."""
    gaps = _encode_gaps(index)
    # The most negative step is its own absolute value; read without a sign it is right.
    magnitudes = _split_magnitudes(np.abs(step).view(_unsigned(step)))
    frames = [
        compress(gaps.data),
        compress(_pack_codes(magnitudes.codes).data),
        compress(magnitudes.escapes.data),
        compress(_to_planes(magnitudes.wide)),
    ]
    header = _HEADER.pack(
        index.size, gaps.size, magnitudes.escapes.size, magnitudes.wide.size, *(len(frame) for frame in frames)
    )
    return b"".join([header, frames[0], np.packbits(step < 0).tobytes(), *frames[1:]])


def decode_steps(data: memoryview, chunk: IntArray) -> tuple[IndexArray, IntArray]:
    """Positions, strictly ascending inside `chunk`, and the step of each.

    Raises:
        MalformedPayload: the bytes break the format.
        LimitExceeded: a frame states another size than the header.
    """
    if len(data) < _HEADER.size:
        raise MalformedPayload("a GAPULP chunk is shorter than its header")
    num_changed, num_gaps, num_escapes, num_wide, *sizes = _HEADER.unpack_from(data)
    if not 0 < num_changed <= chunk.size or not num_wide <= num_escapes <= num_changed:
        raise MalformedPayload(f"{num_changed}, {num_escapes}, {num_wide} steps in a chunk of {chunk.size} elements")
    # A 255 skips 255 elements of the chunk, which bounds how many there can be.
    if not num_changed <= num_gaps <= num_changed + chunk.size // _ESCAPE:
        raise MalformedPayload(f"{num_gaps} gap bytes for {num_changed} changes")
    sizes.insert(1, (num_changed + 7) // 8)
    if _HEADER.size + sum(sizes) != len(data):
        raise MalformedPayload("the streams of a GAPULP chunk do not add up")
    parts: list[memoryview] = []
    position = _HEADER.size
    for size in sizes:
        parts.append(data[position : position + size])
        position += size
    gap_frame, sign_bits, code_frame, escape_frame, wide_frame = parts
    index = _decode_gaps(np.frombuffer(decompress(gap_frame, num_bytes=num_gaps), np.uint8), num_changed, chunk.size)
    signs = np.unpackbits(np.frombuffer(sign_bits, np.uint8))
    if signs[num_changed:].any():
        raise MalformedPayload("bits after the last sign")
    magnitudes = _Magnitudes(
        codes=_unpack_codes(decompress(code_frame, num_bytes=(num_changed + 3) // 4), num_changed),
        escapes=np.frombuffer(decompress(escape_frame, num_bytes=num_escapes), np.uint8),
        wide=_from_planes(decompress(wide_frame, num_bytes=num_wide * chunk.itemsize), _unsigned(chunk)),
    )
    return index, _join_magnitudes(magnitudes, signs[:num_changed], chunk)


def _unsigned(values: IntArray) -> UnsignedType:
    return np.dtype(np.uint16) if values.itemsize == 2 else np.dtype(np.uint32)


def _encode_gaps(index: IndexArray) -> U8Array:
    gaps = np.diff(index, prepend=-1)
    gaps -= 1
    long = np.flatnonzero(gaps >= _ESCAPE)
    if not long.size:
        return gaps.astype(np.uint8)
    num_escapes = np.zeros(gaps.size, np.int64)
    num_escapes[long] = gaps[long] // _ESCAPE
    gaps[long] %= _ESCAPE
    last = np.cumsum(num_escapes)
    last += np.arange(gaps.size)
    coded = np.full(int(last[-1]) + 1, _ESCAPE, np.uint8)
    coded[last] = gaps
    return coded


def _decode_gaps(coded: U8Array, num_changed: int, num_elements: int) -> IndexArray:
    last = np.flatnonzero(coded != _ESCAPE)
    if last.size != num_changed or last[-1] != coded.size - 1:
        raise MalformedPayload(f"{last.size} gaps for {num_changed} changes, or an open end")
    index: IndexArray = np.cumsum(coded, dtype=np.int64)
    if last.size != coded.size:
        index = index[last]
    index += np.arange(num_changed)
    if index[-1] >= num_elements:
        raise MalformedPayload(f"position {index[-1]} in a chunk of {num_elements} elements")
    return index


def _split_magnitudes(magnitude: UnsignedArray) -> _Magnitudes:
    rest = magnitude - 1
    codes = np.minimum(rest, 3).astype(np.uint8)
    escaped = rest[codes == 3] - 3
    return _Magnitudes(
        codes=codes,
        escapes=np.minimum(escaped, _ESCAPE).astype(np.uint8),
        wide=escaped[escaped >= _ESCAPE] - _ESCAPE,
    )


def _join_magnitudes(magnitudes: _Magnitudes, signs: U8Array, chunk: IntArray) -> IntArray:
    unsigned = _unsigned(chunk)
    escaped = np.flatnonzero(magnitudes.codes == 3)
    wide = np.flatnonzero(magnitudes.escapes == _ESCAPE)
    if (escaped.size, wide.size) != (magnitudes.escapes.size, magnitudes.wide.size):
        raise MalformedPayload("magnitudes and escapes disagree")
    # The largest step, 2^(bits - 1), goes down only; a larger one, or this one upwards, would wrap into another step.
    largest = 1 << (8 * chunk.itemsize - 1)
    largest_wide = largest - 1 - 3 - _ESCAPE
    if (magnitudes.wide > largest_wide).any():
        raise MalformedPayload("a step leaves its width")
    escapes = magnitudes.escapes.astype(unsigned)
    escapes[wide] += magnitudes.wide
    magnitude = magnitudes.codes.astype(unsigned)
    magnitude[escaped] += escapes
    magnitude += np.uint8(1)
    if (magnitudes.wide == largest_wide).any() and (magnitude[signs == 0] == largest).any():
        raise MalformedPayload("a step upwards leaves its width")
    step: IntArray = magnitude.view(chunk.dtype)
    # Two's complement without a branch: -x = (x ^ -1) + 1.
    sign = signs.astype(chunk.dtype)
    step ^= -sign
    step += sign
    return step


def _pack_codes(codes: U8Array) -> U8Array:
    padded = np.zeros((codes.size + 3) // 4 * 4, np.uint8)
    padded[: codes.size] = codes
    # Byte j of a word holds code j; shifting by 6 j brings it to bit 2 j of the lowest byte, which the cast keeps.
    words = padded.view("<u4")
    packed: U8Array = (words | words >> 6 | words >> 12 | words >> 18).astype(np.uint8)
    return packed


def _unpack_codes(packed: bytes, num_changed: int) -> U8Array:
    codes: U8Array = _FOUR_CODES[np.frombuffer(packed, np.uint8)].view(np.uint8)
    if codes[num_changed:].any():
        raise MalformedPayload("bits after the last magnitude")
    return codes[:num_changed]


def _to_planes(values: UnsignedArray) -> bytes:
    little = values.astype(values.dtype.newbyteorder("<"), copy=False)
    return little.view(np.uint8).reshape(-1, values.itemsize).T.tobytes()


def _from_planes(data: bytes, unsigned: UnsignedType) -> UnsignedArray:
    planes = np.frombuffer(data, np.uint8).reshape(unsigned.itemsize, -1)
    little: UnsignedArray = np.ascontiguousarray(planes.T).reshape(-1).view(unsigned.newbyteorder("<"))
    return little.astype(unsigned, copy=False)
