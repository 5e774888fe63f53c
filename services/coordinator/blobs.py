"""Payload files named by their content; a name exists only when all its bytes are durable and right.

    data_dir/blobs/ab/<digest>      complete, verified, never changed
    data_dir/partial/<digest>       an upload; its length is what `query` reports after an fsync

Order of completion: verify, fsync file, rename, fsync directory.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections import defaultdict
from collections.abc import AsyncIterator
from pathlib import Path

from services.common.errors import DigestMismatch, InvalidRequest, QuotaExceeded, StoreFull, UnknownPayload
from services.common.types import Digest
from services.common.weights.payload import file_digest

FRAME_BYTES = 1 << 20


class BlobStore:
    """Content-addressed payload files under one directory."""

    def __init__(self, root: Path, *, store_bytes: int, max_payload_bytes: int) -> None:
        self._blobs = root / "blobs"
        self._partial = root / "partial"
        self._store_bytes = store_bytes
        self._max_payload_bytes = max_payload_bytes
        self._locks: defaultdict[Digest, asyncio.Lock] = defaultdict(asyncio.Lock)
        for directory in (self._blobs, self._partial):
            directory.mkdir(parents=True, exist_ok=True)
        self._used = sum(path.stat().st_size for path in root.rglob("*") if path.is_file())

    def size(self, digest: Digest) -> int | None:
        """Size of a complete payload, or None."""
        path = self._path(digest)
        return path.stat().st_size if path.exists() else None

    def query(self, digest: Digest) -> int:
        """Bytes of a payload that are durable."""
        size = self.size(digest)
        if size is not None:
            return size
        partial = self._partial / digest
        return partial.stat().st_size if partial.exists() else 0

    async def append(self, *, digest: Digest, num_bytes: int, offset: int, frames: AsyncIterator[bytes]) -> int:
        """Write frames from `offset` and complete the payload when all bytes are there; returns the durable bytes.

        Raises:
            InvalidRequest: offset or size is impossible; ask `query`.
            QuotaExceeded: the payload is larger than allowed.
            StoreFull: quota or disk is full.
            DigestMismatch: the complete content has another digest; the upload starts again.
        """
        if not 0 < num_bytes <= self._max_payload_bytes:
            raise QuotaExceeded(f"a payload of {num_bytes} bytes; the limit is {self._max_payload_bytes}")
        async with self._locks[digest]:
            if self.size(digest) is not None:
                return num_bytes
            have = self.query(digest)
            if offset > have:
                raise InvalidRequest(f"offset {offset} is beyond the {have} durable bytes", action="ask QueryUpload")
            if self._used + num_bytes - have > self._store_bytes:
                raise StoreFull(f"payloads would exceed store_bytes = {self._store_bytes}", retry_after_s=30.0)
            written = await self._write(digest, offset=offset, num_bytes=num_bytes, frames=frames)
            self._used += max(0, written - have)
            if written == num_bytes:
                await asyncio.to_thread(self._complete, digest)
            return written

    async def ensure(self, *, digest: Digest, num_bytes: int) -> bool:
        """Whether the payload is complete; names an upload that was cut between its last byte and its name.

        Raises:
            DigestMismatch: the bytes were all there and wrong; the upload starts again.
        """
        async with self._locks[digest]:
            if self.size(digest) is None and self.query(digest) == num_bytes:
                await asyncio.to_thread(self._complete, digest)
            return self.size(digest) == num_bytes

    async def _write(self, digest: Digest, *, offset: int, num_bytes: int, frames: AsyncIterator[bytes]) -> int:
        path = self._partial / digest
        file = await asyncio.to_thread(path.open, "r+b" if path.exists() else "w+b")
        try:
            file.truncate(offset)
            file.seek(offset)
            async for frame in frames:
                if file.tell() + len(frame) > num_bytes:
                    raise InvalidRequest(f"the frames exceed the stated {num_bytes} bytes")
                await asyncio.to_thread(file.write, frame)
            return file.tell()
        except OSError as error:
            raise _full(error) from error
        finally:
            # Also after a broken link: what arrived is durable, so the sender goes on from here.
            await asyncio.to_thread(_sync_and_close, file)

    def _complete(self, digest: Digest) -> None:
        partial = self._partial / digest
        found = file_digest(partial)
        if found != digest:
            self._used -= partial.stat().st_size
            partial.unlink()
            raise DigestMismatch(f"the content of payload {digest[:12]} has digest {found[:12]}")
        target = self._path(digest)
        target.parent.mkdir(exist_ok=True)
        partial.replace(target)
        for directory in (target.parent, self._blobs, self._partial):
            sync_directory(directory)

    async def read(self, *, digest: Digest, offset: int) -> AsyncIterator[bytes]:
        """Yield frames of at most 1 MiB from `offset` to the end.

        Raises:
            UnknownPayload: not stored.
            InvalidRequest: the offset is beyond the end.
        """
        size = self.size(digest)
        if size is None:
            raise UnknownPayload(f"payload {digest[:12]} is not stored")
        if offset > size:
            raise InvalidRequest(f"offset {offset} is beyond the end of {size} bytes")
        with self._path(digest).open("rb") as file:
            file.seek(offset)
            while frame := await asyncio.to_thread(file.read, FRAME_BYTES):
                yield frame

    def _path(self, digest: Digest) -> Path:
        return self._blobs / digest[:2] / digest


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_and_close(file: object) -> None:
    try:
        file.flush()  # type: ignore[attr-defined]
        os.fsync(file.fileno())  # type: ignore[attr-defined]
    except OSError as error:
        raise _full(error) from error
    finally:
        file.close()  # type: ignore[attr-defined]


def _full(error: OSError) -> Exception:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreFull("the coordinator's disk is full", retry_after_s=5.0)
    return error
