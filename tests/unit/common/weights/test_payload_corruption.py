"""A payload that was damaged anywhere is refused with a typed error before a weight is touched."""

import struct

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from heterorl.common.errors import CorruptData, LimitExceeded, MalformedPayload
from heterorl.common.weights.arena import Arena
from heterorl.common.weights.codec import Method
from heterorl.common.weights.payload import apply_payload, write_delta, write_snapshot
from tests.support.arenas import changed_arena, random_arena, small_layout

NUM_CHUNKS = 7
HEADER_BEGIN, HEADER_END = 12, 112 + 20 * NUM_CHUNKS
CHUNKS_BEGIN = HEADER_END + 8


@pytest.fixture
def delta(tmp_path):
    """A path, the state before, and the bytes of a delta with one large chunk of each kind."""
    old = random_arena(small_layout(), seed=1)
    new = changed_arena(old, seed=3, density=0.15)
    write_delta(tmp_path / "d", old, new)
    return tmp_path / "d", old, (tmp_path / "d").read_bytes()


def refuse(path, old, data, *, error=CorruptData, match=None):
    """Apply damaged bytes; they must be refused and leave the weights alone."""
    path.write_bytes(data)
    staging = old.copy()
    with pytest.raises(error, match=match):
        apply_payload(path, staging, expected_from_root=old.state_root())
    assert staging.digests() == old.digests()


def sealed(data, position, value):
    """The bytes with `value` written at `position` of the header, under a correct header checksum."""
    damaged = bytearray(data)
    damaged[position : position + len(value)] = value
    damaged[HEADER_END:CHUNKS_BEGIN] = xxhash.xxh3_64_digest(bytes(damaged[HEADER_BEGIN:HEADER_END]))[::-1]
    return bytes(damaged)


def record(number):
    return 112 + 20 * number


def test_sealing_changes_nothing_else(delta):
    path, old, data = delta

    assert sealed(data, 12, data[12:16]) == data
    apply_payload(path, old, expected_from_root=old.state_root())


def test_every_flipped_byte_is_detected(delta):
    path, old, data = delta
    generator = np.random.default_rng(0)

    assert 400 < len(data) < 2000
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 1 << int(generator.integers(8))
        refuse(path, old, bytes(damaged))


def test_every_cut_is_detected(delta):
    # Every length, so also each border of head, header and chunks, and one byte to either side.
    path, old, data = delta

    for length in range(len(data)):
        refuse(path, old, data[:length], error=MalformedPayload)


def test_bytes_after_the_end_are_detected(delta):
    path, old, data = delta

    refuse(path, old, data + b"\0", error=MalformedPayload, match="add up")


@given(data=st.binary(max_size=400), has_magic=st.booleans())
def test_any_file_is_refused(tmp_path_factory, data, has_magic):
    path = tmp_path_factory.getbasetemp() / "any"
    arena = Arena(small_layout())

    refuse(path, arena, b"HRLW0001" + data if has_magic else data)


def test_snapshot_with_any_flipped_byte_is_refused(tmp_path):
    arena, path = random_arena(small_layout(), seed=1), tmp_path / "s"
    write_snapshot(path, arena)
    data = path.read_bytes()
    staging = Arena(arena.layout)

    for position in range(len(data)):
        path.write_bytes(data[:position] + bytes([data[position] ^ 0x10]) + data[position + 1 :])
        with pytest.raises(CorruptData):
            apply_payload(path, staging, expected_from_root=None)
    assert staging.digests() == Arena(arena.layout).digests()


@pytest.mark.parametrize("size", [0, 99, 2**31, 2**32 - 1])
def test_header_of_an_impossible_size_is_refused_unread(delta, size):
    path, old, data = delta

    refuse(path, old, data[:8] + struct.pack("<I", size) + data[12:], error=MalformedPayload, match="is cut")


@pytest.mark.parametrize("num_chunks", [0, 6, 8, 2**32 - 1])
def test_another_number_of_chunks_is_refused(delta, num_chunks):
    path, old, data = delta

    refuse(path, old, sealed(data, 108, struct.pack("<I", num_chunks)), error=MalformedPayload, match="chunks, of 7")


