"""Codec of sparse changes (GAPULP): positions and exact integer steps; zstandard frames.

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

A frame is zstandard; an empty stream has an empty frame. At learning rates of RL almost all steps are +-1, so a
change costs about 7.6 bits for where and 1.8 bits for how much. A chunk is read in blocks that fit the cache, so
memory is the streams' own and a few blocks.
"""

import threading
from collections.abc import Iterator
from struct import Struct
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from heterorl.common.errors import LimitExceeded, MalformedPayload
from heterorl.common.weights.arena import IntArray

MAX_WINDOW_BYTES = 8 << 20


class _Contexts(threading.local):
    """Zstandard contexts of one thread: slow to make, and not shareable."""

    def __init__(self) -> None:
        # Only the entropy coder matters here, so levels above 1 do not make frames smaller.
        self.compressor = zstandard.ZstdCompressor(level=1, write_content_size=True)
        self.decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)


_contexts = _Contexts()


def compress(data: bytes | memoryview) -> bytes:
    """One zstandard frame that states its size; empty for no bytes."""
    if not len(data):
        return b""
    return bytes(_contexts.compressor.compress(data))


def decompress(data: bytes | memoryview, *, num_bytes: int) -> bytes:
    """Undo `compress`, allocating at most `num_bytes` and a window.

    The library bounds only frames that state their size. A frame without one grows with its blocks: 64 KiB can become 2
    GiB in one call. A stated size is allocated unchecked, and a second frame is dropped silently. So a frame must state
    exactly `num_bytes`, which the caller has checked, ask for no large window, and be the only one.

    Raises:
        LimitExceeded: the frame states another size, none, or too large a window.
        MalformedPayload: not exactly one complete frame.
    """
    if num_bytes == 0:
        if len(data):
            raise MalformedPayload(f"{len(data)} bytes stand for an empty zstd stream")
        return b""
    try:
        frame = zstandard.get_frame_parameters(data)
        if frame.content_size != num_bytes:
            raise LimitExceeded(f"a zstd frame states {frame.content_size} bytes, {num_bytes} are expected")
        if frame.window_size > MAX_WINDOW_BYTES:
            raise LimitExceeded(f"a zstd frame asks for a window of {frame.window_size} bytes")
        # Bounded now: the library allocates the stated size and refuses blocks that do not fill it exactly.
        return bytes(_contexts.decompressor.decompress(data, allow_extra_data=False))
    except zstandard.ZstdError as error:
        raise MalformedPayload(f"zstd: {error}") from error


U8Array = npt.NDArray[np.uint8]
IndexArray = npt.NDArray[np.int64]
UnsignedArray = npt.NDArray[np.unsignedinteger[Any]]
HEADER = Struct("<8I")
ESCAPE = 255
SCAN_ELEMENTS = 1 << 17
"""Elements compared at once; their flags stay in the second-level cache."""
SPARSE_ELEMENTS = 1 << 20
"""Elements compared at once where at most one in 16 has changed: threads wait for the interpreter between calls."""
MAX_WIDE_SHARE = 4
"""If more than one in so many elements needs a wide step, steps save too little."""
BATCH_CHANGES = 1 << 16
"""Changes coded at once, so that call overhead does not count."""


def changes(old: IntArray | None, new: IntArray) -> Iterator[tuple[int, IndexArray, IntArray]]:
    """Blocks of changes in a chunk, ascending: (start, positions, steps).

    Positions count from start. Without `old`, `new` holds the steps.
    """
    start, size = 0, SCAN_ELEMENTS
    while start < new.size:
        after = new[start : start + size]
        if old is None:
            index = np.flatnonzero(after != 0)
            step: IntArray = after[index]
        else:
            before = old[start : start + size]
            index = np.flatnonzero(before != after)
            step = after[index]
            step -= before[index]
        if index.size:
            yield start, index, step
        start += after.size
        size = SPARSE_ELEMENTS if 16 * index.size <= after.size else SCAN_ELEMENTS


