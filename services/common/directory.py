"""Directories whose names survive a power cut: a new name is durable only after an fsync of the directory it is in."""

from __future__ import annotations

import os
from pathlib import Path


def make_directory(path: Path) -> None:
    """Create a directory with its missing parents, and make each new name durable."""
    if path.is_dir():
        return
    make_directory(path.parent)
    path.mkdir(exist_ok=True)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
