"""Which elements of its pieces a rank sends for a chunk of the published weights. Pure.

    tensors     cut by the engine: by rows, or wherever its flat buffers end
    chunks      cut by the layout, regardless of tensors; chunk c belongs to rank c mod (number of ranks)

All ranks know the pieces of all, so who sends what is computed and never sent.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from heterorl.common.weights.arena import WIDTH, Layout
from heterorl.learner.backends.ranks.state import Piece


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Elements of one tensor that one rank has and that lie in one chunk.

    Example: Segment(name="lm_head.weight", start=128, size=64, place=0): elements 128 to 191 of the rank's piece are
    the first 64 of the chunk.
    """

    name: str
    start: int
    size: int
    place: int


class Exchange:
    """Where the elements of every chunk come from."""

    def __init__(self, layout: Layout, tables: Sequence[Mapping[str, Piece]]) -> None:
        """Sort the tensors by their places.

        Args:
            layout: of the published weights.
            tables: each rank's pieces by the names of the model, tied ones once.
        """
        self._chunks = layout.chunks
        self._tables = tables
        self._places: dict[int, list[tuple[int, str]]] = {width: [] for width in layout.lengths}
        for name in tables[0]:
            spec = layout.spec(name)
            if spec.num_elements:
                self._places[WIDTH[spec.dtype]].append((layout.offsets[spec.name], name))
        for places in self._places.values():
            places.sort()

    def segments(self, chunk_number: int, *, rank: int) -> list[Segment]:
        """What a rank has of a chunk, by place; nothing of one that does not exist."""
        if chunk_number >= len(self._chunks):
            return []
        chunk = self._chunks[chunk_number]
        places = self._places[chunk.width]
        found = []
        # From the tensor that the chunk begins in.
        for offset, name in places[max(0, bisect.bisect_right(places, (chunk.start, "\U0010ffff")) - 1) :]:
            if offset >= chunk.stop:
                break
            piece = self._tables[rank][name]
            begin = max(chunk.start, offset + piece.start)
            end = min(chunk.stop, offset + piece.start + piece.size)
            if begin < end:
                start = begin - offset - piece.start
                found.append(Segment(name=name, start=start, size=end - begin, place=begin - chunk.start))
        return found
