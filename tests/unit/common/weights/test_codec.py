"""Chunks as bytes: exact for every bit pattern, bounded for every byte string."""

import struct

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from heterorl.common.errors import CorruptData, LimitExceeded, MalformedPayload
from heterorl.common.weights.codec import Method, apply_chunk, encode_chunk
from heterorl.common.weights.sparse_codec import compress, decompress

DTYPES = (np.int8, np.int16, np.int32)


def arrays(dtype, size):
    bits = 8 * np.dtype(dtype).itemsize
    return hnp.arrays(dtype, size, elements=st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1))


@st.composite
def pairs(draw):
    dtype = draw(st.sampled_from(DTYPES))
    size = draw(st.integers(1, 700))
    old = draw(arrays(dtype, size))
    new = old.copy()
    changed = draw(st.lists(st.integers(0, size - 1), max_size=20, unique=True))
    new[changed] = draw(arrays(dtype, len(changed)))
    return old, new


@given(pairs())
def test_delta_leads_exactly_to_the_new_state_for_any_bits(pair):
    old, new = pair

    method, data, num_changed = encode_chunk(old, new)
    state = old.copy()
    apply_chunk(method, memoryview(data), state)

    assert state.tobytes() == new.tobytes()
    assert num_changed == int((old != new).sum())
    assert (method == Method.SAME) == (num_changed == 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_step_of_the_width_survives(dtype):
    # All 2^16 steps from 0, or as many from the two ends of the wider type.
    info = np.iinfo(dtype)
    new = np.concatenate([np.arange(info.min, info.min + 2**15), np.arange(info.max - 2**15 + 1, info.max + 1)]).astype(
        dtype
    )
    old = np.zeros_like(new)

    for other in (old, new[::-1].copy()):
        method, data, _ = encode_chunk(other, new)
        state = other.copy()
        apply_chunk(method, memoryview(data), state)
        assert state.tobytes() == new.tobytes()


@pytest.mark.parametrize("gap", [0, 1, 254, 255, 256, 509, 510, 511, 255 * 9, 255 * 9 + 1])
def test_gaps_around_the_escape_survive(gap):
    old = np.zeros(gap + 200, np.int16)
    new = old.copy()
    new[[0, gap + 1]] = (1, -1)

    method, data, _ = encode_chunk(old, new)
    apply_chunk(method, memoryview(data), old)

    assert method == Method.GAPULP
    assert old.tobytes() == new.tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_snapshot_of_weights_is_smaller_than_raw_and_exact(dtype):
    values = np.random.default_rng(0).normal(0, 0.02, 5000).astype(np.float32)
    bits = (
        values.view(np.int32) if dtype is np.int32 else (values.view(np.uint32) >> 16).astype(np.uint16).view(np.int16)
    )

    method, data, num_changed = encode_chunk(None, bits)
    state = np.zeros_like(bits)
    apply_chunk(method, memoryview(data), state)

    assert method == Method.PLANES
    assert len(data) < bits.nbytes
    assert num_changed == bits.size
    assert state.tobytes() == bits.tobytes()


def test_noise_is_sent_raw_when_nothing_is_smaller():
    noise = np.random.default_rng(0).integers(-(2**15), 2**15, 3000).astype(np.int16)

    method, data, _ = encode_chunk(np.zeros_like(noise), noise)

    assert method == Method.RAW
    assert len(data) == noise.nbytes


def test_sparse_ulp_steps_cost_less_than_two_bytes_each():
    random = np.random.default_rng(0)
    old = random.integers(-(2**15), 2**15, 1 << 20).astype(np.int16)
    new = old.copy()
    index = random.choice(old.size, old.size // 75, replace=False)
    new[index] += random.choice([-1, 1], index.size).astype(np.int16)

    _, data, num_changed = encode_chunk(old, new)

    # Position about 7.6 bits, sign 1, magnitude near 0: below 9.7 bits by entropy, 10.5 leaves room for headers.
    assert 8 * len(data) / num_changed < 10.5


@settings(max_examples=300)
@given(st.integers(0, 7), st.binary(max_size=200), st.integers(1, 50), st.sampled_from(DTYPES))
def test_any_bytes_give_a_typed_error_or_a_chunk(method, data, size, dtype):
    try:
        apply_chunk(method, memoryview(data), np.zeros(size, dtype))
    except CorruptData:
        return


@given(pairs(), st.data())
def test_any_changed_byte_of_a_delta_gives_a_typed_error_or_a_chunk(pair, data):
    old, new = pair
    method, coded, _ = encode_chunk(old, new)
    if not coded:
        return
    broken = bytearray(coded)
    broken[data.draw(st.integers(0, len(coded) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        apply_chunk(method, memoryview(bytes(broken)), old)
    except CorruptData:
        return


def header(num_changed, num_gaps, num_escapes, *sizes):
    return struct.pack("<8I", num_changed, num_gaps, num_escapes, 0, *sizes, 0)


def gapulp(gaps, codes, escapes=b"", signs=b"\x00", *, num_changed=1, num_escapes=0):
    frames = [compress(gaps), compress(codes), compress(escapes)]
    return header(num_changed, len(gaps), num_escapes, *map(len, frames)) + frames[0] + signs + frames[1] + frames[2]


@pytest.mark.parametrize(
    ("method", "data"),
    [
        (Method.SAME, b"x"),
        (Method.RAW, b"123"),
        (9, b""),
        (Method.GAPULP, b"short"),
        (Method.GAPULP, header(0, 0, 0, 0, 0, 0)),
        (Method.GAPULP, header(99, 99, 0, 0, 0, 0)),
        (Method.GAPULP, header(1, 1, 2, 0, 0, 0)),
        (Method.GAPULP, header(1, 9, 0, 0, 0, 0)),
        (Method.GAPULP, header(1, 1, 0, 9, 9, 9)),
        (Method.GAPULP, gapulp(b"\x0a", b"\x00")),  # index 10 of 10
        (Method.GAPULP, gapulp(b"\xff", b"\x00")),  # a gap that does not end
        (Method.GAPULP, gapulp(b"\x00", b"\x04")),  # bits after the last magnitude
        (Method.GAPULP, gapulp(b"\x00", b"\x00", signs=b"\x40")),  # bits after the last sign
        (Method.GAPULP, gapulp(b"\x00", b"\x03")),  # a missing escape
        (Method.GAPULP, gapulp(b"\x00", b"\x03", b"\xff", num_escapes=1)),  # a missing wide escape
        (Method.PLANES, b"\x00"),
        (Method.PLANES, struct.pack("<I", 11) + b"x" * 11),
        (Method.PLANES, struct.pack("<I", 10) + b"x" * 5),
        (Method.PLANES, (struct.pack("<I", 10) + b"x" * 10) * 2 + b"y"),
    ],
)
def test_malformed_chunk_is_refused_and_leaves_the_state(method, data):
    state = np.arange(10, dtype=np.int16)

    with pytest.raises(CorruptData):
        apply_chunk(method, memoryview(data), state)

    assert state.tolist() == list(range(10))


def test_zstd_bombs_are_refused_before_they_grow():
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 28))
    undeclared = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1 << 24))

    with pytest.raises(LimitExceeded, match="states"):
        decompress(bomb, num_bytes=100)
    with pytest.raises(LimitExceeded, match="states"):
        decompress(undeclared, num_bytes=100)


def test_zstd_needs_exactly_one_whole_frame():
    frame = compress(b"hello")

    assert decompress(frame, num_bytes=5) == b"hello"
    for broken in (frame + frame, frame + b"x", frame[:-1], b"", b"not zstd"):
        with pytest.raises(MalformedPayload):
            decompress(broken, num_bytes=5)
    with pytest.raises(LimitExceeded):
        decompress(frame, num_bytes=4)


def test_zstd_refuses_a_second_frame_that_begins_in_another_piece():
    # More than one piece of 64 KiB, so that the end of the first frame is seen with input left.
    noise = np.random.default_rng(0).bytes(1 << 16)

    with pytest.raises(MalformedPayload):
        decompress(compress(noise) + compress(noise), num_bytes=1 << 16)
