"""Payload files, durable, with typed errors; classes that the bucket overrides.

`BlobStore` calls the storage before it reports a payload complete, and when it deletes one. Readers of files ask the
cache first.

missing file                FileNotFoundError, the only read error that means loss
no room                     StoreFull
no resources, or refused    Busy: the disk is unchanged, and the file is unknown
the disk failed a write     CorruptStore: the file's content is unknown
"""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from enum import Enum
from pathlib import Path
from typing import BinaryIO

from heterorl.common.errors import Busy, CorruptStore, StoreFull
from heterorl.common.process import files
from heterorl.common.process.files import NO_ROOM, make_directory, opened_directory, sync_directory
from heterorl.common.types.common import Digest, is_digest

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


class PayloadStorage:
    """Payloads are the files of the data directory."""

    @property
    def used_bytes(self) -> int | None:
        """Bytes of all payloads; None if the files are the payloads."""
        return None

    def size(self, digest: Digest) -> int | None:  # noqa: ARG002 - of no payload
        return None

    def digests(self) -> frozenset[Digest]:
        return frozenset()

    async def reserve(self, num_bytes: int) -> None:
        """Make room for a payload. Raises StoreFull: there is no room."""

    async def keep(self, digest: Digest, path: Path) -> None:
        """Store a complete, verified file durably.
        Raises Busy: retry later; the file stays."""

    async def erase(self, digest: Digest) -> int:  # noqa: ARG002 - none is there
        """Delete a payload; returns its bytes, 0 if missing.
        Raises Busy: it cannot be deleted now."""
        return 0

    async def set_aside(self, digest: Digest) -> None:
        """Move a damaged payload out of the way.
        Raises Busy: it cannot be moved now."""

    async def urls(self, digests: Sequence[Digest]) -> list[str]:
        """A presigned URL for each payload, or empty texts."""
        return [""] * len(digests)


class Repair(Enum):
    """Outcome of a repair of a missing or wrong file."""

    CURED = "cured"
    RIGHT = "right"
    """The file is right, for example because another reader had it replaced."""
    LOST = "lost"
    """There is no other copy."""


class PayloadCache:
    """Payload files, all present unless damaged."""

    @asynccontextmanager
    async def at_hand(self, digests: Iterable[Digest]) -> AsyncIterator[None]:  # noqa: ARG002 - all are
        """Keep the files of payloads while the context is open.
        Raises Busy: retry later."""
        yield

    async def make_room(self, missing_bytes: int) -> None:
        """Delete unused copies of payloads, until so many bytes are free."""

    async def heal(self, digest: Digest) -> Repair:  # noqa: ARG002 - there is no other
        """Replace a missing or damaged file. Raises Busy: retry later."""
        return Repair.LOST
