"""Payload files lead from state to state, exactly, and say what they did."""

import itertools
import os
import struct
from pathlib import Path

import blake3
import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from heterorl.common.errors import StateMismatch
from heterorl.common.weights.arena import Arena, Layout, TensorSpec
from heterorl.common.weights.payload import (
    NO_ROOT,
    PayloadInfo,
    apply_payload,
    file_digest,
    write_delta,
    write_snapshot,
)
from tests.support.arenas import SPECS, changed_arena, random_arena, small_layout


@pytest.mark.parametrize("chunk_elements", [1, 7, 50, 222, 1000])
def test_snapshot_rebuilds_the_state_whatever_staging_held(tmp_path, chunk_elements):
    layout = small_layout(chunk_elements=chunk_elements)
    arena, staging = random_arena(layout, seed=1), random_arena(layout, seed=2)

    info = write_snapshot(tmp_path / "s", arena)
    apply_payload(tmp_path / "s", staging, expected_from_root=None)

    assert staging.state_root() == arena.state_root() == info.to_root
    assert (info.num_changed, info.num_elements) == (256, 256)


@pytest.mark.parametrize("density", [0.0, 0.01, 0.3, 1.0])
@pytest.mark.parametrize("chunk_elements", [1, 7, 50, 1000])
def test_delta_leads_to_the_new_state(tmp_path, chunk_elements, density):
    old = random_arena(small_layout(chunk_elements=chunk_elements), seed=1)
    new = changed_arena(old, seed=3, density=density)
    staging = old.copy()

    info = write_delta(tmp_path / "d", old, new)
    apply_payload(tmp_path / "d", staging, expected_from_root=old.state_root())

    assert staging.digests() == new.digests() == info.chunk_digests
    assert info.num_changed == sum(
        np.count_nonzero(old.chunk(number) != new.chunk(number)) for number in range(old.num_chunks)
    )


def test_change_of_a_tied_tensor_travels_once_and_reaches_both_names(tmp_path):
    old = random_arena(small_layout(), seed=1)
    new, staging = old.copy(), old.copy()
    new.view("head")[3, 3] ^= 1

    assert write_delta(tmp_path / "d", old, new).num_changed == 1
    apply_payload(tmp_path / "d", staging, expected_from_root=old.state_root())

    assert np.array_equal(staging.view("embed"), new.view("head"))


def test_info_names_the_file_by_its_bytes(tmp_path):
    info = write_snapshot(tmp_path / "s", random_arena(small_layout(), seed=1))
    data = (tmp_path / "s").read_bytes()

    assert info == PayloadInfo(
        digest=blake3.blake3(data).hexdigest(),
        num_bytes=len(data),
        num_changed=256,
        num_elements=256,
        to_root=info.to_root,
        chunk_digests=info.chunk_digests,
    )
    assert file_digest(tmp_path / "s") == info.digest


def test_file_follows_its_byte_table(tmp_path):
    old = random_arena(small_layout(), seed=1)
    new = changed_arena(old, seed=3)
    write_delta(tmp_path / "d", old, new)
    data = (tmp_path / "d").read_bytes()

    # Seven chunks: five of two-byte elements, two of four-byte ones.
    assert data[:12] == b"HRLW0001" + (100 + 20 * 7).to_bytes(4, "little")
    assert data[12:44].hex() == old.layout.layout_id
    assert data[44:76].hex() == old.state_root()
    assert data[76:108].hex() == new.state_root()
    assert data[108:112] == (7).to_bytes(4, "little")
    assert data[252:260] == xxhash.xxh3_64_intdigest(data[12:252]).to_bytes(8, "little")
    position = 260
    for number in range(7):
        method, size, checksum = struct.unpack_from("<IQQ", data, 112 + 20 * number)
        assert method in (0, 1, 3, 4, 5)
        assert xxhash.xxh3_64_intdigest(data[position : position + size]) == checksum
        position += size
    assert position == len(data)


