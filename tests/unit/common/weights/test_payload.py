"""Payload files: verified before use, exact after it."""

import itertools

import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from heterorl.common.errors import CorruptData, StateMismatch
from heterorl.common.types.policy import Manifest
from heterorl.common.weights.arena import Arena, Layout, TensorSpec, state_root
from heterorl.common.weights.manifest import build_manifest, verify_child, verify_state
from heterorl.common.weights.payload import (
    FRAME_BYTES,
    SLOW_BYTES,
    SLOW_S,
    FrameCutter,
    apply_payload,
    file_digest,
    write_delta,
    write_snapshot,
)

SPECS = [
    TensorSpec(name="norm", dtype="fp32", shape=(7,)),
    TensorSpec(name="embed", dtype="bf16", shape=(11, 3)),
    TensorSpec(name="head", dtype="bf16", shape=(11, 3), alias_of="embed"),
    TensorSpec(name="scale", dtype="fp16", shape=(5, 5)),
    TensorSpec(name="empty", dtype="bf16", shape=(0, 4)),
]
LAYOUT = Layout.build(SPECS, chunk_elements=10)


def filled(seed, layout=LAYOUT):
    arena, random = Arena(layout), np.random.default_rng(seed)
    for number in range(arena.num_chunks):
        chunk = arena.chunk(number)
        info = np.iinfo(chunk.dtype)
        chunk[:] = random.integers(info.min, info.max, chunk.size, dtype=chunk.dtype, endpoint=True)
    return arena


def stepped(arena, seed, *, share=0.2):
    new, random = arena.copy(), np.random.default_rng(seed)
    for number in range(new.num_chunks):
        chunk = new.chunk(number)
        chunk += random.choice([0, 1, -1], chunk.size, p=[1 - share, share / 2, share / 2]).astype(chunk.dtype)
    return new


def test_layout_is_sorted_cut_into_chunks_and_stores_aliases_once():
    # Width 2: embed 33 + scale 25 = 58 elements -> 6 chunks of 10; width 4: 7 elements -> 2 chunks of 5.
    assert [spec.name for spec in LAYOUT.specs] == ["embed", "empty", "head", "norm", "scale"]
    assert len(LAYOUT.chunks) == 8
    assert LAYOUT.num_elements == 65
    assert LAYOUT.full_bytes == 58 * 2 + 7 * 4
    arena = Arena(LAYOUT)
    arena.view("head")[2, 1] = 5
    assert arena.view("embed")[2, 1] == 5
    assert np.shares_memory(arena.view("embed"), arena.view("head"))


def test_layout_id_depends_on_every_part_of_the_table():
    base = [TensorSpec(name="a", dtype="bf16", shape=(2, 3)), TensorSpec(name="b", dtype="bf16", shape=(2, 3))]
    others = [
        [TensorSpec(name="a", dtype="bf16", shape=(3, 2)), base[1]],
        [TensorSpec(name="a", dtype="fp16", shape=(2, 3)), base[1]],
        [TensorSpec(name="c", dtype="bf16", shape=(2, 3)), base[1]],
        [base[0], TensorSpec(name="b", dtype="bf16", shape=(2, 3), alias_of="a")],
    ]

    ids = {Layout.build(specs).layout_id for specs in [base, *others]} | {
        Layout.build(base, chunk_elements=4).layout_id
    }

    assert len(ids) == 6
    assert Layout.build(reversed(base)).layout_id == Layout.build(base).layout_id


@pytest.mark.parametrize(
    "specs",
    [
        [SPECS[0], SPECS[0]],
        [TensorSpec(name="x", dtype="bf16", shape=(1,), alias_of="gone")],
        [SPECS[1], TensorSpec(name="x", dtype="bf16", shape=(3, 11), alias_of="embed")],
        [SPECS[1], SPECS[2], TensorSpec(name="x", dtype="bf16", shape=(11, 3), alias_of="head")],
    ],
)
def test_layout_refuses_impossible_tables(specs):
    with pytest.raises(ValueError, match=r"repeat|alias"):
        Layout.build(specs)


def test_snapshot_rebuilds_every_tensor_from_nothing(tmp_path):
    # T4: an anchor contains all parameters, also those that never change.
    arena = filled(1)
    info = write_snapshot(tmp_path / "snapshot", arena)
    staging = Arena(LAYOUT)

    apply_payload(tmp_path / "snapshot", staging, expected_from_root=None)

    assert staging.state_root() == arena.state_root() == info.to_root
    assert info.digest == file_digest(tmp_path / "snapshot")
    assert info.num_bytes == (tmp_path / "snapshot").stat().st_size
    assert info.num_changed == info.num_elements == 65


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 2**32), st.integers(1, 6), st.floats(0, 1))
def test_chain_of_deltas_reaches_the_same_root_as_the_direct_difference(tmp_path, seed, length, share):
    states = [filled(seed)]
    for number in range(length):
        states.append(stepped(states[-1], seed + number, share=share))
    staging = states[0].copy()

    for old, new in itertools.pairwise(states):
        write_delta(tmp_path / "delta", old, new)
        apply_payload(tmp_path / "delta", staging, expected_from_root=old.state_root())
    write_delta(tmp_path / "direct", states[0], states[-1])
    direct = states[0].copy()
    apply_payload(tmp_path / "direct", direct, expected_from_root=states[0].state_root())

    assert staging.state_root() == direct.state_root() == states[-1].state_root()


