"""Every method at every width: exact for any bits, canonical, and each guard of its decoder."""

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heterorl.common.errors import CorruptData, LimitExceeded, MalformedPayload
from heterorl.common.weights.codec import (
    Method,
    apply_chunk,
    encode_chunk,
    encode_composed,
    encode_dense,
    encode_planes,
)
from heterorl.common.weights.sparse_codec import compress
from tests.support.arenas import encode_steps

WIDTHS = (np.int8, np.int16, np.int32)
SPECIAL = {
    np.int8: [0x00, -0x80, 0x7F, -0x01, 0x7E, 0x78],  # 0, -0, NaN and the largest of e4m3
    np.int16: [0x0000, -0x8000, 0x7F80, 0x7FC1, -0x0080, -0x003F],  # 0, -0, Inf, NaN, -Inf, -NaN of bf16
    np.int32: [0, -(2**31), 0x7F800000, 0x7FC00001, -0x00800000, -0x003FFFFF],
}


def encoded(method, old, new):
    """The bytes of one method, or None where it is not offered."""
    if method is Method.GAPULP:
        return encode_steps(old, new)[0] if (old != new).any() else None
    if method is Method.DENSE8:
        return encode_dense(old, new)
    return {
        Method.SAME: lambda: b"" if (old == new).all() else None,
        Method.PLANES: lambda: encode_planes(new),
        Method.RAW: lambda: new.astype(new.dtype.newbyteorder("<")).tobytes(),
        Method.STEP_RAW: lambda: (new - old).astype(new.dtype.newbyteorder("<")).tobytes(),
    }[method]()


def applied(method, data, old):
    chunk = old.copy()
    apply_chunk(method, memoryview(data), chunk)
    return chunk


def weights(generator, dtype, size):
    """Bits of normal weights: log-normal magnitudes, so that some are small."""
    values = (generator.standard_normal(size) * 0.02).astype(np.float32)
    bits = values.view(np.int32)
    return (
        bits
        if dtype is np.int32
        else (bits >> 16).astype(np.int16)
        if dtype is np.int16
        else (bits >> 20).astype(np.int8)
    )


