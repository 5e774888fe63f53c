"""Every guard of the GAPULP decoder, against streams built by hand from the byte table."""

import struct

import numpy as np
import pytest

from heterorl.common.errors import LimitExceeded, MalformedPayload
from heterorl.common.weights.codec import Method, apply_chunk
from heterorl.common.weights.sparse_codec import compress
from tests.support.arenas import encode_steps

SIZE = 1000


def stream(gaps, signs, codes, *, escapes=b"", wide=b"", counts=None, sizes=None, tail=b""):
    """The chunk's bytes; `counts` and `sizes` override what the header says."""
    frames = [compress(bytes(part)) for part in (gaps, codes, escapes, wide)]
    counts = counts or (sum(byte != 255 for byte in gaps), len(gaps), len(escapes), len(wide) // 2)
    sizes = sizes or tuple(len(frame) for frame in frames)
    return struct.pack("<8I", *counts, *sizes) + frames[0] + bytes(signs) + b"".join(frames[1:]) + tail


def apply(data, dtype=np.int16):
    chunk = np.zeros(SIZE, dtype)
    apply_chunk(Method.GAPULP, memoryview(data), chunk)
    return {int(index): int(chunk[index]) for index in np.flatnonzero(chunk)}


def test_stream_by_hand_gives_the_changes_of_the_byte_table():
    # Gaps 0, 300 = 255 + 45, 2, 0, 1 -> positions 0, 301, 304, 305, 307.
    # |step| - 1: codes 0, 2, 3 (+ escape 7), 3 (+ escape 255 + wide 0x0102), 1 -> |step| 1, 3, 11, 517, 2.
    # Codes low bits first: 0 | 2 << 2 | 3 << 4 | 3 << 6 = 0xf8, then 1. Signs, high bit first: + - + - + -> 0x50.
    data = stream([0, 255, 45, 2, 0, 1], [0x50], [0xF8, 1], escapes=[7, 255], wide=[2, 1])

    assert apply(data) == {0: 1, 301: -3, 304: 11, 305: -517, 307: 2}


def test_encoder_writes_the_byte_table():
    old = np.zeros(SIZE, np.int16)
    new = old.copy()
    new[[0, 301, 304, 305, 307]] = [1, -3, 11, -517, 2]

    data = encode_steps(old, new)[0]

    assert data == stream([0, 255, 45, 2, 0, 1], [0x50], [0xF8, 1], escapes=[7, 255], wide=[2, 1])


def test_wide_escapes_of_four_bytes_are_planes():
    old = np.zeros(SIZE, np.int32)
    new = old.copy()
    new[[0, 1]] = [0x01020304 + 259, 0x05060708 + 259]

    data = encode_steps(old, new)[0]

    planes = [0x04, 0x08, 0x03, 0x07, 0x02, 0x06, 0x01, 0x05]
    assert data == stream([0, 0], [0], [0x0F], escapes=[255, 255], wide=planes, counts=(2, 2, 2, 2))
    assert apply(data, np.int32) == {0: 0x01020304 + 259, 1: 0x05060708 + 259}


def test_last_element_can_change_and_the_next_cannot():
    # 999 = 3 * 255 + 234.
    assert apply(stream([255, 255, 255, 234], [0], [0])) == {999: 1}
    with pytest.raises(MalformedPayload, match="position 1000"):
        apply(stream([255, 255, 255, 235], [0], [0]))


@pytest.mark.parametrize("length", [0, 1, 31])
def test_cut_header_is_refused(length):
    with pytest.raises(MalformedPayload, match="header"):
        apply(stream([0], [0], [0])[:length])


@pytest.mark.parametrize(
    "counts",
    [(0, 1, 0, 0), (SIZE + 1, SIZE + 1, 0, 0), (2**32 - 1, 2**32 - 1, 0, 0), (1, 1, 2, 0), (1, 1, 0, 1)],
    ids=["none", "more than the chunk", "huge", "more escapes than changes", "more wide than escapes"],
)
def test_impossible_numbers_of_steps_are_refused(counts):
    with pytest.raises(MalformedPayload, match="steps in a chunk"):
        apply(stream([0], [0], [0], counts=counts))


@pytest.mark.parametrize("num_gaps", [0, 5, 2**32 - 1])
def test_impossible_numbers_of_gap_bytes_are_refused(num_gaps):
    # One change and 1000 // 255 = 3 bytes of 255 are the most.
    with pytest.raises(MalformedPayload, match="gap bytes"):
        apply(stream([0], [0], [0], counts=(1, num_gaps, 0, 0)))


def test_streams_that_do_not_add_up_are_refused():
    with pytest.raises(MalformedPayload, match="add up"):
        apply(stream([0], [0], [0], tail=b"x"))
    with pytest.raises(MalformedPayload, match="add up"):
        apply(stream([0], [0], [0])[:-1])
    with pytest.raises(MalformedPayload, match="add up"):
        apply(stream([0], [0], [0], sizes=(2**32 - 1, 2**32 - 1, 2**32 - 1, 2**32 - 1)))


def test_gaps_that_do_not_match_the_changes_are_refused():
    with pytest.raises(MalformedPayload, match="open end"):
        apply(stream([0, 0, 255], [0], [0], counts=(2, 3, 0, 0)))
    with pytest.raises(MalformedPayload, match="open end"):
        apply(stream([0, 0, 0], [0], [0], counts=(2, 3, 0, 0)))
    with pytest.raises(MalformedPayload, match="open end"):
        apply(stream([255, 255], [0], [0], counts=(1, 2, 0, 0)))


def test_bits_after_the_last_are_refused():
    with pytest.raises(MalformedPayload, match="last sign"):
        apply(stream([0], [0x40], [0]))
    with pytest.raises(MalformedPayload, match="last magnitude"):
        apply(stream([0], [0], [4]))


@pytest.mark.parametrize(
    ("codes", "escapes", "wide"),
    [([3], [], []), ([0], [1], []), ([3], [255], []), ([3], [254], [0, 0])],
    ids=["escape missing", "escape too many", "wide missing", "wide too many"],
)
def test_escapes_that_do_not_match_the_magnitudes_are_refused(codes, escapes, wide):
    with pytest.raises(MalformedPayload, match="disagree"):
        apply(stream([0], [0], codes, escapes=escapes, wide=wide))


@pytest.mark.parametrize(("dtype", "bits"), [(np.int16, 16), (np.int32, 32)])
def test_step_must_stay_in_its_width(dtype, bits):
    half = 1 << (bits - 1)

    def wide_step(magnitude, sign):
        # |step| = 4 + 255 + wide.
        wide = (magnitude - 259).to_bytes(bits // 8, "little")
        return apply(stream([0], [sign], [3], escapes=[255], wide=wide, counts=(1, 1, 1, 1)), dtype)

    assert wide_step(half - 1, 0) == {0: half - 1}
    assert wide_step(half, 0x80) == {0: -half}
    with pytest.raises(MalformedPayload, match="upwards"):
        wide_step(half, 0)
    with pytest.raises(MalformedPayload, match="leaves its width"):
        wide_step(half + 1, 0x80)
    with pytest.raises(MalformedPayload, match="leaves its width"):
        # Would wrap to a step of 3 if it were added blindly.
        wide_step((1 << bits) + 258, 0)


def test_frame_of_another_size_than_the_header_says_is_refused():
    gaps = compress(bytes(3))
    data = struct.pack("<8I", 2, 2, 0, 0, len(gaps), len(compress(b"\0")), 0, 0) + gaps + b"\0" + compress(b"\0")

    with pytest.raises(LimitExceeded, match="3 bytes, 2 are expected"):
        apply(data)