@given(
    seeds=st.lists(st.tuples(st.integers(0, 1000), st.sampled_from([0.0, 0.02, 0.5, 1.0])), min_size=1, max_size=6),
    chunk_elements=st.sampled_from([9, 64, 300]),
)
def test_chain_of_deltas_leads_where_a_direct_one_and_a_snapshot_do(tmp_path_factory, seeds, chunk_elements):
    directory = tmp_path_factory.mktemp("chain")
    states = [random_arena(small_layout(chunk_elements=chunk_elements), seed=0)]
    for seed, density in seeds:
        states.append(changed_arena(states[-1], seed=seed, density=density))
    chained, direct, fresh = states[0].copy(), states[0].copy(), Arena(states[0].layout)

    for old, new in itertools.pairwise(states):
        write_delta(directory / "step", old, new)
        apply_payload(directory / "step", chained, expected_from_root=old.state_root())
    write_delta(directory / "direct", states[0], states[-1])
    apply_payload(directory / "direct", direct, expected_from_root=states[0].state_root())
    write_snapshot(directory / "whole", states[-1])
    apply_payload(directory / "whole", fresh, expected_from_root=None)

    assert chained.state_root() == direct.state_root() == fresh.state_root() == states[-1].state_root()


def test_delta_does_not_apply_to_another_state(tmp_path):
    old = random_arena(small_layout(), seed=1)
    new = changed_arena(old, seed=3)
    write_delta(tmp_path / "d", old, new)
    staging = new.copy()

    for root in (new.state_root(), NO_ROOT, None):
        with pytest.raises(StateMismatch, match="starts from"):
            apply_payload(tmp_path / "d", staging, expected_from_root=root)
    assert staging.digests() == new.digests()


def test_snapshot_does_not_apply_as_a_delta(tmp_path):
    arena = random_arena(small_layout(), seed=1)
    write_snapshot(tmp_path / "s", arena)

    with pytest.raises(StateMismatch, match="starts from"):
        apply_payload(tmp_path / "s", arena.copy(), expected_from_root=arena.state_root())


@pytest.mark.parametrize(
    "layout",
    [
        small_layout(chunk_elements=51),
        small_layout(specs=SPECS[:-1]),
        small_layout(specs=[*SPECS[:-1], TensorSpec(name="scale", dtype="fp32", shape=(1,))]),
    ],
    ids=["cut elsewhere", "tensor gone", "shape"],
)
def test_layout_change_is_refused(tmp_path, layout):
    arena, other = random_arena(small_layout(), seed=1), random_arena(layout, seed=1)

    with pytest.raises(ValueError, match="layout"):
        write_delta(tmp_path / "d", arena, other)
    assert list(tmp_path.iterdir()) == []
    write_snapshot(tmp_path / "s", arena)
    before = other.digests()
    with pytest.raises(StateMismatch, match="layout"):
        apply_payload(tmp_path / "s", other, expected_from_root=None)
    assert other.digests() == before


def test_model_without_tensors_has_payloads(tmp_path):
    arena = Arena(Layout.build([]))

    info = write_snapshot(tmp_path / "s", arena)
    apply_payload(tmp_path / "s", arena, expected_from_root=None)

    assert (info.num_bytes, info.num_changed) == (120, 0)


def test_file_is_durable_before_it_has_its_name_and_the_name_after(tmp_path, monkeypatch):
    events = []
    real_sync, real_replace = os.fsync, Path.replace

    def sync(descriptor):
        name = Path(f"/proc/self/fd/{descriptor}").readlink()
        events.append(("sync", name.name, os.fstat(descriptor).st_size if name.is_file() else 0))
        real_sync(descriptor)

    def replace(source, target):
        events.append(("rename", source.name, 0))
        return real_replace(source, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(Path, "replace", replace)

    info = write_snapshot(tmp_path / "s", random_arena(small_layout(), seed=1))

    assert events == [("sync", "s.tmp", info.num_bytes), ("rename", "s.tmp", 0), ("sync", tmp_path.name, 0)]


def test_failed_write_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    first, second = (random_arena(small_layout(), seed=seed) for seed in (1, 2))
    info = write_snapshot(tmp_path / "s", first)

    def fail(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        write_snapshot(tmp_path / "s", second)

    assert [path.name for path in tmp_path.iterdir()] == ["s"]
    assert file_digest(tmp_path / "s") == info.digest


def test_leftover_of_a_killed_writer_does_no_harm(tmp_path):
    (tmp_path / "s.tmp").write_bytes(bytes(100_000))

    info = write_snapshot(tmp_path / "s", random_arena(small_layout(), seed=1))

    assert (tmp_path / "s").stat().st_size == info.num_bytes < 100_000
    assert file_digest(tmp_path / "s") == info.digest