@st.composite
def pairs(draw):
    """Two states: bits of weights or of anything, special values among them; steps small or wild."""
    dtype = draw(st.sampled_from(WIDTHS))
    size = draw(st.sampled_from([1, 2, 7, 8, 9, 255, 256, 1000, 4001]))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    wild = np.frombuffer(generator.bytes(size * np.dtype(dtype).itemsize), dtype)
    old = (weights(generator, dtype, size) if draw(st.booleans()) else wild).copy()
    at = generator.integers(0, size, size // 5)
    old[at] = generator.choice(SPECIAL[dtype], at.size).astype(dtype)
    new = old.copy()
    mask = generator.random(size) < draw(st.sampled_from([0.0, 0.01, 0.1, 0.24, 0.5, 0.9, 1.0]))
    if draw(st.booleans()):
        new[mask] += generator.choice(
            [-300, -2, -1, 1, 2, 5], int(mask.sum()), p=[0.02, 0.08, 0.4, 0.4, 0.08, 0.02]
        ).astype(dtype)
    else:
        new[mask] = np.frombuffer(generator.bytes(new.nbytes), dtype)[mask]
    return old, new


@settings(max_examples=150, deadline=None)
@given(pair=pairs(), method=st.sampled_from(Method))
def test_every_method_is_exact_and_canonical(pair, method):
    old, new = pair
    data = encoded(method, old, new)
    if data is None:
        return

    state = applied(method, data, old)

    assert state.tobytes() == new.tobytes()
    assert encoded(method, old, state) == data


@settings(max_examples=60, deadline=None)
@given(pair=pairs())
def test_chosen_method_is_exact_canonical_and_never_larger_than_the_chunk(pair):
    old, new = pair

    method, data, num_changed = encode_chunk(old, new)

    state = applied(method, data, old)
    assert state.tobytes() == new.tobytes()
    assert num_changed == np.count_nonzero(old != new)
    assert len(data) <= new.nbytes
    assert encode_chunk(old, state) == (method, data, num_changed)


@settings(max_examples=60, deadline=None)
@given(pair=pairs())
def test_composed_steps_are_the_bytes_of_the_direct_difference(pair):
    old, new = pair
    direct = encode_chunk(old, new)

    composed = encode_composed(new - old, is_whole=False)

    # Only a state that is smaller than its steps is another choice, and only there.
    if direct[0] in (Method.PLANES, Method.RAW):
        assert len(composed[1]) >= len(direct[1])
    else:
        assert composed == direct[:2]


@pytest.mark.parametrize("dtype", WIDTHS)
def test_every_method_meets_the_widths_it_is_for(dtype):
    # Guards the property tests: each method was really offered bits at this width.
    generator = np.random.default_rng(0)
    old = weights(generator, dtype, 20_000)
    new = old.copy()
    new[generator.random(old.size) < 0.05] += dtype(1)
    dense = old + generator.integers(-3, 4, old.size).astype(dtype)

    assert encode_chunk(old, new)[0] is Method.GAPULP
    assert encode_chunk(old, dense)[0] is Method.DENSE8
    for method in set(Method) - {Method.SAME}:
        assert encoded(method, old, new) is not None


# --- guards of the decoders --------------------------------------------------------------------------------------


def test_a_number_that_names_no_method_is_refused_and_leaves_the_chunk():
    chunk = np.arange(8, dtype=np.int16)

    for number in (2, 7, 255):
        with pytest.raises(MalformedPayload, match=f"unknown method {number}"):
            apply_chunk(number, memoryview(b"12345678"), chunk)
    assert np.array_equal(chunk, np.arange(8))


def dense(folded, wide=b"", *, num_wide=None, dtype=np.int16, tail=b""):
    frames = [compress(bytes(folded)), compress(bytes(wide))]
    width = np.dtype(dtype).itemsize
    counts = len(wide) // width if num_wide is None else num_wide
    return struct.pack("<3I", counts, *(len(frame) for frame in frames)) + b"".join(frames) + tail


def test_dense_by_hand_adds_the_steps_of_the_byte_table():
    # 0, 1, 2 are 0, -1, +1; 255 + 0x0102 = 513 is -(513 + 1) / 2 = -257.
    state = applied(Method.DENSE8, dense([0, 1, 2, 255], [2, 1]), np.array([5, 5, 5, 5], np.int16))
    narrow = applied(Method.DENSE8, dense([0, 1, 254, 255], dtype=np.int8), np.zeros(4, np.int8))

    assert state.tolist() == [5, 4, 6, -252]
    assert narrow.tolist() == [0, -1, 127, -128]


@pytest.mark.parametrize(
    ("data", "dtype", "error", "match"),
    [
        (b"12345678901", np.int16, MalformedPayload, "shorter than its header"),
        (dense([255, 255, 0, 0], [0, 0, 0, 0]), np.int16, MalformedPayload, "2 wide steps"),
        (dense([255, 0, 0, 0], [0], dtype=np.int8), np.int8, MalformedPayload, "1 wide steps"),
        (dense([0, 0, 0, 0], tail=b"x"), np.int16, MalformedPayload, "add up"),
        (dense([0, 0, 0, 0])[:-1], np.int16, MalformedPayload, "add up"),
        (dense([255, 0, 0, 0]), np.int16, MalformedPayload, "disagree"),
        (dense([0, 0, 0, 0], [0, 0]), np.int16, MalformedPayload, "disagree"),
        (dense([255, 0, 0, 0], [1, 0xFF]), np.int16, MalformedPayload, "leaves its width"),
        (dense([0, 0, 0]), np.int16, LimitExceeded, "3 bytes, 4 are expected"),
        (dense([255, 0, 0, 0], [0, 0], num_wide=0), np.int16, MalformedPayload, "empty zstd"),
    ],
)
def test_dense_that_breaks_its_format_is_refused_and_leaves_the_chunk(data, dtype, error, match):
    chunk = np.zeros(4, dtype)

    with pytest.raises(error, match=match):
        apply_chunk(Method.DENSE8, memoryview(data), chunk)
    assert not chunk.any()


def test_largest_wide_step_of_dense_stays_in_its_width():
    # 255 + 0xFF00 = 2^16 - 1 is the step -2^15.
    assert applied(Method.DENSE8, dense([255, 0, 0, 0], [0, 0xFF]), np.zeros(4, np.int16)).tolist() == [
        -0x8000,
        0,
        0,
        0,
    ]


@pytest.mark.parametrize(
    ("escape", "sign", "match"), [(125, 0x80, "leaves its width"), (255, 0, "leaves"), (124, 0, "upwards")]
)
def test_step_of_one_byte_must_stay_in_its_width(escape, sign, match):
    # |step| = 4 + escape: 128 goes down only.
    frames = [compress(b"\0"), bytes([sign]), compress(b"\3"), compress(bytes([escape]))]
    data = struct.pack("<8I", 1, 1, 1, 0, len(frames[0]), len(frames[2]), len(frames[3]), 0) + b"".join(frames)
    down = data.replace(bytes(frames[3]), compress(bytes([124]))).replace(
        frames[0] + bytes([sign]), frames[0] + b"\x80"
    )

    with pytest.raises(MalformedPayload, match=match):
        applied(Method.GAPULP, data, np.zeros(10, np.int8))
    assert applied(Method.GAPULP, down, np.zeros(10, np.int8))[0] == -128


@settings(max_examples=150, deadline=None)
@given(pair=pairs(), method=st.sampled_from(Method), data=st.data())
def test_damaged_bytes_of_every_method_are_refused_or_applied(pair, method, data):
    old, new = pair
    coded = encoded(method, old, new)
    if not coded:
        return
    damaged = bytearray(coded)
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    chunk = old.copy()

    try:
        apply_chunk(method, memoryview(bytes(damaged)), chunk)
    except CorruptData:
        assert chunk.tobytes() == old.tobytes()
