"""Which bytes of a payload are on disk, and which ranges to ask for next. Pure.

A payload being fetched is a set of pieces: files that each hold a run of its bytes from a known start. Piece 0 is the
payload itself as far as it is known from its beginning; the others exist only while several streams fetch at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SPLIT_BYTES = 4 << 20
"""Ranges are not cut into halves smaller than this: a stream needs some round trips to come up to speed."""


@dataclass(frozen=True, slots=True, order=True)
class Piece:
    """Bytes [start, start + length) are in the file of this start."""

    start: int
    length: int


@dataclass(frozen=True, slots=True, order=True)
class Gap:
    """Bytes [begin, end) are missing and belong at the end of the piece that starts at `start`."""

    begin: int
    end: int
    start: int

    @property
    def num_bytes(self) -> int:
        """Bytes missing."""
        return self.end - self.begin


def find_gaps(pieces: Sequence[Piece], *, num_bytes: int, num_streams: int) -> list[Gap]:
    """What to fetch, at most `num_streams` of it at once: the holes, the largest cut until there are enough.

    Args:
        pieces: what is there, in any order; a piece 0 of length 0 if nothing is.
        num_bytes: size of the payload.
        num_streams: ranges wanted, at least 1.
    """
    known = sorted(pieces)
    ends = [piece.start for piece in known[1:]] + [num_bytes]
    gaps = [
        Gap(begin=piece.start + piece.length, end=end, start=piece.start)
        for piece, end in zip(known, ends, strict=True)
        if piece.start + piece.length < end
    ]
    while gaps and len(gaps) < num_streams:
        largest = max(gaps, key=lambda gap: gap.num_bytes)
        if largest.num_bytes < 2 * SPLIT_BYTES:
            break
        middle = (largest.begin + largest.end) // 2
        gaps.remove(largest)
        gaps += [Gap(largest.begin, middle, largest.start), Gap(middle, largest.end, middle)]
    return sorted(gaps)
