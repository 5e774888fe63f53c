"""File operations of payloads: complete, durable, with typed errors.

missing file                FileNotFoundError, the only read error that means loss
no room                     StoreFull
no resources, or refused    Busy: the disk is unchanged, and the file is unknown
the disk failed a write     CorruptStore: the file's content is unknown
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from heterorl.common.errors import Busy, CorruptStore, StoreFull
from heterorl.common.process import files
from heterorl.common.process.files import NO_ROOM, make_directory, opened_directory, sync_directory
from heterorl.common.types.common import is_digest

BUSY_S = 2.0
_REFUSED = (
    errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EBUSY, errno.EINTR, errno.EACCES, errno.EPERM,
    errno.ESTALE, errno.ETIMEDOUT,
)  # fmt: skip
"""The system refused before it did anything."""


def identity(directory: Path) -> tuple[int, int]:
    """Device and inode: tells a directory from one mounted in its place."""
    found = directory.stat()
    return found.st_dev, found.st_ino


@contextmanager
def _typed() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise typed_error(error) from error


def remove_file(path: Path) -> None:
    """Delete a file durably."""
    with _typed(), opened_directory(path.parent) as parent:
        path.unlink(missing_ok=True)
        os.fsync(parent)


def name_file(source: Path, target: Path) -> None:
    """Move a durable file durably, and make its directory.
    Raises StoreFull, Busy: it keeps its old name; CorruptStore: the surviving name is unknown."""
    with _typed():
        make_directory(target.parent)
        with opened_directory(target.parent) as to, opened_directory(source.parent) as left:
            source.replace(target)
            try:
                os.fsync(to)
                os.fsync(left)
            except OSError as error:
                raise CorruptStore(f"the disk of the payloads failed: {error}") from error


def cut(file: BinaryIO, offset: int) -> None:
    """Truncate a file, and write there next."""
    with _typed():
        file.truncate(offset)
        file.seek(offset)


def write_all(file: BinaryIO, frame: bytes) -> None:
    """Write every byte of a frame."""
    with _typed():
        files.write_all(file, frame)


def sync_and_close(file: BinaryIO, path: Path, *, is_new: bool = False) -> None:
    """Make a file's bytes durable, and its name if new.
    A file whose fsync fails is removed: its content is unknown."""
    try:
        os.fsync(file.fileno())
        if is_new:
            sync_directory(path.parent)
    except OSError as error:
        try:
            path.unlink()
        except OSError as second:
            raise CorruptStore(f"the disk of the payloads failed: {error}, then {second}") from error
        raise typed_error(error) from error
    finally:
        file.close()


def open_file(path: Path, mode: str) -> BinaryIO:
    """Open a file unbuffered. Raises FileNotFoundError; StoreFull, Busy, CorruptStore: the system refuses."""
    try:
        return path.open(mode, buffering=0)  # type: ignore[return-value]
    except FileNotFoundError:
        raise
    except OSError as error:
        raise typed_error(error) from error


def file_size(path: Path) -> int | None:
    """Size of a file, None if missing. Raises Busy: unknown now."""
    try:
        return path.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise unreadable(error) from error


def payload_files(paths: Iterable[Path]) -> list[Path]:
    """Payloads among paths, the longest unchanged first; blocks.
    Files of others, such as an NFS server's, are left out. Raises Busy: unknown now."""
    try:
        found = [(path.stat().st_mtime, path) for path in paths if is_digest(path.name) and path.is_file()]
    except OSError as error:
        raise unreadable(error) from error
    return [path for _, path in sorted(found)]


def unreadable(error: OSError) -> Busy:
    """Busy for a failed read; the bytes may be right."""
    return Busy(f"the coordinator cannot read a payload now: {error.strerror}", retry_after_s=BUSY_S)


def typed_error(error: OSError) -> Exception:
    """StoreFull without room, Busy if the system refused, else CorruptStore."""
    if error.errno in NO_ROOM:
        return StoreFull("the coordinator's disk is full", retry_after_s=5.0)
    if error.errno in _REFUSED:
        return Busy(f"the coordinator cannot store a payload now: {error.strerror}", retry_after_s=BUSY_S)
    return CorruptStore(f"the disk of the payloads failed: {error}")
