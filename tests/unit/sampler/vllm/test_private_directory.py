"""A killed process leaves no whole model on the disk for ever, and nobody's directory is taken from its owner."""

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from heterorl.sampler.vllm.shared_model import PrivateDirectory, remove_left

OWNER = """
import pathlib, sys
from heterorl.sampler.vllm.shared_model import PrivateDirectory
directory = PrivateDirectory(pathlib.Path(sys.argv[1]), prefix="weights")
(directory.path / "model.safetensors").write_bytes(bytes(1000))
print(directory.path, flush=True)
sys.stdin.read()
"""


def test_directory_is_private_and_goes_with_its_owner(tmp_path):
    one, two = (PrivateDirectory(tmp_path / "engine", prefix="weights") for _ in range(2))
    (one.path / "file").write_bytes(b"x")

    assert stat.S_IMODE(one.path.stat().st_mode) == 0o700
    assert two.path.is_dir()
    one.close()
    two.close()
    assert list((tmp_path / "engine").iterdir()) == []


@pytest.mark.process
@pytest.mark.slow
def test_what_a_killed_process_left_goes_at_the_next_start_and_what_a_living_one_has_stays(tmp_path):
    (tmp_path / "weights-of-somebody").mkdir()
    owners = [
        subprocess.Popen(
            [sys.executable, "-c", OWNER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    try:
        killed, living = (owner.stdout.readline().strip() for owner in owners)
        os.kill(owners[0].pid, signal.SIGKILL)
        owners[0].wait()

        mine = PrivateDirectory(tmp_path, prefix="weights")

        assert not Path(killed).exists()
        assert Path(living, "model.safetensors").exists()
        remove_left(tmp_path, prefix="weights")
        assert mine.path.is_dir()
        mine.close()
    finally:
        for owner in owners:
            owner.kill()
            owner.wait()
            owner.stdin.close()
            owner.stdout.close()
    assert (tmp_path / "weights-of-somebody").is_dir()