def test_delta_of_another_state_layout_or_kind_is_refused(tmp_path):
    old = filled(1)
    write_delta(tmp_path / "delta", old, stepped(old, 2))
    write_snapshot(tmp_path / "snapshot", old)
    other = Layout.build(SPECS[:2], chunk_elements=10)

    with pytest.raises(StateMismatch, match="starts from"):
        apply_payload(tmp_path / "delta", old.copy(), expected_from_root="1" * 64)
    with pytest.raises(StateMismatch, match="starts from"):
        apply_payload(tmp_path / "delta", Arena(LAYOUT), expected_from_root=None)
    with pytest.raises(StateMismatch, match="starts from"):
        apply_payload(tmp_path / "snapshot", old.copy(), expected_from_root=old.state_root())
    with pytest.raises(CorruptData):
        apply_payload(tmp_path / "delta", Arena(other), expected_from_root=None)
    with pytest.raises(ValueError, match="layout"):
        write_delta(tmp_path / "delta", old, Arena(other))


def test_layout_with_as_many_chunks_is_refused_by_its_id(tmp_path):
    twin = Layout.build([TensorSpec(name="x", dtype="bf16", shape=(58,)), SPECS[0]], chunk_elements=10)
    write_snapshot(tmp_path / "snapshot", filled(1))

    with pytest.raises(StateMismatch, match="another layout"):
        apply_payload(tmp_path / "snapshot", Arena(twin), expected_from_root=None)


def test_every_flipped_byte_and_every_cut_is_detected(tmp_path):
    old = filled(1)
    write_delta(tmp_path / "delta", old, stepped(old, 2))
    good = (tmp_path / "delta").read_bytes()
    broken = tmp_path / "broken"

    for position in range(len(good)):
        data = bytearray(good)
        data[position] ^= 0x10
        broken.write_bytes(data)
        with pytest.raises(CorruptData):
            apply_payload(broken, old.copy(), expected_from_root=old.state_root())
    for length in [*range(0, len(good), 7), len(good) - 1]:
        broken.write_bytes(good[:length])
        with pytest.raises(CorruptData):
            apply_payload(broken, old.copy(), expected_from_root=old.state_root())
    broken.write_bytes(good + b"x")
    with pytest.raises(CorruptData):
        apply_payload(broken, old.copy(), expected_from_root=old.state_root())


def manifest(arena, info, *, version=1, parent=0, parent_digest="p" * 64, epoch=1, run_id="run") -> Manifest:
    return build_manifest(
        run_id=run_id,
        epoch=epoch,
        version=version,
        parent_version=parent,
        parent_digest=parent_digest,
        layout=arena.layout,
        step=version,
        info=info,
        payloads=(),
    )


def test_state_is_verified_chunk_by_chunk_against_the_manifest(tmp_path):
    arena = filled(1)
    stated = manifest(arena, write_snapshot(tmp_path / "s", arena))
    verify_state(stated, arena)

    wrong = arena.copy()
    wrong.chunk(3)[2] += 1
    with pytest.raises(StateMismatch, match="chunk 3"):
        verify_state(stated, wrong)
    with pytest.raises(StateMismatch, match="layout"):
        verify_state(stated, Arena(Layout.build(SPECS)))
    import dataclasses

    with pytest.raises(StateMismatch, match="chunks"):
        verify_state(dataclasses.replace(stated, chunk_digests=stated.chunk_digests[1:]), arena)
    with pytest.raises(StateMismatch, match="root"):
        verify_state(dataclasses.replace(stated, state_root="0" * 64), arena)
    assert stated.state_root == state_root(LAYOUT.layout_id, arena.digests())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, ""),
        ({"run_id": "other"}, "run"),
        ({"parent": 5}, "parent"),
        ({"parent_digest": "q" * 64}, "parent"),
        ({"version": 1}, "back"),
        ({"epoch": 1}, "back"),
    ],
)
def test_child_must_follow_its_parent(tmp_path, change, message):
    arena = filled(1)
    info = write_snapshot(tmp_path / "s", arena)
    parent = manifest(arena, info, version=1, epoch=2)
    child = manifest(arena, info, **{"version": 2, "parent": 1, "parent_digest": "d" * 64, "epoch": 2, **change})

    if message:
        with pytest.raises(StateMismatch, match=message):
            verify_child(parent=parent, parent_digest="d" * 64, child=child)
    else:
        verify_child(parent=parent, parent_digest="d" * 64, child=child)


def test_snapshot_that_hides_a_difference_is_refused(tmp_path):
    old = filled(1)
    write_delta(tmp_path / "delta", old, stepped(old, 2))
    data = bytearray((tmp_path / "delta").read_bytes())
    # magic 8, size 4, layout id 32, then the root it starts from
    data[44:76] = bytes(32)
    size = int.from_bytes(data[8:12], "little")
    data[12 + size : 20 + size] = xxhash.xxh3_64_intdigest(bytes(data[12 : 12 + size])).to_bytes(8, "little")
    (tmp_path / "delta").write_bytes(data)

    with pytest.raises(CorruptData, match="coded as a difference"):
        apply_payload(tmp_path / "delta", Arena(LAYOUT), expected_from_root=None)


def test_frames_are_small_while_a_block_takes_a_second():
    now = [0.0]
    cutter = FrameCutter(lambda: now[0])

    def sizes(block_s):
        frames = []
        for frame in cutter.cut(bytes(FRAME_BYTES)):
            frames.append(len(frame))
            now[0] += block_s * len(frame) / FRAME_BYTES
        assert sum(frames) == FRAME_BYTES
        return frames[0]

    # The first block shows how fast the line is, and each later one the next.
    assert [sizes(block_s) for block_s in (SLOW_S, 0.5, 0.5, SLOW_S, 9.0, 0.5)] == [
        SLOW_BYTES, SLOW_BYTES, FRAME_BYTES, FRAME_BYTES, SLOW_BYTES, SLOW_BYTES,
    ]  # fmt: skip
