"""The way back: exact for every width and every method that holds steps, refused for those that do not."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from heterorl.common.errors import MalformedPayload, NotReversible
from heterorl.common.weights.arena import Chunk, TensorSpec, zeros
from heterorl.common.weights.codec import Method, apply_chunk, encode_chunk, encode_composed
from heterorl.common.weights.compose import compose, negate, negate_chunk
from heterorl.common.weights.payload import apply_payload, file_digest, read_roots, write_delta, write_snapshot
from tests.support.arenas import random_arena, small_layout

MANY = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
WIDE = small_layout(
    chunk_elements=700,
    specs=[
        TensorSpec(name="a", dtype="bf16", shape=(900,)),
        TensorSpec(name="b", dtype="fp32", shape=(500,)),
        TensorSpec(name="c", dtype="int8", shape=(800,)),
    ],
)


def _random_steps(width, *, density, largest, seed):
    """Steps of a chunk, its type's extremes among them."""
    rng = np.random.default_rng(seed)
    steps = zeros(Chunk(width=width, start=0, stop=600))
    limits = np.iinfo(steps.dtype)
    bound = min(largest, limits.max)
    mask = rng.random(steps.size) < density
    steps[mask] = rng.integers(-bound, bound, steps.size, endpoint=True).astype(steps.dtype)[mask]
    if density == 1.0:
        steps[:2] = limits.min, limits.max
    return steps


@MANY
@given(
    width=st.sampled_from([1, 2, 4]),
    densities=st.tuples(*[st.sampled_from([0.0, 0.05, 0.4, 1.0])] * 2),
    largest=st.sampled_from([1, 3, 100, 2**31 - 1]),
    seed=st.integers(0, 2**32 - 1),
)
def test_negated_sum_of_two_deltas_leads_from_the_end_to_the_start(width, densities, largest, seed):
    first, second = (
        _random_steps(width, density=density, largest=largest, seed=seed + number)
        for number, density in enumerate(densities)
    )
    rng = np.random.default_rng(seed)
    start = np.frombuffer(rng.bytes(first.nbytes), first.dtype).copy()
    end = start + first + second
    method, data = encode_composed(first + second, is_whole=False)

    back, negated = negate_chunk(method, data, Chunk(width=width, start=0, stop=600))

    values = end.copy()
    apply_chunk(back, memoryview(negated), values)
    np.testing.assert_array_equal(values, start)
    # Canonical: the bytes of the direct difference, wherever that is coded as steps.
    direct = encode_chunk(end, start)
    if direct[0] not in (Method.PLANES, Method.RAW):
        assert (back, negated) == direct[:2]
    assert negate_chunk(back, negated, Chunk(width=width, start=0, stop=600)) == (method, data)


@pytest.mark.parametrize(
    ("density", "largest", "method"),
    [(0.0, 1, Method.SAME), (0.05, 1, Method.GAPULP), (1.0, 5, Method.DENSE8), (1.0, 2**31 - 1, Method.STEP_RAW)],
)
def test_property_above_reaches_every_method_of_steps(density, largest, method):
    steps = _random_steps(4, density=density, largest=largest, seed=1)

    assert encode_composed(steps, is_whole=False)[0] is method


def _steps_on(arena, *, seed):
    other = arena.copy()
    for number in range(other.num_chunks):
        chunk = other.chunk(number)
        chunk += _random_like(chunk, seed=seed + number)
    return other


def _random_like(chunk, *, seed):
    rng = np.random.default_rng(seed)
    return np.where(rng.random(chunk.size) < 0.1, rng.choice([-2, -1, 1, 2], chunk.size), 0).astype(chunk.dtype)


def test_negated_payload_of_a_merged_delta_leads_back_and_is_the_merge_of_the_negated_ones(tmp_path):
    states = [random_arena(WIDE, seed=1)]
    for number in range(3):
        states.append(_steps_on(states[-1], seed=10 * number))
    forward = [tmp_path / f"f{number}" for number in range(3)]
    for path, old, new in zip(forward, states, states[1:], strict=False):
        write_delta(path, old, new)
    shape = {"layout_id": WIDE.layout_id, "chunks": WIDE.chunks}
    compose(forward, tmp_path / "merged", **shape)

    result = negate(tmp_path / "merged", tmp_path / "back", **shape)

    staging = states[-1].copy()
    apply_payload(tmp_path / "back", staging, expected_from_root=states[-1].state_root())
    assert staging.state_root() == states[0].state_root()
    assert read_roots(tmp_path / "back") == (states[-1].state_root(), states[0].state_root())
    assert (result.digest, result.num_bytes) == (file_digest(tmp_path / "back"), (tmp_path / "back").stat().st_size)
    singles = [tmp_path / f"b{number}" for number in range(3)]
    for path, single in zip(forward, singles, strict=True):
        negate(path, single, **shape)
    compose(singles[::-1], tmp_path / "merged-back", **shape)
    direct = write_delta(tmp_path / "direct", states[-1], states[0])
    assert file_digest(tmp_path / "merged-back") == result.digest == direct.digest


def test_what_holds_no_steps_is_refused_by_its_name_and_leaves_no_file(tmp_path):
    old = random_arena(WIDE, seed=1)
    shape = {"layout_id": WIDE.layout_id, "chunks": WIDE.chunks}
    write_snapshot(tmp_path / "snapshot", old)
    # All bits change: the state itself is the smallest.
    write_delta(tmp_path / "dense", old, random_arena(WIDE, seed=2))

    for name, problem in (("snapshot", "a snapshot"), ("dense", "a (PLANES|RAW) chunk")):
        with pytest.raises(NotReversible, match=problem):
            negate(tmp_path / name, tmp_path / "back", **shape)
    assert not (tmp_path / "back").exists()
    for method in (Method.PLANES, Method.RAW):
        with pytest.raises(NotReversible, match=f"a {method.name} chunk"):
            negate_chunk(method, b"", WIDE.chunks[0])


def test_damage_is_told_before_anything_is_written(tmp_path):
    states = [random_arena(WIDE, seed=1)]
    states.append(_steps_on(states[0], seed=5))
    write_delta(tmp_path / "delta", *states)
    data = bytearray((tmp_path / "delta").read_bytes())
    data[-3] ^= 1
    (tmp_path / "delta").write_bytes(data)

    with pytest.raises(MalformedPayload):
        negate(tmp_path / "delta", tmp_path / "back", layout_id=WIDE.layout_id, chunks=WIDE.chunks)
    assert not (tmp_path / "back").exists()