def count_changes(old: IntArray | None, new: IntArray) -> int:
    """Number of changed elements, in the memory of one block."""
    total = 0
    for start in range(0, new.size, SCAN_ELEMENTS):
        after = new[start : start + SCAN_ELEMENTS]
        total += int(np.count_nonzero(after if old is None else old[start : start + SCAN_ELEMENTS] != after))
    return total


class StepWriter:
    """Collects changes in ascending order; the bytes depend on them only."""

    def __init__(self) -> None:
        self.num_changed = 0
        self.num_wide = 0
        self._pending: list[tuple[npt.NDArray[np.int32], IntArray]] = []
        self._num_pending = 0
        self._last = -1
        self._gaps: list[U8Array] = []
        self._signs: list[U8Array] = []
        self._codes: list[U8Array] = []
        self._escapes: list[U8Array] = []
        self._wide: list[UnsignedArray] = []

    def add(self, start: int, index: IndexArray, step: IntArray) -> None:
        """Add the steps of elements at `start + index`; none is 0."""
        # Positions in 4 bytes: a chunk has fewer than 2^31 elements.
        narrow = index.astype(np.int32)
        narrow += np.int32(start)
        self._pending.append((narrow, step))
        self._num_pending += index.size
        self.num_changed += index.size
        if self._num_pending >= BATCH_CHANGES:
            self._flush(is_last=False)

    def finish(self) -> bytes:
        self._flush(is_last=True)
        num_gaps, num_escapes = (sum(part.size for part in parts) for parts in (self._gaps, self._escapes))
        # One stream after another, each given up once it is compressed.
        gaps = compress(_joined(self._gaps).data)
        codes = compress(_joined(self._codes).data)
        escapes = compress(_joined(self._escapes).data)
        wide = compress(to_planes(_joined(self._wide)))
        sizes = (len(frame) for frame in (gaps, codes, escapes, wide))
        header = HEADER.pack(self.num_changed, num_gaps, num_escapes, self.num_wide, *sizes)
        return b"".join([header, gaps, *(signs.data for signs in self._signs), codes, escapes, wide])

    def _flush(self, *, is_last: bool) -> None:
        if not self._pending:
            return
        index = np.concatenate([part for part, _ in self._pending])
        step = np.concatenate([part for _, part in self._pending])
        # Signs and codes fill whole bytes until the last batch.
        cut = index.size if is_last else index.size // 8 * 8
        self._pending = [(index[cut:], step[cut:])] if cut < index.size else []
        self._num_pending = index.size - cut
        index, step = index[:cut], step[:cut]
        self._gaps.append(_encode_gaps(index, self._last))
        self._last = int(index[-1])
        self._signs.append(np.packbits(step < 0))
        # The most negative step is its own absolute value; read without a sign it is right.
        rest: UnsignedArray = np.abs(step).view(f"u{step.itemsize}")
        rest -= np.uint8(1)
        codes = np.minimum(rest, 3).astype(np.uint8)
        self._codes.append(pack_codes(codes))
        escaped = rest[codes == 3] - np.uint8(3)
        if escaped.size:
            self._escapes.append(np.minimum(escaped, ESCAPE).astype(np.uint8))
            self._wide.append(escaped[escaped >= ESCAPE] - np.uint8(ESCAPE))
            self.num_wide += self._wide[-1].size


def to_planes(values: UnsignedArray) -> bytes:
    """All lowest bytes, then all second lowest, ..."""
    little = values.astype(values.dtype.newbyteorder("<"), copy=False)
    return little.view(np.uint8).reshape(-1, values.itemsize).T.tobytes()


def pack_codes(codes: U8Array) -> U8Array:
    """Pack four 2-bit codes a byte, low bits first, padded with zeros."""
    if codes.size % 4:
        codes = np.concatenate([codes, np.zeros(-codes.size % 4, np.uint8)])
    # Byte j of a word holds code j; shifting by 6 j brings it to bit 2 j of the lowest byte, which the cast keeps.
    words = codes.view("<u4")
    packed: U8Array = (words | words >> 6 | words >> 12 | words >> 18).astype(np.uint8)
    return packed


