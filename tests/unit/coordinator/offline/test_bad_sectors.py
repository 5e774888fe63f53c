"""A payload that its disk does not give: a restore leaves it out, and a check names it."""

import errno
import os
import sqlite3

import blake3
import pytest

from heterorl.common.types.policy import NO_VERSION, PayloadKind, PayloadRef
from heterorl.coordinator.offline import restore_backup, verify
from heterorl.coordinator.offline.history import History

GOOD, BAD = (blake3.blake3(data).hexdigest() for data in (b"good", b"bad"))


@pytest.fixture
def blobs(tmp_path):
    for digest, data in ((GOOD, b"good"), (BAD, b"bad")):
        path = tmp_path / "blobs" / digest[:2] / digest
        path.parent.mkdir(parents=True)
        path.write_bytes(data)
    return tmp_path / "blobs"


@pytest.fixture
def store():
    file = sqlite3.connect(":memory:")
    file.execute("CREATE TABLE payloads (digest, num_bytes)")
    file.executemany("INSERT INTO payloads VALUES (?, ?)", [(BAD, 3), (GOOD, 4)])
    yield file
    file.close()


def broken(monkeypatch, module, name, *, below, digest=BAD):
    """Let a function fail as a bad sector does, for one payload below a directory."""
    real = getattr(module, name)

    def read(path, *rest):
        if path.name == digest and path.is_relative_to(below):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(path, *rest)

    monkeypatch.setattr(module, name, read)


def test_restore_leaves_out_a_payload_that_cannot_be_read(blobs, store, tmp_path, monkeypatch):
    broken(monkeypatch, restore_backup.shutil, "copyfile", below=blobs)
    broken(monkeypatch, restore_backup, "file_digest", below=blobs)

    copied, missing = restore_backup._copy_payloads(store, blobs, tmp_path / "new", lambda done, total: None)

    assert (copied, missing) == (1, (BAD,))
    assert [path.name for path in (tmp_path / "new").rglob("*") if path.is_file()] == [GOOD]


def test_restore_onto_a_disk_that_fails_ends(blobs, store, tmp_path, monkeypatch):
    broken(monkeypatch, restore_backup, "file_digest", below=tmp_path / "new")

    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        restore_backup._copy_payloads(store, blobs, tmp_path / "new", lambda done, total: None)


def test_check_names_a_payload_that_cannot_be_read(blobs, monkeypatch):
    broken(monkeypatch, verify, "file_digest", below=blobs)
    payload = PayloadRef(kind=PayloadKind.SNAPSHOT, from_version=NO_VERSION, to_version=0, digest=BAD, num_bytes=3)

    problem = verify._check_payload(History(run_id="run", connection=None, offered=(), blobs=blobs), payload)

    assert problem == f"cannot be read: {os.strerror(errno.EIO)}"
