"""Programs that check files: taken from the environment that runs the tests, from `make programs`, or from the
machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "heterorl" / "programs"
"""Where `make programs` lays what is newer than the machine's own."""


def tool(name: str) -> str:
    """Path of a program; the test is skipped where there is none."""
    places = (Path(sys.executable).parent, PROGRAMS)
    own = [str(place / name) for place in places if (place / name).exists()]
    found = own[0] if own else shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def check(*command: str) -> str:
    """Run a checker and return what it said; its complaint is the failure."""
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{command}\n{result.stdout}{result.stderr}"
    return f"{result.stdout}{result.stderr}"
