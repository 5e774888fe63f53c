"""The files of a coordinator whose payloads are in a bucket: uploads, and copies that may go at any time."""

from __future__ import annotations

import asyncio
from pathlib import Path

from heterorl.common.types.common import Digest, is_digest
from heterorl.common.weights.payload import file_digest
from heterorl.coordinator.store.blobs import BlobStore
from heterorl.coordinator.store.files import file_size, name_file

SCRATCH = "copies"
"""Directory beside the payloads for what is on its way here."""


class CopyFiles(BlobStore):
    """Payload files, of which each whole one is a copy of what its home has, or is about to be given to it."""

    def whole(self) -> list[Digest]:
        """Whole files, the oldest first; blocks."""
        found = [path for path in self._blobs.rglob("*") if path.is_file() and is_digest(path.name)]
        return [Digest(path.name) for path in sorted(found, key=lambda path: (path.stat().st_mtime, path.name))]

    def has(self, digest: Digest) -> bool:
        """Whether there is a copy; blocks."""
        return file_size(self.path(digest)) is not None

    def is_right(self, digest: Digest) -> bool:
        """Whether there is a copy with the bytes of its name; reads all of it."""
        try:
            return file_digest(self.path(digest)) == digest
        except OSError:
            return False

    async def drop(self, digest: Digest) -> int:
        """Delete a copy; returns its bytes, 0 where it is written or looked at at the moment."""
        if self._locks.is_held(digest):
            return 0
        async with self._locks[digest]:
            return await self._remove_files(self.path(digest))

    def scratch(self, digest: Digest) -> Path:
        """Where bytes for a copy may be written."""
        return self._blobs.parent / SCRATCH / digest

    def scratch_bytes(self, digest: Digest) -> int:
        """Bytes that were written there."""
        return file_size(self.scratch(digest)) or 0

    def missing_bytes(self, num_bytes: int) -> int:
        """Bytes that would exceed the bound with so many more; not positive where there is room for them."""
        return self._used + num_bytes - self._store_bytes

    async def take(self, scratch: Path, *, digest: Digest, num_bytes: int) -> bool:
        """Make a file a copy where it has the bytes of this name; returns whether it has. They were counted before.

        Raises:
            StoreFull, Busy, CorruptStore: the disk refuses.
        """
        async with self._locks[digest]:
            if file_size(self.path(digest)) is not None:
                # Counted when it came.
                self.count(-num_bytes)
                return True
            if await asyncio.to_thread(file_size, scratch) != num_bytes:
                return False
            if await asyncio.to_thread(file_digest, scratch) != digest:
                return False
            await asyncio.to_thread(name_file, scratch, self.path(digest))
            return True
