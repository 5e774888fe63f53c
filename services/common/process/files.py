"""Directories whose names survive a power cut: a new name is durable only after an fsync of the directory it is in.

What needs a descriptor gets it before anything changes: a process that is out of them has done nothing by halves.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from heterorl.common.process import descriptors


def make_directory(path: Path, *, mode: int = 0o777) -> None:
    """Create a directory with its missing parents, and make each new name durable; `mode` is of the last one."""
    if path.is_dir():
        return
    make_directory(path.parent)
    with opened_directory(path.parent) as parent:
        path.mkdir(mode=mode, exist_ok=True)
        try:
            os.fsync(parent)
        except OSError:
            # Whoever asks again finds it missing, and does not take a name for durable that is not.
            with contextlib.suppress(OSError):
                path.rmdir()
            raise


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    with opened_directory(path) as descriptor:
        os.fsync(descriptor)


@contextlib.contextmanager
def opened_directory(path: Path) -> Iterator[int]:
    """A descriptor of a directory, for the fsync that follows a change of its names."""
    descriptor = descriptors.insist(lambda: os.open(path, os.O_RDONLY | os.O_DIRECTORY))
    try:
        yield descriptor
    finally:
        os.close(descriptor)
