"""How a process of ours starts another of ours."""

from __future__ import annotations

import sys


def own_command(module: str, *arguments: str) -> list[str]:
    """The words that run one of our modules as a program, whatever the working directory and PYTHONPATH have."""
    return [sys.executable, "-P", "-m", module, *arguments]