def _encode_gaps(index: npt.NDArray[np.int32], last: int) -> U8Array:
    gaps = np.empty_like(index)
    gaps[0] = index[0] - last
    np.subtract(index[1:], index[:-1], out=gaps[1:])
    gaps -= 1
    long = np.flatnonzero(gaps >= ESCAPE)
    if not long.size:
        return gaps.astype(np.uint8)
    num_escapes = gaps[long] // ESCAPE
    gaps[long] -= num_escapes * ESCAPE
    # The place of the gap itself: after the escapes of all before it and its own.
    place = np.zeros(gaps.size, np.int64)
    place[long] = num_escapes
    np.cumsum(place, out=place)
    place += np.arange(gaps.size)
    coded = np.full(int(place[-1]) + 1, ESCAPE, np.uint8)
    coded[place] = gaps
    return coded


def _joined(parts: list[Any]) -> Any:
    joined = parts[0] if len(parts) == 1 else np.concatenate(parts) if parts else np.empty(0, np.uint8)
    parts.clear()
    return joined


_BYTE = np.arange(256, dtype=np.uint8)
# One uint32 for each byte: the four 2-bit codes in it as four bytes.
_FOUR_CODES = np.stack([_BYTE & 3, (_BYTE >> 2) & 3, (_BYTE >> 4) & 3, _BYTE >> 6], axis=1).copy().view(np.uint32)[:, 0]
_THREES = (_FOUR_CODES.view(np.uint8).reshape(-1, 4) == 3).sum(axis=1).astype(np.uint8)


