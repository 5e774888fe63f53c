"""Changed elements of a chunk as positions and exact integer steps (method GAPULP): writing.

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
change costs about 7.6 bits for where and 1.8 bits for how much. A chunk is read in blocks that fit the cache, so
memory is the streams' own and a few blocks; heterorl.common.weights.step_reader undoes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct
from typing import Any

import numpy as np
import numpy.typing as npt

from heterorl.common.weights.arena import IntArray
from heterorl.common.weights.zstd_reader import compress

U8Array = npt.NDArray[np.uint8]
IndexArray = npt.NDArray[np.int64]
UnsignedArray = npt.NDArray[np.unsignedinteger[Any]]

HEADER = Struct("<8I")
ESCAPE = 255
SCAN_ELEMENTS = 1 << 17
"""Elements compared at once; their flags stay in the second-level cache."""
MAX_WIDE_SHARE = 4
"""An encoder codes no steps when more than one in so many elements takes a wide one: little is gained then."""
BATCH_CHANGES = 1 << 16
"""Changes turned into streams at once; calls cost little beside them."""


def changes(old: IntArray | None, new: IntArray) -> Iterator[tuple[int, IndexArray, IntArray]]:
    """Blocks of a chunk as (start, positions from there, steps), ascending; without `old`, `new` holds the steps."""
    for start in range(0, new.size, SCAN_ELEMENTS):
        after = new[start : start + SCAN_ELEMENTS]
        if old is None:
            index = np.flatnonzero(after != 0)
            step: IntArray = after[index]
        else:
            before = old[start : start + SCAN_ELEMENTS]
            index = np.flatnonzero(before != after)
            step = after[index]
            step -= before[index]
        if index.size:
            yield start, index, step


def count_changes(old: IntArray | None, new: IntArray) -> int:
    """Number of changed elements, in the memory of one block."""
    total = 0
    for start in range(0, new.size, SCAN_ELEMENTS):
        after = new[start : start + SCAN_ELEMENTS]
        total += int(np.count_nonzero(after if old is None else old[start : start + SCAN_ELEMENTS] != after))
    return total


class StepWriter:
    """Collects changes in ascending order, then gives the bytes; the bytes depend on the changes alone."""

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
        """Add the elements at `start + index` and their steps, none of them 0."""
        # Positions in 4 bytes: a chunk has fewer than 2^31 elements.
        narrow = index.astype(np.int32)
        narrow += np.int32(start)
        self._pending.append((narrow, step))
        self._num_pending += index.size
        self.num_changed += index.size
        if self._num_pending >= BATCH_CHANGES:
            self._flush(is_last=False)

    def finish(self) -> bytes:
        """The bytes of all changes, at least one."""
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
    """Four 2-bit codes to a byte, low bits first; the last byte is filled with zeros."""
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
    # Where the gap itself goes: after the escapes of all before it and its own.
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
