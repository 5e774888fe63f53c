"""What was promised to the tests is there, or none of them runs: a suite that skips itself shows nothing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import needs, postgres

ROOT = Path(__file__).parents[2]


def test_what_is_not_there_is_named(monkeypatch):
    monkeypatch.setattr(needs, "FINDERS", {"a": lambda: True, "b": lambda: False})

    assert needs.missing("") == needs.missing("a") == []
    assert needs.missing("a b") == ["b"]
    with pytest.raises(KeyError):
        needs.missing("c")


def test_server_that_is_asked_for_and_not_there_fails_its_tests(monkeypatch):
    monkeypatch.setattr(postgres, "binaries", lambda: None)

    # A skip is an exception too.
    with pytest.raises(BaseException, match="PostgreSQL is not installed") as failed:
        postgres.PostgresServer()
    assert failed.type is AssertionError


@pytest.mark.process
@pytest.mark.timeout(120)
def test_suite_without_its_server_fails(tmp_path):
    # As on a machine without PostgreSQL: nothing of Debian's is found, and nothing on the path.
    (tmp_path / "sitecustomize.py").write_text(
        "import pathlib\n"
        "glob = pathlib.Path.glob\n"
        "pathlib.Path.glob = lambda self, *a: [] if str(self) == '/usr/lib/postgresql' else glob(self, *a)\n"
    )
    place = "tests/unit/coordinator/store/test_repeats.py"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", place]
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    result = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, needs.VARIABLE: "postgresql", "PYTHONPATH": paths, "PATH": str(tmp_path)},
        capture_output=True,
        check=False,
    )

    assert result.returncode != 0
    assert b"names what is not installed: postgresql" in result.stdout + result.stderr
