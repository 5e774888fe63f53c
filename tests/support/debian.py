"""The paths of programs that Debian's packages install."""

from __future__ import annotations

import shutil
from pathlib import Path


def postgres_binaries() -> Path | None:
    """The newest PostgreSQL of Debian's, or that on the path."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=lambda path: int(path.parts[-3]))
    which = shutil.which("postgres")
    return found[-1].parent if found else Path(which).resolve().parent if which else None


def prometheus() -> str | None:
    """The program, where it is installed."""
    return shutil.which("prometheus")
