"""What a site remembers survives a restart and a crash in the middle of a row."""

import os

import pytest

from services.common.errors import CorruptStore
from services.sampler.memory import Memory, Used


def one(version: int) -> Used:
    return Used(version=version, state_root=f"{version:064x}", manifest_digest=f"{version:064d}", run_id="run")


def test_newest_is_the_highest_and_is_there_after_a_restart(tmp_path):
    memory = Memory(tmp_path / "site" / "versions.jsonl")
    assert memory.newest is None
    for version in (0, 4, 7):
        memory.note(one(version))

    again = Memory(tmp_path / "site" / "versions.jsonl")

    assert again.newest == one(7)
    assert again.find(4) == one(4)
    assert again.find(5) is None


def test_row_is_synced_before_the_version_is_used(tmp_path, monkeypatch):
    path = tmp_path / "versions.jsonl"
    memory = Memory(path)
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append((os.fstat(descriptor).st_ino, path.read_bytes())))

    memory.note(one(3))

    inode, content = synced[0]
    assert (inode, content) == (path.stat().st_ino, path.read_bytes())
    assert synced[1][0] == tmp_path.stat().st_ino, "the name of the new file"


def test_torn_row_is_cut_and_the_next_row_is_whole(tmp_path):
    path = tmp_path / "versions.jsonl"
    Memory(path).note(one(1))
    whole = path.read_bytes()
    Memory(path).note(one(2))

    for length in range(len(whole), len(whole) + 20):
        path.write_bytes((whole + whole)[:length])
        memory = Memory(path)
        assert memory.newest == one(1)
        memory.note(one(5))
        assert Memory(path).newest == one(5)


def test_rows_of_an_older_program_are_read(tmp_path):
    path = tmp_path / "versions.jsonl"
    path.write_text('{"version": 3, "state_root": "ab"}\n')

    assert Memory(path).newest == Used(version=3, state_root="ab")


@pytest.mark.parametrize("text", ["x\n", "[]\n", "{}\n", '{"version": "v", "state_root": ""}\n', "3\n"])
def test_damaged_memory_stops_the_sampler_and_says_so(tmp_path, text):
    path = tmp_path / "versions.jsonl"
    path.write_text(text)

    with pytest.raises(CorruptStore, match="damaged"):
        Memory(path)
