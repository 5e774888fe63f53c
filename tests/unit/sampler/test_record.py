"""The record of verified versions is durable and unforgiving."""

import errno
import os
from pathlib import Path

import pytest

from services.common.errors import CorruptStore, DiskFull
from services.sampler.record import RunReplaced, VersionRecord, check_head

A, B = "a" * 64, "b" * 64


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
    record = VersionRecord(path)
    assert synced == [path.parent], "the new file's name"

    record.note(3, A)

    assert synced == [path.parent, path]
    assert VersionRecord(path).highest_version == 3


def test_torn_last_row_is_ignored_at_the_restart_and_the_next_row_is_whole(tmp_path):
    path = tmp_path / "versions.jsonl"
    VersionRecord(path).note(0, A)
    VersionRecord(path).note(1, B)
    whole = path.read_bytes()
    for cut in range(len(whole) // 2 + 1, len(whole)):
        path.write_bytes(whole[:cut])
        record = VersionRecord(path)
        assert record.highest_version == 0

        record.note(1, B)

        assert path.read_bytes() == whole


def test_version_with_another_state_is_refused_also_after_a_restart(tmp_path):
    path = tmp_path / "versions.jsonl"
    record = VersionRecord(path)
    record.note(7, A)
    before = path.read_bytes()
    for again in (record, VersionRecord(path)):
        with pytest.raises(
            RunReplaced, match=r"version 7 had state a{12} before and has b{12} now.*move versions.jsonl"
        ):
            again.note(7, B)
        again.note(7, A)

    assert path.read_bytes() == before


def test_damaged_row_is_refused_with_advice(tmp_path):
    path = tmp_path / "versions.jsonl"
    path.write_text('{"version": 0, "state_root": "a"}\nnot a row\n{"version": 2, "state_root": "b"}\n')

    with pytest.raises(CorruptStore, match="line 2.*move it away"):
        VersionRecord(path)


def test_full_disk_leaves_no_part_of_a_row(tmp_path, monkeypatch):
    path = tmp_path / "versions.jsonl"
    record = VersionRecord(path)
    record.note(0, A)
    before = path.read_bytes()

    def fsync(descriptor):
        raise OSError(errno.ENOSPC, "no space")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with pytest.raises(DiskFull):
            record.note(1, B)

    assert path.read_bytes() == before
    assert record.highest_version == 0
    record.note(1, B)


def test_head_may_stay_or_grow_and_never_go_back():
    check_head(5, seen_version=5)
    check_head(6, seen_version=5)
    with pytest.raises(RunReplaced, match="version 5 was seen"):
        check_head(4, seen_version=5)
    with pytest.raises(RunReplaced):
        check_head(-1, seen_version=0)
