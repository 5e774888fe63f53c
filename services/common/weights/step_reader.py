"""Reading what heterorl.common.weights.steps wrote: everything is checked before the first element is given out.

Sizes are held against the chunk before anything is allocated; the sum of the gaps, which is the last position, before
any position is made. Memory is the decoded streams, at most a few bytes a change, and one block of changes.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from heterorl.common.errors import MalformedPayload
from heterorl.common.weights.arena import IntArray
from heterorl.common.weights.steps import BATCH_CHANGES, ESCAPE, HEADER, IndexArray, U8Array, UnsignedArray
from heterorl.common.weights.zstd_reader import decompress

_BYTE = np.arange(256, dtype=np.uint8)
# One uint32 for each byte: the four 2-bit codes in it as four bytes.
_FOUR_CODES = np.stack([_BYTE & 3, (_BYTE >> 2) & 3, (_BYTE >> 4) & 3, _BYTE >> 6], axis=1).copy().view(np.uint32)[:, 0]
_THREES = (_FOUR_CODES.view(np.uint8).reshape(-1, 4) == 3).sum(axis=1).astype(np.uint8)


class StepReader:
    """The changes of one chunk, or of `num_elements` places of it; `blocks` can be walked more than once.

    Raises (when made):
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
        """Positions, strictly ascending, and the step of each, some ten thousand at a time."""
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
        if most == bound:
            self._check_largest()

    def _check_largest(self) -> None:
        lowest = np.iinfo(self._dtype).min
        place = 0
        for index, step in self.blocks():
            is_up = self._signs_between(place, place + index.size) == 0
            if (step[is_up] == lowest).any():
                raise MalformedPayload("a step upwards leaves its width")
            place += index.size


def from_planes(data: bytes, unsigned: np.dtype[np.unsignedinteger]) -> UnsignedArray:
    """Undo `steps.to_planes`."""
    planes = np.frombuffer(data, np.uint8).reshape(unsigned.itemsize, -1)
    little: UnsignedArray = np.ascontiguousarray(planes.T).reshape(-1).view(unsigned.newbyteorder("<"))
    return little.astype(unsigned, copy=False)
