"""Programs that check files: taken from the environment that runs the tests, or from the machine."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest


def tool(name: str) -> str:
    """Path of a program; the test is skipped where there is none."""
    own = Path(sys.executable).parent / name
    found = str(own) if own.exists() else shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def check(*command: str) -> str:
    """Run a checker and return what it said; its complaint is the failure."""
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{command}\n{result.stdout}{result.stderr}"
    return f"{result.stdout}{result.stderr}"
