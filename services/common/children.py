"""How a process of ours starts another of ours."""

from __future__ import annotations

import sys
from pathlib import Path

import heterorl


def own_command(module: str, *arguments: str) -> list[str]:
    """The words that run one of our modules as a program, whatever the working directory and PYTHONPATH have."""
    return [sys.executable, "-P", str(Path(heterorl.__path__[0]) / "launch.py"), module, *arguments]
