"""Payload files named by their content; a name exists only when all its bytes are durable and right.

    data_dir/blobs/ab/<digest>      complete, verified, never changed
    data_dir/partial/<digest>       an upload; its length is what `query` reports after an fsync

Order of completion: verify, fsync file, rename, fsync directory. A file whose fsync failed is removed: what the disk
holds of it is unknown, and a second fsync would not tell.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
from collections import defaultdict
from collections.abc import AsyncIterator
from pathlib import Path
from typing import BinaryIO

from services.common.directory import make_directory, sync_directory
from services.common.errors import (
    CorruptStore,
    DigestMismatch,
    InvalidRequest,
    QuotaExceeded,
    StoreFull,
    UnknownPayload,
)
from services.common.types import Digest
from services.common.weights.payload import file_digest

FRAME_BYTES = 1 << 20
_DIGEST = re.compile(r"[0-9a-f]{64}")


class BlobStore:
    """Content-addressed payload files under one directory."""

    def __init__(self, root: Path, *, store_bytes: int, max_payload_bytes: int) -> None:
        self._blobs = root / "blobs"
        self._partial = root / "partial"
        self._store_bytes = store_bytes
        self._max_payload_bytes = max_payload_bytes
        self._locks: defaultdict[Digest, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._used = 0
        """Bytes on disk, and those that the uploads under way may still bring."""
        for directory in (self._blobs, self._partial):
            make_directory(directory)
            for path in directory.rglob("*"):
                if path.is_dir():
                    # An earlier process may have died between a rename and its fsync.
                    sync_directory(path)
                else:
                    self._used += path.stat().st_size

    @property
    def used_bytes(self) -> int:
        """Bytes stored, and those reserved for uploads under way."""
        return self._used

    def size(self, digest: Digest) -> int | None:
        """Size of a complete payload, or None."""
        path = self.path(digest)
        return path.stat().st_size if path.exists() else None

    def query(self, digest: Digest) -> int:
        """Bytes of a payload that are durable."""
        size = self.size(digest)
        return self._partial_size(digest) if size is None else size

    async def append(self, *, digest: Digest, num_bytes: int, offset: int, frames: AsyncIterator[bytes]) -> int:
        """Write frames from `offset` and complete the payload when all bytes are there; returns the durable bytes.

        Raises:
            InvalidRequest: digest, offset or size is impossible; ask `query`.
            QuotaExceeded: the payload is larger than allowed.
            StoreFull: quota or disk is full.
            DigestMismatch: the complete content has another digest; the upload starts again.
            CorruptStore: the disk failed; the process must end.
        """
        if not 0 < num_bytes <= self._max_payload_bytes:
            raise QuotaExceeded(f"a payload of {num_bytes} bytes; the limit is {self._max_payload_bytes}")
        async with self._locks[digest]:
            if self.size(digest) is not None:
                return num_bytes
            have = self._partial_size(digest)
            if not 0 <= offset <= have:
                raise InvalidRequest(f"offset {offset} is beyond the {have} durable bytes", action="ask QueryUpload")
            if self._used + num_bytes - have > self._store_bytes:
                raise StoreFull(f"payloads would exceed store_bytes = {self._store_bytes}", retry_after_s=30.0)
            # Reserved before the first byte: uploads side by side share what is left.
            self._used += num_bytes - have
            try:
                written = await self._write(digest, offset=offset, num_bytes=num_bytes, frames=frames)
                if written == num_bytes:
                    await asyncio.to_thread(self._complete, digest)
            finally:
                self._used -= num_bytes - self.query(digest)
            return written

    async def ensure(self, *, digest: Digest, num_bytes: int) -> bool:
        """Whether the payload is complete; names an upload that was cut between its last byte and its name.

        Raises:
            DigestMismatch: the bytes were all there and wrong; the upload starts again.
        """
        if self.size(digest) == num_bytes:
            return True
        async with self._locks[digest]:
            if self.size(digest) is None and self._partial_size(digest) == num_bytes:
                try:
                    await asyncio.to_thread(self._complete, digest)
                finally:
                    self._used -= num_bytes - self.query(digest)
            return self.size(digest) == num_bytes

    async def _write(self, digest: Digest, *, offset: int, num_bytes: int, frames: AsyncIterator[bytes]) -> int:
        path = self._partial / digest
        try:
            file = await asyncio.to_thread(path.open, "r+b" if path.exists() else "w+b", buffering=0)
        except OSError as error:
            raise _typed(error) from error
        try:
            position = offset
            file.truncate(offset)
            file.seek(offset)
            async for frame in frames:
                if position + len(frame) > num_bytes:
                    raise InvalidRequest(f"the frames exceed the stated {num_bytes} bytes")
                await asyncio.to_thread(_write_all, file, frame)
                position += len(frame)
            return position
        finally:
            # Also after a broken link: what arrived is durable, so the sender goes on from here.
            await asyncio.to_thread(_sync_and_close, file, path)

    def _complete(self, digest: Digest) -> None:
        partial, target = self._partial / digest, self.path(digest)
        found = file_digest(partial)
        if found != digest:
            partial.unlink()
            raise DigestMismatch(f"the content of payload {digest[:12]} has digest {found[:12]}")
        # Again, although `_write` did it: the bytes may be those of a process that died before its fsync.
        _sync_and_close(partial.open("rb"), partial)
        try:
            make_directory(target.parent)
            partial.replace(target)
        except OSError as error:
            raise _typed(error) from error
        try:
            sync_directory(target.parent)
            sync_directory(self._partial)
        except OSError as error:
            raise CorruptStore(f"the disk of the payloads failed: {error}") from error

    def path(self, digest: Digest) -> Path:
        """Where the complete payload lies, whether or not it does already."""
        # The one place where a digest becomes a path: whatever else a peer writes there names no file.
        if not _DIGEST.fullmatch(digest):
            raise InvalidRequest("digest: not 64 lower-case hex digits")
        return self._blobs / digest[:2] / digest

    def _partial_size(self, digest: Digest) -> int:
        path = self._partial / digest
        return path.stat().st_size if path.exists() else 0


async def read_frames(path: Path, *, offset: int, stop: int | None = None) -> AsyncIterator[bytes]:
    """Yield [offset, stop) of a payload's file in frames of at most 1 MiB; one deleted meanwhile is read to its end.

    Args:
        path: the file.
        offset: position of the first byte.
        stop: position after the last byte; None for the end of the file.

    Raises:
        UnknownPayload: there is no such file.
        InvalidRequest: the range is not within the file.
    """
    try:
        file = path.open("rb")
    except FileNotFoundError as error:
        raise UnknownPayload(f"payload {path.name[-64:][:12]} is not stored") from error
    with file:
        size = os.fstat(file.fileno()).st_size
        end = size if stop is None else stop
        if not 0 <= offset <= end <= size:
            raise InvalidRequest(f"bytes {offset} to {end} are not within the {size} bytes of the payload")
        file.seek(offset)
        while frame := await asyncio.to_thread(file.read, min(FRAME_BYTES, end - offset)):
            offset += len(frame)
            yield frame


def _write_all(file: BinaryIO, frame: bytes) -> None:
    view = memoryview(frame)
    try:
        while view:
            view = view[file.write(view) :]
    except OSError as error:
        raise _typed(error) from error


def _sync_and_close(file: BinaryIO, path: Path) -> None:
    try:
        os.fsync(file.fileno())
    except OSError as error:
        path.unlink()
        raise _typed(error) from error
    finally:
        file.close()


def _typed(error: OSError) -> Exception:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreFull("the coordinator's disk is full", retry_after_s=5.0)
    return CorruptStore(f"the disk of the payloads failed: {error}")