@pytest.mark.parametrize(("stated", "actual"), [(8, 8), (7, 8), (8, 7)])
def test_chunk_of_no_use_to_the_layout_is_refused(delta, stated, actual):
    # An eighth record for an empty SAME chunk; all sizes and checksums fit.
    path, old, data = delta
    header = data[HEADER_BEGIN:108] + struct.pack("<I", stated) + data[112:HEADER_END]
    header += struct.pack("<IQQ", Method.SAME, 0, xxhash.xxh3_64_intdigest(b"")) * (actual - NUM_CHUNKS)
    head = data[:8] + struct.pack("<I", len(header)) + header + xxhash.xxh3_64_digest(header)[::-1]

    refuse(path, old, head + data[CHUNKS_BEGIN:], error=MalformedPayload, match="chunks, of 7")


@pytest.mark.parametrize("method", [7, 2**32 - 1])
def test_unknown_method_is_refused(delta, method):
    path, old, data = delta

    refuse(path, old, sealed(data, record(2), struct.pack("<I", method)), error=MalformedPayload, match="unknown")


@pytest.mark.parametrize("method", [Method.SAME, Method.GAPULP])
def test_difference_in_a_snapshot_is_refused(tmp_path, method):
    arena, path = random_arena(small_layout(), seed=1), tmp_path / "s"
    write_snapshot(path, arena)
    path.write_bytes(sealed(path.read_bytes(), record(0), struct.pack("<I", method)))
    staging = Arena(arena.layout)

    with pytest.raises(MalformedPayload, match="as a difference"):
        apply_payload(path, staging, expected_from_root=None)
    assert staging.digests() == Arena(arena.layout).digests()


def test_chunk_that_is_coded_in_more_bytes_than_it_has_is_refused_unread(delta):
    path, old, data = delta

    # A chunk of 50 elements of two bytes; the sixth of 25 elements of four.
    for number, num_bytes in ((0, 101), (0, 2**63), (5, 101)):
        damaged = sealed(data, record(number) + 4, struct.pack("<Q", num_bytes))
        refuse(path, old, damaged, error=LimitExceeded, match=f"in {num_bytes}")


def test_chunks_that_do_not_add_up_are_refused(delta):
    path, old, data = delta
    (num_bytes,) = struct.unpack_from("<Q", data, record(1) + 4)

    damaged = sealed(data, record(1) + 4, struct.pack("<Q", num_bytes - 1))
    refuse(path, old, damaged, error=MalformedPayload, match="add up")


def test_broken_chunk_under_correct_checksums_is_refused(delta):
    path, old, data = delta
    (num_bytes,) = struct.unpack_from("<Q", data, record(0) + 4)
    chunk = bytes([data[CHUNKS_BEGIN] ^ 1]) + data[CHUNKS_BEGIN + 1 : CHUNKS_BEGIN + num_bytes]
    damaged = data[:CHUNKS_BEGIN] + chunk + data[CHUNKS_BEGIN + num_bytes :]

    # The first field is the number of changes, or of wide ones, which the streams then contradict.
    assert struct.unpack_from("<I", data, record(0))[0] in (Method.GAPULP, Method.DENSE8)
    refuse(path, old, sealed(damaged, record(0) + 12, xxhash.xxh3_64_digest(chunk)[::-1]))


def test_file_that_shrinks_between_the_passes_is_refused(delta, monkeypatch):
    path, old, data = delta
    real = xxhash.xxh3_64_intdigest
    calls = []

    def shrink_after_the_first_pass(piece):
        calls.append(len(piece))
        if len(calls) == 1 + NUM_CHUNKS:
            path.write_bytes(data[: CHUNKS_BEGIN + 10])
        return real(piece)

    monkeypatch.setattr(xxhash, "xxh3_64_intdigest", shrink_after_the_first_pass)
    with pytest.raises(MalformedPayload, match="checksum"):
        apply_payload(path, old.copy(), expected_from_root=old.state_root())
