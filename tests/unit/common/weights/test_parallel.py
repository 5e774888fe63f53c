"""Threads change nothing but the time, and memory stays bounded for each of them."""

import threading
import tracemalloc

import numpy as np
import pytest

from heterorl.common.errors import CorruptData
from heterorl.common.process.threads import in_order, num_threads
from heterorl.common.weights.arena import CHUNK_ELEMENTS, Arena, Layout, TensorSpec
from heterorl.common.weights.codec import Method, apply_chunk, encode_chunk
from heterorl.common.weights.payload import apply_payload, write_delta, write_snapshot
from tests.support.arenas import changed_arena, random_arena, small_layout

LIMIT_BYTES = 20_000_000
CHUNK_BYTES = 2 * CHUNK_ELEMENTS


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_results_come_in_order_from_at_most_so_many_threads(threads):
    seen, ahead, given = set(), [], []

    def items():
        for number in range(40):
            ahead.append(number - len(given))
            yield number

    def work(number):
        seen.add(threading.get_ident())
        return 2 * number

    for result in in_order(work, items(), threads=threads):
        given += [result]

    assert given == [2 * number for number in range(40)]
    assert len(seen) <= threads
    assert max(ahead) <= threads
    assert (threading.get_ident() in seen) == (threads == 1)


@pytest.mark.parametrize("threads", [1, 4])
def test_first_error_in_order_is_raised(threads):
    def work(number):
        if number in (3, 5):
            raise ValueError(number)
        return number

    results = in_order(work, range(9), threads=threads)

    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="3"):
        next(results)


def test_no_configured_number_is_one_thread_for_each_core():
    assert num_threads(3) == 3
    assert num_threads(0) >= 1


def test_bytes_and_weights_do_not_depend_on_the_number_of_threads(tmp_path):
    layout = small_layout(chunk_elements=16)
    old = random_arena(layout, seed=1)
    new = changed_arena(old, seed=2, density=0.2)
    infos = [write_delta(tmp_path / f"d{n}", old, new, threads=n) for n in (1, 2, 5)]
    whole = [write_snapshot(tmp_path / f"s{n}", new, threads=n) for n in (1, 2, 5)]

    assert infos[0] == infos[1] == infos[2]
    assert whole[0] == whole[1] == whole[2]
    for n in (1, 2, 5):
        staging, fresh = old.copy(), Arena(layout)
        apply_payload(tmp_path / "d1", staging, expected_from_root=old.state_root(), threads=n)
        apply_payload(tmp_path / "s1", fresh, expected_from_root=None, threads=n)
        assert staging.state_root(threads=n) == fresh.state_root() == new.state_root()


def test_error_in_a_thread_reaches_the_caller(tmp_path):
    old = random_arena(small_layout(chunk_elements=16), seed=1)
    write_delta(tmp_path / "d", old, changed_arena(old, seed=2, density=0.2))
    data = bytearray((tmp_path / "d").read_bytes())
    data[-3] ^= 1
    (tmp_path / "d").write_bytes(data)

    with pytest.raises(CorruptData):
        apply_payload(tmp_path / "d", old.copy(), expected_from_root=old.state_root(), threads=3)


def peak_of(work):
    tracemalloc.start()
    try:
        result = work()
        return result, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def full_chunk(dtype):
    """A chunk of the usual length: bits of normal weights."""
    width = np.dtype(dtype).itemsize
    size = CHUNK_ELEMENTS if width <= 2 else CHUNK_BYTES // width
    generator = np.random.default_rng(0)
    values = (generator.standard_normal(size, np.float32) * np.float32(0.02)).view(np.int32)
    return values if width == 4 else (values >> (16 if width == 2 else 20)).astype(dtype)


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32])
@pytest.mark.parametrize(
    ("density", "is_wild"),
    [(0.013, False), (0.24, False), (0.59, True), (1.0, False), (1.0, True)],
    ids=["sparse", "a quarter", "at the limit, any steps", "all, small steps", "all, any steps"],
)
def test_a_chunk_needs_less_than_the_bound_whatever_changed(dtype, density, is_wild):
    old = full_chunk(dtype)
    generator = np.random.default_rng(1)
    new = old.copy()
    mask = generator.random(old.size, np.float32) < density
    steps = np.frombuffer(generator.bytes(old.nbytes), dtype) if is_wild else dtype(1)
    new[mask] += steps[mask] if is_wild else steps
    del mask, steps

    (method, data, _), encode_peak = peak_of(lambda: encode_chunk(old, new))
    state = old.copy()
    _, apply_peak = peak_of(lambda: apply_chunk(method, memoryview(data), state))

    assert np.array_equal(state, new)
    assert encode_peak < LIMIT_BYTES
    assert apply_peak + len(data) < LIMIT_BYTES


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32])
def test_a_whole_chunk_needs_less_than_the_bound(dtype):
    new = full_chunk(dtype)
    (method, data, _), encode_peak = peak_of(lambda: encode_chunk(None, new))
    state = np.zeros_like(new)
    _, apply_peak = peak_of(lambda: apply_chunk(method, memoryview(data), state))

    assert method in (Method.PLANES, Method.RAW)
    assert encode_peak < LIMIT_BYTES
    assert apply_peak + len(data) < LIMIT_BYTES


def test_memory_grows_with_threads_not_with_the_model(tmp_path):
    layout = Layout.build([TensorSpec(name="w", dtype="bf16", shape=(12 << 18,))], chunk_elements=1 << 18)
    old = random_arena(layout, seed=0)
    new = changed_arena(old, seed=1, density=0.3)
    scale = 20_000_000 * (1 << 18) / CHUNK_ELEMENTS

    for threads in (1, 3):
        _, peak = peak_of(lambda n=threads: write_delta(tmp_path / "d", old, new, threads=n))
        # Blocks of a fixed size beside what is in proportion to the chunk.
        assert peak < (threads + 1) * (scale + 3_000_000)
        staging = old.copy()
        _, peak = peak_of(
            lambda n=threads, s=staging: apply_payload(
                tmp_path / "d", s, expected_from_root=old.state_root(), threads=n
            )
        )
        assert peak < (threads + 1) * (scale + 3_000_000)
