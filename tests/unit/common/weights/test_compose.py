"""Composed deltas: exactly what the chain does, the same bytes in any bracketing, memory of a few chunks."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from heterorl.common.errors import LimitExceeded, MalformedPayload, StateMismatch
from heterorl.common.weights.arena import Arena, Layout, TensorSpec, zeros
from heterorl.common.weights.codec import Method, apply_chunk, encode_chunk, encode_composed
from heterorl.common.weights.compose import MAX_PAYLOADS, compose
from heterorl.common.weights.payload import (
    Header,
    apply_payload,
    file_digest,
    read_header,
    read_roots,
    write_delta,
    write_file,
    write_snapshot,
)
from tests.support.arenas import changed_arena, random_arena, random_bits, small_layout

LAYOUT = small_layout()
MANY = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def joined(directory, paths, name="out", layout=LAYOUT):
    """Compose and return (what was written, the file)."""
    target = directory / name
    return compose(paths, target, layout_id=layout.layout_id, chunks=layout.chunks), target


def chain(directory, states, name="step"):
    """One delta between each two states."""
    paths = [directory / f"{name}-{number}" for number in range(len(states) - 1)]
    for path, old, new in zip(paths, states, states[1:], strict=False):
        write_delta(path, old, new)
    return paths


def methods(path, layout=LAYOUT):
    with path.open("rb") as file:
        return [record.method for record in read_header(file, layout_id=layout.layout_id, chunks=layout.chunks).records]


def assert_equal(left, right):
    for number in range(left.num_chunks):
        np.testing.assert_array_equal(left.chunk(number), right.chunk(number))


@MANY
@given(
    seed=st.integers(0, 2**32 - 1),
    densities=st.lists(st.sampled_from([0.0, 0.02, 0.2, 0.7, 1.0]), min_size=1, max_size=6),
    chunk_elements=st.sampled_from([1, 7, 50, 1000]),
    is_wild=st.booleans(),
)
def test_composed_payload_rebuilds_what_the_chain_does(tmp_path_factory, seed, densities, chunk_elements, is_wild):
    directory = tmp_path_factory.mktemp("compose")
    layout = small_layout(chunk_elements=chunk_elements)
    states = [random_arena(layout, seed=seed)]
    for number, density in enumerate(densities):
        step = wild if is_wild else small
        states.append(step(states[-1], seed=seed + number + 1, density=density))
    paths = chain(directory, states)

    result, path = joined(directory, paths, layout=layout)

    staging = states[0].copy()
    apply_payload(path, staging, expected_from_root=states[0].state_root())
    assert_equal(staging, states[-1])
    assert read_roots(path) == (states[0].state_root(), states[-1].state_root())
    assert (result.digest, result.num_bytes) == (file_digest(path), path.stat().st_size)
    assert staging.view("head").base is not None
    np.testing.assert_array_equal(staging.view("head"), staging.view("embed"))


def wild(arena, *, seed, density):
    """Any other bits: steps that wrap, and chunks that the learner stores whole."""
    return changed_arena(arena, seed=seed, density=density)


def small(arena, *, seed, density):
    """Steps of -2..2, which wrap only at the ends of the width."""
    generator = np.random.default_rng(seed)
    other = arena.copy()
    for number in range(other.num_chunks):
        chunk = other.chunk(number)
        mask = generator.random(chunk.size) < density
        chunk[mask] += generator.integers(-2, 3, int(mask.sum())).astype(chunk.dtype)
    return other


@MANY
@given(
    seed=st.integers(0, 2**32 - 1),
    densities=st.lists(st.sampled_from([0.02, 0.3, 0.9]), min_size=3, max_size=6),
    data=st.data(),
)
@pytest.mark.slow
def test_composing_in_any_bracketing_gives_the_same_bytes(tmp_path_factory, seed, densities, data):
    directory = tmp_path_factory.mktemp("brackets")
    states = [random_arena(LAYOUT, seed=seed)]
    for number, density in enumerate(densities):
        step = data.draw(st.sampled_from([wild, small]))
        states.append(step(states[-1], seed=seed + number + 1, density=density))
    paths = chain(directory, states)
    _, flat = joined(directory, paths, "flat")

    # Join two neighbours, drawn at random, until one is left.
    for number in range(len(paths) - 1):
        at = data.draw(st.integers(0, len(paths) - 2))
        _, pair = joined(directory, paths[at : at + 2], f"pair-{number}")
        paths[at : at + 2] = [pair]

    assert paths[0].read_bytes() == flat.read_bytes()


def test_sparse_composition_is_the_direct_difference_byte_for_byte(tmp_path):
    layout = Layout.build([TensorSpec(name="w", dtype="bf16", shape=(20_000,))], chunk_elements=8000)
    states = [random_arena(layout, seed=1)]
    for number in range(5):
        states.append(small(states[-1], seed=number, density=0.02))
    write_delta(tmp_path / "direct", states[0], states[-1])

    _, path = joined(tmp_path, chain(tmp_path, states), layout=layout)

    assert path.read_bytes() == (tmp_path / "direct").read_bytes()


@pytest.mark.parametrize("dtype", [np.int16, np.int32])
def test_steps_wrap_in_the_width_of_the_element(dtype):
    largest = np.iinfo(dtype).max
    # +largest twice and +2 are 2^bits: nothing; 4 times +largest is -4.
    for steps, expected in [([largest, largest, 2], 0), ([largest] * 4, -4)]:
        values = np.zeros(500, dtype)
        for step in steps:
            old = np.zeros(500, dtype)
            new = old.copy()
            new[3] = step
            method, data, _ = encode_chunk(old, new)
            apply_chunk(method, memoryview(data), values)
        method, data = encode_composed(values, is_whole=False)
        result = np.zeros(500, dtype)
        apply_chunk(method, memoryview(data), result)
        assert (int(result[3]), np.count_nonzero(result)) == (expected, int(expected != 0))


def test_steps_that_cancel_vanish_and_untouched_chunks_stay_same(tmp_path):
    first = random_arena(LAYOUT, seed=1)
    second = first.copy()
    second.chunk(1)[[3, 9]] += 5
    third = second.copy()
    third.chunk(1)[[3, 9]] -= 5

    _, path = joined(tmp_path, chain(tmp_path, [first, second, third]))
    _, half_path = joined(tmp_path, [tmp_path / "step-0"], "half")

    assert methods(path) == [Method.SAME] * len(LAYOUT.chunks)
    assert len(set(read_roots(path))) == 1
    assert methods(half_path).count(Method.SAME) == len(LAYOUT.chunks) - 1


def test_chunk_stored_whole_overrides_what_was_before_and_takes_what_comes_after(tmp_path):
    states = [random_arena(LAYOUT, seed=1)]
    states.append(small(states[-1], seed=2, density=0.05))
    states.append(wild(states[-1], seed=3, density=1.0))  # stored whole: all bits are new
    states.append(small(states[-1], seed=4, density=0.05))
    paths = chain(tmp_path, states)
    assert {Method.RAW} >= set(methods(paths[1])) - {Method.PLANES}

    _, path = joined(tmp_path, paths)
    _, later = joined(tmp_path, paths[1:], "later")

    assert set(methods(path)) <= {Method.RAW, Method.PLANES}
    # What stores values does not need the values before: any state leads to the same end.
    index = 112 + 20 * len(LAYOUT.chunks)
    mine, other = path.read_bytes(), later.read_bytes()
    assert mine[76:index] == other[76:index], "only the root that it starts from and the checksum over it differ"
    assert mine[index + 8 :] == other[index + 8 :]
    staging = states[0].copy()
    apply_payload(path, staging, expected_from_root=states[0].state_root())
    assert_equal(staging, states[-1])


def test_snapshot_with_deltas_is_a_snapshot(tmp_path):
    states = [random_arena(LAYOUT, seed=1)]
    states += [small(states[0], seed=2, density=0.1)]
    write_snapshot(tmp_path / "first", states[0])
    write_snapshot(tmp_path / "second", states[1])
    paths = chain(tmp_path, states)

    _, path = joined(tmp_path, [tmp_path / "first", *paths])

    assert path.read_bytes() == (tmp_path / "second").read_bytes()
    staging = Arena(LAYOUT)
    apply_payload(path, staging, expected_from_root=None)
    assert_equal(staging, states[1])


@pytest.mark.parametrize("dtype", [np.int16, np.int32])
@pytest.mark.parametrize(
    ("spread", "method"), [(3, Method.DENSE8), (None, Method.STEP_RAW)], ids=["small steps", "any steps"]
)
def test_dense_steps_never_exceed_the_chunk(dtype, spread, method):
    generator = np.random.default_rng(1)
    values = np.zeros(5000, dtype)
    if spread is None:
        values[:] = random_bits(generator, values)
    else:
        values[:] = generator.integers(-spread, spread + 1, values.size)

    chosen, data = encode_composed(values, is_whole=False)

    assert chosen == method
    assert len(data) <= values.nbytes
    # Entropy of 7 equal values is 2.8 bits, of one plane; the others are zeros.
    assert spread is None or len(data) < values.size * 3.2 / 8 + 200
    result = random_bits(generator, values).copy()
    expected = result + values
    apply_chunk(chosen, memoryview(data), result)
    np.testing.assert_array_equal(result, expected)


def test_impossible_dense_steps_are_refused():
    chunk = np.zeros(10, np.int16)
    for method, data in [(Method.STEP_RAW, b"0" * 19), (Method.DENSE8, b"0" * 3), (Method.DENSE8, b"")]:
        with pytest.raises((MalformedPayload, LimitExceeded)):
            apply_chunk(method, memoryview(data), chunk)
    assert not chunk.any()


def test_payloads_that_do_not_follow_are_refused_and_leave_no_file(tmp_path):
    states = [random_arena(LAYOUT, seed=seed) for seed in range(3)]
    paths = chain(tmp_path, states)
    write_snapshot(tmp_path / "snapshot", states[1])
    other = small_layout(chunk_elements=49)
    before = sorted(tmp_path.iterdir())

    for wrong in ([paths[1], paths[0]], [paths[0], paths[0]], [paths[0], tmp_path / "snapshot"]):
        with pytest.raises(StateMismatch):
            joined(tmp_path, wrong)
    with pytest.raises(StateMismatch):
        joined(tmp_path, paths, layout=other)
    for count in (0, MAX_PAYLOADS + 1):
        with pytest.raises(ValueError, match="payloads to compose"):
            joined(tmp_path, paths[:1] * count)
    assert sorted(tmp_path.iterdir()) == before


@MANY
@given(position=st.integers(0, 10_000), data=st.data())
def test_damaged_input_never_becomes_a_payload(tmp_path_factory, position, data):
    directory = tmp_path_factory.mktemp("damage")
    states = [random_arena(LAYOUT, seed=1)]
    for number in range(3):
        states.append(small(states[-1], seed=number, density=0.2))
    paths = chain(directory, states)
    victim = data.draw(st.sampled_from(paths))
    content = bytearray(victim.read_bytes())
    content[position % len(content)] ^= 1 << data.draw(st.integers(0, 7))
    victim.write_bytes(content)

    with pytest.raises((MalformedPayload, LimitExceeded, StateMismatch)):
        joined(directory, paths)
    assert sorted(directory.iterdir()) == sorted(paths)


def test_end_of_the_work_between_two_chunks_leaves_no_file(tmp_path):
    states = [random_arena(LAYOUT, seed=1)]
    states.append(small(states[0], seed=2, density=0.2))
    paths = chain(tmp_path, states)
    calls = []

    def stop():
        calls.append(1)
        if len(calls) == 3:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        compose(paths, tmp_path / "out", layout_id=LAYOUT.layout_id, chunks=LAYOUT.chunks, on_chunk=stop)
    assert sorted(tmp_path.iterdir()) == paths


def synthetic(path, layout, *, seed, density):
    """A delta whose chunks all take the same steps, written without holding weights."""
    generator = np.random.default_rng(seed)
    old = zeros(layout.chunks[0])
    new = old + ((generator.random(old.size) < density) * generator.choice([-1, 1], old.size)).astype(old.dtype)
    method, data, _ = encode_chunk(old, new)
    roots = [f"{seed:064x}", f"{seed + 1:064x}"]

    def header(records):
        return Header(layout_id=layout.layout_id, from_root=roots[0], to_root=roots[1], records=records)

    num = len(layout.chunks)
    write_file(path, [(method, data)] * num, num_chunks=num, header=header)
    return path


def peak_bytes(directory, layout, paths):
    tracemalloc.start()
    try:
        joined(directory, paths, layout=layout)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("density", "chunks"), [(0.014, 2.5), (0.25, 6.5)])
def test_memory_is_that_of_a_few_chunks_whatever_the_size_of_the_model(tmp_path, density, chunks):
    """The bound is in chunks: an accumulator of one chunk, the streams of its changes, and blocks of a fixed size."""
    elements = 1 << 18
    peaks = []
    for count in (2, 40):
        layout = Layout.build([TensorSpec(name="w", dtype="bf16", shape=(count, elements))], chunk_elements=elements)
        paths = [synthetic(tmp_path / f"{count}-{seed}", layout, seed=seed, density=density) for seed in range(1, 5)]
        peaks.append(peak_bytes(tmp_path, layout, paths))
    chunk_bytes = 2 * elements

    assert peaks[1] < chunks * chunk_bytes
    assert peaks[1] < peaks[0] + chunk_bytes // 2, "the peak does not grow with the model"


ALL_WIDTHS = Layout.build(
    [
        TensorSpec(name="a", dtype="fp8_e4m3", shape=(300,)),
        TensorSpec(name="b", dtype="int8", shape=(77,)),
        TensorSpec(name="c", dtype="bf16", shape=(400,)),
        TensorSpec(name="d", dtype="fp32", shape=(210,)),
    ],
    chunk_elements=100,
)


@MANY
@given(seed=st.integers(0, 2**32 - 1), densities=st.lists(st.sampled_from([0.02, 0.3, 0.9]), min_size=1, max_size=4))
def test_all_widths_compose_to_what_the_chain_does(tmp_path_factory, seed, densities):
    directory = tmp_path_factory.mktemp("widths")
    states = [random_arena(ALL_WIDTHS, seed=seed)]
    for number, density in enumerate(densities):
        states.append((small if number % 2 else wild)(states[-1], seed=seed + number, density=density))

    _, path = joined(directory, chain(directory, states), layout=ALL_WIDTHS)

    staging = states[0].copy()
    apply_payload(path, staging, expected_from_root=states[0].state_root())
    assert_equal(staging, states[-1])
    assert {chunk.width for chunk in ALL_WIDTHS.chunks} == {1, 2, 4}
