"""What is missing of a payload, and how it is shared among streams."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from heterorl.common.pull.fetcher import SPLIT_BYTES, Gap, Piece, find_gaps


@st.composite
def states(draw):
    """A payload's size and pieces as interrupted fetches leave them."""
    num_bytes = draw(st.integers(1, 20 * SPLIT_BYTES))
    starts = sorted({0, *draw(st.lists(st.integers(1, max(1, num_bytes - 1)), max_size=5))})
    starts = [start for start in starts if start < num_bytes]
    ends = [*starts[1:], num_bytes]
    pieces = [Piece(start, draw(st.integers(0, end - start))) for start, end in zip(starts, ends, strict=True)]
    return num_bytes, pieces


@given(states(), st.integers(1, 8))
def test_pieces_and_gaps_cover_every_byte_once(state, num_streams):
    num_bytes, pieces = state
    gaps = find_gaps(pieces, num_bytes=num_bytes, num_streams=num_streams)

    runs = sorted(
        [(piece.start, piece.start + piece.length) for piece in pieces if piece.length]
        + [(gap.begin, gap.end) for gap in gaps]
    )
    assert runs[0][0] == 0
    assert runs[-1][1] == num_bytes
    assert all(before[1] == after[0] for before, after in itertools.pairwise(runs))
    # A gap continues a piece that is there, or begins one.
    known = {piece.start: piece.start + piece.length for piece in pieces}
    assert all(gap.begin == known.get(gap.start, gap.start) for gap in gaps)
    assert all(gap.start in known or gap.num_bytes >= SPLIT_BYTES for gap in gaps)


def test_large_payload_is_shared_among_the_streams():
    gaps = find_gaps([Piece(0, 0)], num_bytes=40 * SPLIT_BYTES, num_streams=4)

    assert [gap.num_bytes for gap in gaps] == [10 * SPLIT_BYTES] * 4
    assert [gap.start for gap in gaps] == [gap.begin for gap in gaps]


def test_small_payload_is_fetched_by_one_stream():
    assert find_gaps([Piece(0, 5)], num_bytes=2 * SPLIT_BYTES, num_streams=4) == [Gap(5, 2 * SPLIT_BYTES, 0)]


def test_nothing_is_asked_for_when_all_is_there():
    assert find_gaps([Piece(0, 7), Piece(7, 3)], num_bytes=10, num_streams=4) == []
