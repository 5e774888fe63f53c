"""Chunks survive their coding bit by bit, whatever the bits are."""

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heterorl.common.errors import CorruptData, MalformedPayload
from heterorl.common.weights import sparse_codec
from heterorl.common.weights.codec import Method, apply_chunk, encode_chunk
from tests.support.arenas import encode_steps

WIDTHS = [np.int8, np.int16, np.int32]
BF16_NAN, BF16_INF, BF16_MINUS_ZERO = 0x7FC1, 0x7F80, -0x8000


def decoded(method, data, old):
    chunk = old.copy()
    apply_chunk(method, memoryview(data), chunk)
    return chunk


def any_integers(dtype):
    info = np.iinfo(dtype)
    edges = [info.min, info.min + 1, -1, 0, 1, 2, 3, 4, 258, 259, 260, info.max - 1, info.max]
    edges = [edge for edge in edges if info.min <= edge <= info.max]
    return st.one_of(st.sampled_from(edges), st.integers(info.min, info.max))


@st.composite
def states(draw):
    """Two states of one chunk: the second differs from the first at a drawn share of the elements."""
    dtype = draw(st.sampled_from(WIDTHS))
    size = draw(st.one_of(st.integers(1, 40), st.integers(1, 3000)))
    seed = draw(st.integers(0, 2**32 - 1))
    generator = np.random.default_rng(seed)
    old = np.frombuffer(generator.bytes(size * np.dtype(dtype).itemsize), dtype).copy()
    new = old.copy()
    num_changed = draw(st.sampled_from([0, 1, size // 300, size // 10, size]))
    index = generator.choice(size, num_changed, replace=False)
    steps = draw(hnp.arrays(dtype, num_changed, elements=any_integers(dtype), fill=st.just(1)))
    new[index] += steps
    return old, new


@given(states())
def test_chunk_survives_coding_against_the_state_before(pair):
    old, new = pair

    method, data, num_changed = encode_chunk(old, new)

    assert np.array_equal(decoded(method, data, old), new)
    assert num_changed == np.count_nonzero(old != new)
    assert len(data) <= new.nbytes
    assert (method is Method.SAME) == (num_changed == 0)


@given(states())
def test_chunk_survives_coding_from_nothing(pair):
    old, new = pair

    method, data, num_changed = encode_chunk(None, new)

    assert np.array_equal(decoded(method, data, old), new)
    assert num_changed == new.size
    assert method in (Method.PLANES, Method.RAW)
    assert len(data) <= new.nbytes


@pytest.mark.parametrize("offset", [1, 0x7FFF, -0x8000])
def test_every_pattern_of_two_bytes_survives(offset):
    # Subtraction wraps, so each offset is the step of all 2^16 patterns; -0x8000 has no positive twin.
    old = np.arange(-0x8000, 0x8000).astype(np.int16)
    new = old + np.int16(offset)

    data, num_changed = encode_steps(old, new)

    assert num_changed == 1 << 16
    assert np.array_equal(decoded(Method.GAPULP, data, old), new)
    assert np.array_equal(decoded(*encode_chunk(old, new)[:2], old), new)


def test_every_step_of_two_bytes_survives():
    old = np.zeros(1 << 16, np.int16)
    new = np.arange(-0x8000, 0x8000).astype(np.int16)

    assert np.array_equal(decoded(*encode_chunk(old, new)[:2], old), new)
    assert encode_chunk(old, new)[2] == (1 << 16) - 1


def test_not_a_number_and_negative_zero_are_bits_like_others():
    old = np.array([0, BF16_NAN, BF16_NAN, BF16_INF, BF16_MINUS_ZERO] * 20, np.int16)
    new = np.array([BF16_MINUS_ZERO, BF16_NAN, BF16_NAN + 1, BF16_INF, BF16_MINUS_ZERO] * 20, np.int16)

    method, data, num_changed = encode_chunk(old, new)

    # 0 -> -0 and one NaN -> another are changes; an equal NaN is none.
    assert num_changed == 2 * 20
    assert np.array_equal(decoded(method, data, old), new)


@pytest.mark.parametrize("dtype", WIDTHS)
@pytest.mark.parametrize("gap", [0, 1, 253, 254, 255, 256, 509, 510, 511, 1019, 1020, 1021, 5000])
def test_gap_of_any_length_survives(dtype, gap):
    # One change after `gap` unchanged elements, a second after `gap` more, and 700 unchanged ones at the end.
    old = np.zeros(2 * gap + 702, dtype)
    new = old.copy()
    new[[gap, 2 * gap + 1]] = [1, -1]

    method, data, num_changed = encode_chunk(old, new)

    assert (method, num_changed) == (Method.GAPULP, 2)
    assert np.array_equal(decoded(method, data, old), new)


@pytest.mark.parametrize("dtype", [np.int16, np.int32])
@pytest.mark.parametrize("distance", [1, 2, 3, 4, 5, 257, 258, 259, 260, 0x7FFF])
@pytest.mark.parametrize("sign", [1, -1])
def test_step_of_any_length_survives(dtype, distance, sign):
    # 1..3 fit two bits, 4..258 one escape byte, 259 and more a wide escape.
    old = np.arange(300).astype(dtype)
    new = old.copy()
    new[::7] += dtype(sign * distance)

    method, data, _ = encode_chunk(old, new)

    assert method is Method.GAPULP
    assert np.array_equal(decoded(method, data, old), new)


@pytest.mark.parametrize("step", [-(2**31), -(2**31) + 1, 2**31 - 1, 2**31 - 2])
def test_largest_steps_of_four_bytes_survive(step):
    old = np.arange(400).astype(np.int32) - 200
    new = old.copy()
    new[::5] += np.int32(step)

    method, data, _ = encode_chunk(old, new)

    assert method is Method.GAPULP
    assert np.array_equal(decoded(method, data, old), new)


def test_adjacent_steps_of_trained_weights_cost_less_than_ten_bits_a_change():
    # 1.35% of the elements change, 90% of them by one: entropy 9.4 bits a change (position 7.6, step 1.8).
    generator = np.random.default_rng(0)
    old = (generator.standard_normal(1 << 19) * 0.02).astype(np.float32).view(np.int32) >> 16
    old = old.astype(np.int16)
    new = old.copy()
    index = np.flatnonzero(generator.random(old.size) < 0.0135)
    new[index] += (generator.geometric(0.9, index.size) * generator.choice([-1, 1], index.size)).astype(np.int16)

    method, data, num_changed = encode_chunk(old, new)

    assert method is Method.GAPULP
    assert 8 * len(data) / num_changed < 10


def test_encoder_picks_planes_when_only_the_exponent_repeats():
    generator = np.random.default_rng(0)
    weights = (generator.standard_normal(5000) * 0.02).astype(np.float32).view(np.int32) >> 16

    method, data, _ = encode_chunk(None, weights.astype(np.int16))

    assert method is Method.PLANES
    # The mantissa plane is raw: 4 + 5000 bytes of it, and an exponent plane of less than 5000.
    assert 4 + 4 + 5000 < len(data) < 9000


@pytest.mark.parametrize("has_old", [True, False])
@pytest.mark.parametrize("dtype", WIDTHS)
def test_encoder_picks_raw_when_nothing_compresses(has_old, dtype):
    generator = np.random.default_rng(0)
    old, new = (np.frombuffer(generator.bytes(4000), dtype) for _ in range(2))

    method, data, _ = encode_chunk(old if has_old else None, new)

    assert (method, data) == (Method.RAW, new.tobytes())


def test_encoder_picks_planes_over_steps_when_a_dense_change_ends_in_a_plain_state():
    old = np.frombuffer(np.random.default_rng(0).bytes(4000), np.int16)

    assert encode_chunk(old, np.zeros(2000, np.int16))[0] is Method.PLANES


@pytest.mark.parametrize("method", [7, 255, 2**32 - 1])
def test_unknown_method_is_refused(method):
    with pytest.raises(MalformedPayload, match="unknown method"):
        decoded(method, b"", np.zeros(4, np.int16))


def test_same_with_bytes_is_refused():
    with pytest.raises(MalformedPayload, match="SAME"):
        decoded(Method.SAME, b"x", np.zeros(4, np.int16))


@pytest.mark.parametrize("num_bytes", [0, 7, 9])
def test_raw_of_another_size_is_refused(num_bytes):
    with pytest.raises(MalformedPayload, match="RAW"):
        decoded(Method.RAW, bytes(num_bytes), np.zeros(4, np.int16))


def test_planes_of_another_size_are_refused():
    # Two planes of four bytes: size 4, the bytes, twice.
    plane = (4).to_bytes(4, "little") + b"\1\2\3\4"
    chunk = np.zeros(4, np.int16)

    assert decoded(Method.PLANES, plane * 2, chunk).tolist() == [0x101, 0x202, 0x303, 0x404]
    with pytest.raises(MalformedPayload, match="no size"):
        decoded(Method.PLANES, plane + b"\4\0\0", chunk)
    with pytest.raises(MalformedPayload, match="longer"):
        decoded(Method.PLANES, plane + plane[:-1], chunk)
    with pytest.raises(MalformedPayload, match="longer"):
        decoded(Method.PLANES, plane + (5).to_bytes(4, "little") + bytes(5), chunk)
    with pytest.raises(MalformedPayload, match="after"):
        decoded(Method.PLANES, plane * 2 + b"x", chunk)
    with pytest.raises(MalformedPayload, match="zstd"):
        decoded(Method.PLANES, plane + (3).to_bytes(4, "little") + bytes(3), chunk)


@given(method=st.sampled_from(Method), data=st.binary(max_size=200), dtype=st.sampled_from(WIDTHS))
def test_any_bytes_are_refused_or_applied(method, data, dtype):
    chunk = np.arange(16).astype(dtype)

    try:
        apply_chunk(method, memoryview(data), chunk)
    except CorruptData:
        assert np.array_equal(chunk, np.arange(16))


@given(pair=states(), data=st.data())
def test_damaged_bytes_are_refused_or_applied(pair, data):
    old, new = pair
    method, coded, _ = encode_chunk(old, new)
    damaged = bytearray(coded)
    for _ in range(data.draw(st.integers(1, 3))):
        if damaged:
            damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    chunk = old.copy()

    try:
        apply_chunk(method, memoryview(bytes(damaged)), chunk)
    except CorruptData:
        assert np.array_equal(chunk, old)


@pytest.mark.parametrize("size", [8, 1 << 12, 1 << 20])
def test_bytes_do_not_depend_on_how_many_elements_are_compared_at_once(monkeypatch, size):
    rng = np.random.default_rng(0)
    old = rng.integers(-(2**15), 2**15, 300_000).astype(np.int16)
    # Few changes, then many, then none.
    share = np.repeat([0.001, 0.1, 0.0], 100_000)
    new = old + (rng.random(old.size) < share).astype(np.int16)
    expected = encode_chunk(old, new)

    monkeypatch.setattr(sparse_codec, "SPARSE_ELEMENTS", size)
    monkeypatch.setattr(sparse_codec, "SCAN_ELEMENTS", min(size, 1 << 10))

    assert encode_chunk(old, new) == expected
