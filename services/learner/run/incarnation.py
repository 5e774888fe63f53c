"""Which learner this is: a random name in its state directory, which one process at a time may use.

    state_dir/incarnation    "<32 hex digits> <number of the file's inode>"

Guarantees: a restart is told from a second learner. Every start from the same directory has the same name, also after
SIGKILL; a directory that was copied has another one, because its file has another inode. Such a learner, and one whose
file was lost, waits once for the end of a lease; nothing else depends on the name.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from heterorl.common.errors import ConfigError, DiskFull
from heterorl.common.process.files import make_directory, replacing, try_lock

FILE = "incarnation"
_LINE = re.compile(r"([0-9a-f]{32}) ([0-9]+)\n?")


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


def read_incarnation(directory: Path) -> str:
    """The name of the learner whose state this directory has; made where there is none.

    Raises:
        DiskFull: it cannot be written.
    """
    path = directory / FILE
    try:
        with path.open(encoding="ascii") as file:
            found = _LINE.fullmatch(file.read(256))
            if found and int(found[2]) == _inode(file):
                return found[1]
    except FileNotFoundError:
        pass
    except ValueError:
        # Bytes that are no ASCII: what a disk made of it is nobody's name.
        pass
    return _make(path)


def _make(path: Path) -> str:
    name = secrets.token_hex(16)
    try:
        # A rename keeps the inode.
        with replacing(path) as file:
            file.write(f"{name} {_inode(file)}\n".encode("ascii"))
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull(str(path.parent)) from error
        raise
    return name


def _inode(file: IO[bytes] | IO[str]) -> int:
    return os.fstat(file.fileno()).st_ino
