"""The learner's state directory: one process at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from heterorl.common.errors import ConfigError
from heterorl.common.process.files import make_directory, try_lock


@contextlib.contextmanager
def hold_directory(path: Path) -> Iterator[Path]:
    """Create the directory and hold its lock, which ends with the process however that ends.

    Raises:
        ConfigError: another process holds it.
    """
    make_directory(path)
    with (path / "lock").open("w") as file:
        if not try_lock(file):
            raise ConfigError("state_dir", f"{path} is used by another learner", action="stop it first")
        yield path
