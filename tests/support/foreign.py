"""A project that has a package `services` of its own, where ours is used: hostile, and noticed whenever it is imported."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

MARK = "foreign package was imported"


@contextmanager
def foreign_project(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with the package, first on PYTHONPATH too, as its owner has it.

    What imports it fails; where the failure is swallowed, the file that it leaves tells.
    """
    seen = directory / "seen"
    source = (
        f"import os, sys\nwith open({str(seen)!r}, 'a') as file:\n    print(sys.argv, file=file)\n"
        f"raise RuntimeError('{MARK}')\n"
    )
    for name in ("services", "services/common", "services/v1"):
        (directory / name).mkdir()
        (directory / name / "__init__.py").write_text(source)
    monkeypatch.chdir(directory)
    before = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([".", str(directory), *([before] if before else [])]))
    yield directory
    assert not seen.exists(), seen.read_text()


def run(*words: str, expected: int = 0, timeout_s: float = 100.0, stdin: str = "") -> str:
    """Run a program to its end and return what it printed."""
    result = subprocess.run(words, capture_output=True, text=True, timeout=timeout_s, check=False, input=stdin)
    assert result.returncode == expected, result.stderr
    assert MARK not in result.stderr
    return result.stdout
