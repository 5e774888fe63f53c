"""File descriptors: how many calls they are enough for, and what is done without one."""

import contextlib
import errno
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from heterorl.common.errors import ConfigError
from heterorl.common.process.files import make_directory
from heterorl.common.rpc import server_limits


@pytest.fixture
def exhausted(tmp_path):
    """A process that may open nothing more."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(path.name) for path in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(highest + 8, limits[0]), limits[1]))
    held = []
    with contextlib.suppress(OSError):
        while True:
            held.append(os.open(os.devnull, os.O_RDONLY))
    yield tmp_path
    for descriptor in held:
        os.close(descriptor)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize(("limit", "calls"), [(1 << 16, 1024), (3232, 1024), (1024, 288), (256, 32), (184, 8)])
def test_fewer_descriptors_are_fewer_calls(limit, calls):
    assert server_limits.calls_within(limit, wanted=1024) == calls


def test_too_few_descriptors_name_the_key_and_the_number():
    with pytest.raises(ConfigError, match=r"max_concurrent_rpcs: 183 file .* at least 3232 \(ulimit -n"):
        server_limits.calls_within(183, wanted=1024)


@pytest.mark.process
def test_limit_is_raised_to_what_the_system_allows():
    code = (
        "import resource; from heterorl.common.rpc import server_limits;"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, 700));"
        "print(server_limits.raise_limit(calls=1024), resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout

    assert answer == "700 (700, 700)\n"


@pytest.mark.usefixtures("exhausted")
def test_directory_that_cannot_be_made_durable_is_not_made(tmp_path):
    with pytest.raises(OSError, match="Too many open files"):
        make_directory(tmp_path / "a")

    assert not (tmp_path / "a").exists()


def test_directory_whose_name_did_not_become_durable_is_made_again(tmp_path, monkeypatch):
    calls = []

    def fails(descriptor):
        calls.append(descriptor)
        raise OSError(errno.EIO, "I/O error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fails)
        with pytest.raises(OSError, match="I/O"):
            make_directory(tmp_path / "a")
    assert not (tmp_path / "a").exists()
    make_directory(tmp_path / "a")
    assert (tmp_path / "a").is_dir()
    assert len(calls) == 1