class StepReader:
    """The changes of one chunk, or of `num_elements` places of it.

    `blocks` can be walked more than once. Everything is checked before the first element is returned. Sizes are checked
    against the chunk before an allocation; the sum of the gaps, which is the last position, before any position is
    made. Memory is the decoded streams, a few bytes a change, and one block of changes.

    Raises (in the constructor):
        MalformedPayload: the bytes break the format.
        LimitExceeded: a frame states another size than the header.
    """

    def __init__(self, data: memoryview, *, num_elements: int, dtype: np.dtype[np.signedinteger]) -> None:
        if len(data) < HEADER.size:
            raise MalformedPayload("a GAPULP chunk is shorter than its header")
        num_changed, num_gaps, num_escapes, num_wide, *sizes = HEADER.unpack_from(data)
        if not 0 < num_changed <= num_elements or not num_wide <= num_escapes <= num_changed:
            raise MalformedPayload(
                f"{num_changed}, {num_escapes}, {num_wide} steps in a chunk of {num_elements} elements"
            )
        # A 255 skips 255 elements of the chunk, which bounds how many there can be.
        if not num_changed <= num_gaps <= num_changed + num_elements // ESCAPE:
            raise MalformedPayload(f"{num_gaps} gap bytes for {num_changed} changes")
        sizes.insert(1, (num_changed + 7) // 8)
        if HEADER.size + sum(sizes) != len(data):
            raise MalformedPayload("the streams of a GAPULP chunk do not add up")
        parts: list[memoryview] = []
        position = HEADER.size
        for size in sizes:
            parts.append(data[position : position + size])
            position += size
        self.num_changed: int = num_changed
        self._dtype = dtype.newbyteorder("=")
        self._unsigned: np.dtype[np.unsignedinteger] = np.dtype(f"u{dtype.itemsize}")
        self._gaps = np.frombuffer(decompress(parts[0], num_bytes=num_gaps), np.uint8)
        self._signs = np.frombuffer(parts[1], np.uint8)
        self._codes = np.frombuffer(decompress(parts[2], num_bytes=(num_changed + 3) // 4), np.uint8)
        self._escapes = np.frombuffer(decompress(parts[3], num_bytes=num_escapes), np.uint8)
        self._wide = from_planes(decompress(parts[4], num_bytes=num_wide * dtype.itemsize), self._unsigned)
        self._check_positions(num_elements)
        self._check_values()

    def blocks(self) -> Iterator[tuple[IndexArray, IntArray]]:
        """Strictly ascending positions with their steps, some ten thousand at a time."""
        position = place = num_escapes = num_wide = 0
        for begin in range(0, self._gaps.size, BATCH_CHANGES):
            coded = self._gaps[begin : begin + BATCH_CHANGES]
            index: IndexArray = np.cumsum(coded, dtype=np.int64)
            total = int(index[-1])
            if self._gaps.size != self.num_changed:
                index = index[coded != ESCAPE]
            count = index.size
            index += np.arange(position + place, position + place + count)
            codes = self._codes_between(place, place + count)
            escaped = np.flatnonzero(codes == 3)
            magnitude: UnsignedArray = codes.astype(self._unsigned)
            if escaped.size:
                escapes = self._escapes[num_escapes : num_escapes + escaped.size].astype(self._unsigned)
                num_escapes += escaped.size
                if self._wide.size:
                    wide = np.flatnonzero(escapes == ESCAPE)
                    escapes[wide] += self._wide[num_wide : num_wide + wide.size]
                    num_wide += wide.size
                magnitude[escaped] += escapes
            magnitude += np.uint8(1)
            step: IntArray = magnitude.view(self._dtype)
            # Two's complement without a branch: -x = (x ^ -1) + 1.
            sign = self._signs_between(place, place + count).astype(self._dtype)
            np.negative(sign, out=sign)
            step ^= sign
            step -= sign
            yield index, step
            position += total
            place += count

    def _codes_between(self, start: int, stop: int) -> U8Array:
        codes: U8Array = _FOUR_CODES[self._codes[start // 4 : (stop + 3) // 4]].view(np.uint8)
        return codes[start % 4 : start % 4 + stop - start]

    def _signs_between(self, start: int, stop: int) -> U8Array:
        return np.unpackbits(self._signs[start // 8 : (stop + 7) // 8])[start % 8 : start % 8 + stop - start]

    def _check_positions(self, num_elements: int) -> None:
        num_open = int(np.count_nonzero(self._gaps == ESCAPE))
        if self._gaps.size - num_open != self.num_changed or self._gaps[-1] == ESCAPE:
            raise MalformedPayload(f"{self._gaps.size - num_open} gaps for {self.num_changed} changes, or an open end")
        last = int(self._gaps.sum(dtype=np.int64)) + self.num_changed - 1
        # Positions ascend, so the last one bounds all.
        if last >= num_elements:
            raise MalformedPayload(f"position {last} in a chunk of {num_elements} elements")

    def _check_values(self) -> None:
        if self.num_changed % 8 and self._signs[-1] & (0xFF >> self.num_changed % 8):
            raise MalformedPayload("bits after the last sign")
        if self.num_changed % 4 and self._codes[-1] >> (2 * (self.num_changed % 4)):
            raise MalformedPayload("bits after the last magnitude")
        num_escapes = int(_THREES[self._codes].sum(dtype=np.int64))
        num_wide = int(np.count_nonzero(self._escapes == ESCAPE)) if self._unsigned.itemsize > 1 else 0
        if (num_escapes, num_wide) != (self._escapes.size, self._wide.size):
            raise MalformedPayload("magnitudes and escapes disagree")
        # The largest step, 2^(bits - 1), goes down only; a larger one, or this one upwards, would wrap into another.
        largest = (1 << (8 * self._unsigned.itemsize - 1)) - 1 - 3
        rests, bound = (self._escapes, largest) if self._unsigned.itemsize == 1 else (self._wide, largest - ESCAPE)
        most = int(rests.max(initial=0))
        if most > bound:
            raise MalformedPayload("a step leaves its width")
        place = 0
        for index, step in self.blocks() if most == bound else ():
            is_up = self._signs_between(place, place + index.size) == 0
            if (step[is_up] == np.iinfo(self._dtype).min).any():
                raise MalformedPayload("a step upwards leaves its width")
            place += index.size


def from_planes(data: bytes, unsigned: np.dtype[np.unsignedinteger]) -> UnsignedArray:
    """Undo `to_planes`."""
    planes = np.frombuffer(data, np.uint8).reshape(unsigned.itemsize, -1)
    little: UnsignedArray = np.ascontiguousarray(planes.T).reshape(-1).view(unsigned.newbyteorder("<"))
    return little.astype(unsigned, copy=False)
