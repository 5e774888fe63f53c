"""Files that are there whole or not at all, for one process at a time."""

import errno
import os
import pwd
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from heterorl.common.errors import DiskFull, OperatorError
from heterorl.common.process import files
from heterorl.common.process.files import announce, appearing, refuse_root, replacing, try_lock, write_all


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def _stopped_half_way(path, is_durable):
    with replacing(path, is_durable=is_durable) as file:
        file.write(b"half")
        raise KeyboardInterrupt


@pytest.mark.parametrize("is_durable", [True, False])
def test_a_file_is_replaced_when_it_is_whole(tmp_path, is_durable):
    path = tmp_path / "a.json"
    path.write_bytes(b"old")

    with replacing(path, is_durable=is_durable) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    with pytest.raises(KeyboardInterrupt):
        _stopped_half_way(path, is_durable)

    assert path.read_bytes() == b"new"
    assert names(tmp_path) == ["a.json"]


@pytest.mark.parametrize("is_durable", [True, False])
def test_bytes_are_durable_before_the_name_and_the_name_before_it_ends(tmp_path, monkeypatch, is_durable):
    events = []
    real_sync, real_replace = os.fsync, Path.replace

    def sync(descriptor):
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        events.append(("sync", path.name, path.stat().st_size if path.is_file() else None))
        real_sync(descriptor)

    def replace(self, target):
        events.append(("rename", self.name, None))
        return real_replace(self, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(Path, "replace", replace)

    with replacing(tmp_path / "a", is_durable=is_durable) as file:
        file.write(b"12345")

    rename = ("rename", "a.tmp", None)
    assert events == ([("sync", "a.tmp", 5), rename, ("sync", tmp_path.name, None)] if is_durable else [rename])


def test_a_full_disk_leaves_what_was_there(tmp_path, monkeypatch):
    path = tmp_path / "a"
    path.write_bytes(b"old")

    def fails(descriptor):
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(OSError, match="full"), replacing(path) as file:
        file.write(b"new")

    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["a"]


@pytest.mark.parametrize(
    ("number", "raised"), [(errno.ENOSPC, DiskFull), (errno.EDQUOT, DiskFull), (errno.EIO, OSError)]
)
def test_directory_that_the_disk_refuses_leaves_nothing(tmp_path, monkeypatch, number, raised):
    def fails(descriptor):
        raise OSError(number, "refused")

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(raised), appearing(tmp_path / "v1") as directory:
        (directory / "weights").write_bytes(b"new")

    assert names(tmp_path) == []


def test_a_secret_is_nobody_elses_from_its_first_byte(tmp_path):
    with replacing(tmp_path / "key", mode=0o600) as file:
        assert os.fstat(file.fileno()).st_mode & 0o777 == 0o600

    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600


class Slow:
    """Takes three bytes at once."""

    def __init__(self):
        self.data = b""

    def write(self, data):
        self.data += bytes(data[:3])
        return len(data[:3])


@pytest.mark.parametrize("data", [b"", b"ab", b"abc", b"abcdefgh"])
def test_every_byte_is_written_however_few_are_taken(data):
    slow = Slow()

    write_all(slow, data)

    assert slow.data == data


HOLDER = """
import sys
from heterorl.common.process.files import try_lock
file = open(sys.argv[1], "w")
print(try_lock(file), flush=True)
sys.stdin.read()
"""


@pytest.mark.process
def test_a_lock_is_of_one_process_and_ends_with_it(tmp_path):
    path = tmp_path / "lock"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout.readline() == "True\n"
        with path.open("wb") as file:
            assert not try_lock(file)
            holder.send_signal(signal.SIGKILL)
            holder.wait()
            assert try_lock(file)
        with path.open("wb") as file:
            assert try_lock(file)
    finally:
        holder.kill()
        holder.communicate()


@pytest.mark.parametrize(
    ("listen", "noted"),
    [("0.0.0.0:0", "127.0.0.1:7"), ("[::]:7", "127.0.0.1:7"), ("10.0.0.1:7", "10.0.0.1:7"), ("[::1]:0", "[::1]:7")],
)
def test_address_that_commands_dial_is_one_that_a_certificate_names(tmp_path, listen, noted):
    # `heterorl report DATA_DIR` dials it over TLS; every coordinator's certificate has 127.0.0.1, none has 0.0.0.0.
    announce(tmp_path, listen, 7, service="coordinator")

    assert (tmp_path / "address").read_text() == f"{noted}\n"


def test_a_directory_appears_with_its_folders_and_all_of_it_is_synchronised(tmp_path, monkeypatch):
    synced = []
    for name in ("sync_file", "sync_directory"):
        real = getattr(files, name)
        monkeypatch.setattr(files, name, lambda path, real=real: (synced.append(path.name), real(path)))

    with appearing(tmp_path / "v1") as directory:
        (directory / "folder").mkdir()
        for path in (directory / "a", directory / "folder" / "b"):
            path.write_bytes(b"whole")

    assert (tmp_path / "v1" / "folder" / "b").read_bytes() == b"whole"
    assert sorted(synced[:3]) == ["a", "b", "folder"]
    assert synced[3:] == ["v1.writing", tmp_path.name]


@pytest.mark.parametrize("is_durable", [True, False])
def test_a_link_in_place_of_the_temporary_file_is_replaced_not_followed(tmp_path, is_durable):
    victim, path = tmp_path / "victim", tmp_path / "a"
    victim.write_bytes(b"secret")
    (tmp_path / "a.tmp").symlink_to(victim)

    with replacing(path, is_durable=is_durable) as file:
        file.write(b"new")

    assert victim.read_bytes() == b"secret"
    assert path.read_bytes() == b"new"
    assert not path.is_symlink()


def test_a_link_that_comes_back_ends_the_write(tmp_path, monkeypatch):
    victim, temporary = tmp_path / "victim", tmp_path / "a.tmp"
    victim.write_bytes(b"secret")
    real = Path.unlink

    def unlink(self, **options):
        real(self, **options)
        temporary.symlink_to(victim)

    monkeypatch.setattr(Path, "unlink", unlink)
    with pytest.raises(FileExistsError), replacing(tmp_path / "a") as file:
        file.write(b"new")

    assert victim.read_bytes() == b"secret"


def test_what_a_crash_left_does_not_stop_the_next_write(tmp_path):
    (tmp_path / "a.tmp").write_bytes(b"half, and more than the new one")

    with replacing(tmp_path / "a") as file:
        file.write(b"new")

    assert (tmp_path / "a").read_bytes() == b"new"
    assert names(tmp_path) == ["a"]


def others(directory, monkeypatch):
    """Make a directory another user's, for this process as root; its owner as `sudo -u` wants it."""
    directory.mkdir()
    if os.geteuid() == 0:
        os.chown(directory, 2_000_000_001, 2_000_000_001)
        return "'#2000000001'"
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    return pwd.getpwuid(directory.stat().st_uid).pw_name


@pytest.mark.parametrize("place", ["service", "service/new/data", "link"])
def test_root_is_refused_in_a_directory_of_another_user(tmp_path, monkeypatch, place):
    owner = others(tmp_path / "service", monkeypatch)
    (tmp_path / "link").symlink_to(tmp_path / "service")

    with pytest.raises(OperatorError, match="belongs to user") as refused:
        refuse_root(tmp_path / place)

    assert f"sudo -u {owner}`" in str(refused.value)


def test_a_users_own_directory_is_not_refused(tmp_path):
    refuse_root(tmp_path / "new")
