"""Directories of one process beside those of others: what a killed process left there goes at the next start.

    PARENT/PREFIX-xxxx/      readable by this user alone
    PARENT/PREFIX-xxxx.lock  locked while its owner lives; the kernel lets go of it, however that ends

A directory without a lock file is an earlier program's or somebody else's: it stays.
"""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import tempfile
from pathlib import Path

from heterorl.common.process.files import try_lock

LOCK = ".lock"


class PrivateDirectory:
    """A directory that goes with `close`, or with the next process that makes one like it."""

    def __init__(self, parent: Path, *, prefix: str) -> None:
        parent.mkdir(parents=True, exist_ok=True)
        remove_left(parent, prefix=prefix)
        while True:
            descriptor, name = tempfile.mkstemp(prefix=f"{prefix}-", suffix=LOCK, dir=parent)
            self._file = open(descriptor, "wb")  # noqa: SIM115, PTH123
            self._lock = Path(name)
            fcntl.flock(self._file, fcntl.LOCK_EX)
            # Whoever cleaned up between the two lines took it for nobody's.
            if self._lock.exists():
                break
            self._file.close()
        self.path = self._lock.with_suffix("")
        self.path.mkdir(mode=0o700)

    def close(self) -> None:
        """Delete it with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.unlink(missing_ok=True)
        self._file.close()


def remove_left(parent: Path, *, prefix: str) -> list[Path]:
    """Delete directories whose owners are gone; returns them."""
    removed = []
    for lock in parent.glob(f"{prefix}-*{LOCK}"):
        # Somebody else's file, or gone meanwhile: its owner's business.
        with contextlib.suppress(OSError), lock.open("r+b") as file:
            if not try_lock(file):
                continue
            shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
            lock.unlink(missing_ok=True)
            removed.append(lock.with_suffix(""))
    return removed
