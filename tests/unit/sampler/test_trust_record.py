"""The record of verified versions is durable and unforgiving."""

import errno
import os
from pathlib import Path

import pytest

from heterorl.common.errors import CorruptStore, DiskFull
from heterorl.sampler.trust_record import RunReplaced, SeenVersion, TrustRecord, check_head

A, B = "a" * 64, "b" * 64


def seen(version, root=A, **changes):
    values = {"manifest_digest": f"{version:064d}", "run_id": "run", "signed_by": "unsigned", **changes}
    return SeenVersion(version=version, state_root=root, **values)


@pytest.fixture
def synced(monkeypatch):
    """Paths that were fsynced, in order."""
    paths = []
    real = os.fsync

    def fsync(descriptor):
        paths.append(Path(f"/proc/self/fd/{descriptor}").readlink())
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    return paths


def test_row_and_directory_are_on_disk_when_a_version_is_noted(tmp_path, synced):
    path = tmp_path / "site" / "versions.jsonl"
    record = TrustRecord(path)
    assert synced == [path.parent.parent, path.parent], "the new directory's name and the new file's"

    record.note(seen(3))

    assert synced == [path.parent.parent, path.parent, path]
    assert TrustRecord(path).highest_version == 3


def test_torn_last_row_is_ignored_at_the_restart_and_the_next_row_is_whole(tmp_path):
    path = tmp_path / "versions.jsonl"
    TrustRecord(path).note(seen(0))
    TrustRecord(path).note(seen(1, B))
    whole = path.read_bytes()
    for cut in range(len(whole) // 2 + 1, len(whole)):
        path.write_bytes(whole[:cut])
        record = TrustRecord(path)
        assert record.highest_version == 0

        record.note(seen(1, B))

        assert path.read_bytes() == whole


def test_version_with_another_state_is_refused_also_after_a_restart(tmp_path):
    path = tmp_path / "versions.jsonl"
    record = TrustRecord(path)
    record.note(seen(7))
    before = path.read_bytes()
    for again in (record, TrustRecord(path)):
        with pytest.raises(
            RunReplaced, match=r"version 7 had state a{12} before and has b{12} now.*accept-rewind RUN:V"
        ):
            again.note(seen(7, B))
        again.note(seen(7))

    assert path.read_bytes() == before


def test_version_with_another_manifest_is_refused_also_after_a_restart(tmp_path):
    """The same state by another manifest is another place in another history."""
    path = tmp_path / "versions.jsonl"
    record = TrustRecord(path)
    record.note(seen(7))
    for again in (record, TrustRecord(path)):
        with pytest.raises(RunReplaced, match="version 7 has another manifest than before"):
            again.note(seen(7, manifest_digest=B))


def test_newest_is_the_highest_with_all_that_is_known_of_it_after_a_restart(tmp_path):
    path = tmp_path / "versions.jsonl"
    record = TrustRecord(path)
    assert (record.newest, record.highest_version) == (None, -1)
    for version in (0, 7, 4):
        record.note(seen(version, signed_by="ed25519:aa"))

    for again in (record, TrustRecord(path)):
        assert again.newest == seen(7, signed_by="ed25519:aa")
        assert again.highest_version == 7


@pytest.mark.parametrize(
    "row",
    [
        "not a row", "[]", "{}", "3", '{"version": 3, "state_root": "a"}', '{"version": "v", "state_root": ""}',
        '{"version": Infinity}', '{"version": 1e400}', "[" * 100_000,
    ],
    ids=lambda row: row[:30],
)  # fmt: skip
def test_damaged_row_is_refused_with_advice(tmp_path, row):
    path = tmp_path / "versions.jsonl"
    record = TrustRecord(path)
    record.note(seen(0))
    with path.open("a") as file:
        file.write(row + "\n")
    record.note(seen(2))

    with pytest.raises(CorruptStore, match="line 2.*move it away"):
        TrustRecord(path)


def test_full_disk_leaves_no_part_of_a_row(tmp_path, monkeypatch):
    path = tmp_path / "versions.jsonl"
    record = TrustRecord(path)
    record.note(seen(0))
    before = path.read_bytes()

    def fsync(descriptor):
        raise OSError(errno.ENOSPC, "no space")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with pytest.raises(DiskFull):
            record.note(seen(1, B))

    assert path.read_bytes() == before
    assert record.highest_version == 0
    record.note(seen(1, B))


def test_head_may_stay_or_grow_and_never_go_back():
    check_head(5, seen_version=5)
    check_head(6, seen_version=5)
    with pytest.raises(RunReplaced, match="version 5 was seen"):
        check_head(4, seen_version=5)
    with pytest.raises(RunReplaced):
        check_head(-1, seen_version=0)
