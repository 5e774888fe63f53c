import errno
import json
import os
import weakref
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError

from heterorl.common.errors import CorruptStore, DiskFull
from heterorl.common.types.common import SiteId
from heterorl.common.types.rollout import GroupId
from heterorl.common.weights.arena import Arena
from heterorl.common.weights.payload import apply_payload, write_snapshot
from heterorl.learner.publish.checkpoint_store import (
    BACKEND_DIRECTORY,
    CheckpointStore,
    cadence,
    cursor_from_bytes,
    cursor_to_bytes,
    read_checkpoint,
    step_id,
)
from tests.support.cursors import make_cursor
from tests.support.learner_world import LAYOUT, NumpyBackend, queued


def write(store, version, backend=None, snapshot=None):
    backend = backend or NumpyBackend()
    arena = Arena(LAYOUT)
    backend.store(arena)
    begun = store.begin(version, backend)
    return store.write(make_cursor(version), begun=begun, arena=arena, snapshot=snapshot)


def test_checkpoint_gives_back_cursor_and_backend(tmp_path):
    store, backend = CheckpointStore(tmp_path), NumpyBackend()
    backend.train_step([queued(1)], head_version=0, step=1)

    path = write(store, 3, backend)

    other = NumpyBackend()
    other.restore(path / BACKEND_DIRECTORY)
    assert read_checkpoint(path) == make_cursor(3)
    assert (other.weights == backend.weights).all()
    assert (other.momentum == backend.momentum).all()


def test_checkpoint_holds_the_published_weights(tmp_path):
    backend, expected = NumpyBackend(), Arena(LAYOUT)
    backend.store(expected)

    path = write(CheckpointStore(tmp_path), 0, backend)

    arena = Arena(LAYOUT)
    apply_payload(path / "published.payload", arena, expected_from_root=None)
    assert arena.state_root() == expected.state_root()


def test_checkpoint_shares_the_snapshot_that_is_published_too(tmp_path):
    arena = Arena(LAYOUT)
    write_snapshot(tmp_path / "snapshot", arena)

    path = write(CheckpointStore(tmp_path / "store"), 0, snapshot=tmp_path / "snapshot")

    assert (path / "published.payload").samefile(tmp_path / "snapshot")


def test_store_keeps_the_two_newest(tmp_path):
    store = CheckpointStore(tmp_path)
    for version in (1, 2, 3, 10):
        write(store, version)

    assert [path.name for path in store.paths()] == ["v00000010", "v00000003"]


def test_store_keeps_a_checkpoint_below_those_of_a_lost_history(tmp_path):
    """After the coordinator was restored from a backup, versions go on from an earlier number."""
    store, kept = CheckpointStore(tmp_path), []
    for version in (19, 20, 16, 17, 18):
        write(store, version)
        kept.append([path.name for path in store.paths()])

    assert kept[2] == ["v00000020", "v00000016"]
    assert kept[3:] == [["v00000017", "v00000016"], ["v00000018", "v00000017"]]


def test_checkpoint_replaces_one_of_the_same_version(tmp_path):
    store, backend = CheckpointStore(tmp_path), NumpyBackend()
    write(store, 1, backend)
    backend.train_step([queued(1)], head_version=0, step=1)

    path = write(store, 1, backend)

    other = NumpyBackend()
    other.restore(path / BACKEND_DIRECTORY)
    assert (other.weights == backend.weights).all()


def test_interrupted_write_leaves_no_checkpoint_and_the_old_one(tmp_path):
    store, backend = CheckpointStore(tmp_path), NumpyBackend()
    write(store, 1)

    def fail(directory):
        (directory / "weights.npy").write_bytes(b"half")
        raise RuntimeError

    backend.on_save = fail
    with pytest.raises(RuntimeError):
        write(store, 2, backend)

    assert [path.name for path in store.paths()] == ["v00000001"]
    read_checkpoint(store.paths()[0])
    # What was left behind does not stand in the way.
    backend.on_save = lambda _: None
    read_checkpoint(write(store, 2, backend))


NO_SPACE = os.strerror(errno.ENOSPC)


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, NO_SPACE), SafetensorError(f"I/O error: {NO_SPACE} (os error {errno.ENOSPC})")]
)
def test_full_disk_is_the_operators_and_leaves_the_old_checkpoint(tmp_path, error):
    store, backend = CheckpointStore(tmp_path), NumpyBackend()
    write(store, 1)

    def fail(_):
        raise error

    backend.on_save = fail
    with pytest.raises(DiskFull):
        write(store, 2, backend)

    assert [path.name for path in store.paths()] == ["v00000001"]


FILES = ["DONE", "cursor.json", "published.payload", "backend/weights.npy", "backend/momentum.npy"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_damaged_checkpoint_is_refused(tmp_path, name, damage):
    path = write(CheckpointStore(tmp_path), 1)
    file = path / name
    data = bytearray(file.read_bytes())
    if damage == "flip":
        # The last byte of DONE may be followed by nothing else than its bracket: flip in the middle instead.
        data[len(data) // 2] ^= 0x10
        file.write_bytes(data)
    elif damage == "cut":
        file.write_bytes(data[:-1])
    else:
        file.unlink()

    with pytest.raises(CorruptStore):
        read_checkpoint(path)


def test_checkpoint_with_a_file_too_many_is_refused(tmp_path):
    path = write(CheckpointStore(tmp_path), 1)
    (path / "backend" / "more").write_bytes(b"")

    with pytest.raises(CorruptStore, match="more"):
        read_checkpoint(path)


def test_every_file_and_directory_is_synced_before_the_rename(tmp_path, monkeypatch):
    synced, renamed = [], []
    real_sync, real_rename = os.fsync, os.rename

    def sync(descriptor):
        synced.append((str(Path(f"/proc/self/fd/{descriptor}").readlink()), bool(renamed)))
        real_sync(descriptor)

    def rename(source, target, **options):
        renamed.append(str(target))
        real_rename(source, target, **options)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "rename", rename)

    path = write(CheckpointStore(tmp_path), 1)

    temporary = path.with_name("writing-v00000001")
    before = {name for name, is_after in synced if not is_after}
    assert {str(temporary / name) for name in FILES} <= before
    assert {str(temporary), str(temporary / "backend")} <= before
    assert (str(tmp_path), True) in synced


@given(
    step=st.integers(0, 2**62),
    manifest=st.binary(max_size=64),
    ids=st.lists(st.tuples(st.text(max_size=5), st.text(max_size=5), st.integers(0, 2**62)), max_size=4),
)
def test_cursor_survives_its_bytes(step, manifest, ids):
    consumed = tuple(GroupId(site=SiteId(a), incarnation=b, sequence=c) for a, b, c in ids)
    cursor = make_cursor(step=step, manifest=manifest, consumed=consumed)

    assert cursor_from_bytes(cursor_to_bytes(cursor)) == cursor


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b'{"format": 2}', b"\xff"])
def test_cursor_refuses_other_bytes(data):
    with pytest.raises(CorruptStore):
        cursor_from_bytes(data)


@pytest.mark.parametrize("name", ["step", "version", "parent_version", "lineage_version", "state_root", "reports"])
def test_cursor_with_null_is_refused_where_it_is_read(name):
    table = json.loads(cursor_to_bytes(make_cursor(step=1, manifest=b"m", consumed=())))

    with pytest.raises(CorruptStore, match=f"null as {name}"):
        cursor_from_bytes(json.dumps(table | {name: None}).encode())


def test_step_id_depends_on_run_parent_step_and_state_alone():
    base = {"run_id": "run", "parent_version": 3, "step": 9, "state_root": "a" * 64}
    changed = [{"run_id": "runs"}, {"parent_version": 4}, {"step": 10}, {"state_root": "b" * 64}]

    ids = [step_id(**{**base, **change}) for change in ({}, *changed)]

    assert len(set(ids)) == 5
    assert step_id(**base) == ids[0]


@pytest.mark.parametrize(
    ("every", "num_elements", "expected"),
    [(0, 96, 1), (0, 300_000_000, 1), (0, 310_000_000, 10), (0, 7_000_000_000, 10), (3, 96, 3), (1, 7_000_000_000, 1)],
)
def test_large_models_have_fewer_checkpoints_unless_told(every, num_elements, expected):
    assert cadence(every, num_elements=num_elements) == expected


def test_checkpoint_has_the_state_of_its_beginning_whatever_steps_are_taken_meanwhile(tmp_path):
    store, backend, before = CheckpointStore(tmp_path), NumpyBackend(), NumpyBackend()
    arena = Arena(LAYOUT)
    backend.store(arena)
    begun = store.begin(1, backend)
    backend.train_step([queued(1)], head_version=0, step=1)

    path = store.write(make_cursor(1), begun=begun, arena=arena, snapshot=None)

    other = NumpyBackend()
    other.restore(path / BACKEND_DIRECTORY)
    assert (other.weights == before.weights).all()
    assert (other.weights != backend.weights).any()


def test_copy_of_masters_and_optimizer_is_given_up_when_it_is_written(tmp_path):
    store, backend = CheckpointStore(tmp_path), NumpyBackend()
    begun = store.begin(1, backend)
    copy = weakref.ref(begun.save)
    store.write(make_cursor(1), begun=begun, arena=Arena(LAYOUT), snapshot=None)

    assert copy() is None, "an upload may take long, and the copy is as large as the optimizer"
