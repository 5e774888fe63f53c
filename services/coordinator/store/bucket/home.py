"""A bucket as the home of payloads: what is there, put there before anybody is told that it is durable.

Guarantees: a payload is complete when the bucket has it; what is there was listed at the start and is known since, as
one coordinator alone writes; an upload that the bucket did not take stays as a file and is offered again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from heterorl.common.errors import StoreFull
from heterorl.common.types.common import Digest
from heterorl.coordinator.store.bucket.objects import Objects
from heterorl.coordinator.store.home import Home


class BucketHome(Home):
    """What a bucket holds of one run. Belongs to the event loop."""

    def __init__(
        self,
        objects: Objects,
        sizes: dict[Digest, int],
        *,
        store_bytes: int,
        make_room: Callable[[int], Awaitable[None]],
        on_kept: Callable[[Digest], None],
        on_gone: Callable[[Digest], None],
    ) -> None:
        """Use `open` instead."""
        self._on_kept = on_kept
        self._on_gone = on_gone
        self._objects = objects
        self._sizes = sizes
        self._store_bytes = store_bytes
        self._make_room = make_room

    @classmethod
    async def open(
        cls,
        objects: Objects,
        *,
        store_bytes: int,
        make_room: Callable[[int], Awaitable[None]],
        on_kept: Callable[[Digest], None],
        on_gone: Callable[[Digest], None],
    ) -> BucketHome:
        """List a prefix that was claimed.

        Args:
            objects: of the prefix.
            store_bytes: bytes that payloads may occupy there.
            make_room: called with the bytes that are missing before one is refused.
            on_kept: told of each payload whose file is a copy from then on.
            on_gone: told of each payload that is there no longer.

        Raises:
            Busy: the bucket does not answer, or refuses.
        """
        sizes = await objects.sizes()
        return cls(objects, sizes, store_bytes=store_bytes, make_room=make_room, on_kept=on_kept, on_gone=on_gone)

    @property
    def used_bytes(self) -> int:
        """Bytes of all payloads there."""
        return sum(self._sizes.values())

    def size(self, digest: Digest) -> int | None:
        """Size of a payload that is there, or None."""
        return self._sizes.get(digest)

    def digests(self) -> frozenset[Digest]:
        """Every payload that is there."""
        return frozenset(self._sizes)

    async def reserve(self, num_bytes: int) -> None:
        """Make room for a payload; those that arrive side by side may exceed the bound by their number."""
        missing = self.used_bytes + num_bytes - self._store_bytes
        if missing > 0:
            await self._make_room(missing)
        if self.used_bytes + num_bytes > self._store_bytes:
            raise StoreFull(
                f"{num_bytes} more bytes of payloads would exceed store_bytes = {self._store_bytes};"
                f" {self.used_bytes} are in the bucket and nothing more can be deleted now",
                retry_after_s=30.0,
            )

    async def keep(self, digest: Digest, path: Path) -> None:
        """Take a complete, verified file; durable when this returns."""
        if digest in self._sizes:
            return
        size = (await asyncio.to_thread(path.stat)).st_size
        await self._objects.put(digest, path)
        self._sizes[digest] = size
        self._on_kept(digest)

    async def erase(self, digest: Digest) -> int:
        """Delete a payload; returns its bytes."""
        if digest not in self._sizes:
            return 0
        await self._objects.delete(digest)
        return self._forget(digest)

    async def set_aside(self, digest: Digest) -> None:
        """Move a damaged payload out of the way."""
        if digest in self._sizes:
            await self._objects.set_aside(digest)
            self._forget(digest)

    def _forget(self, digest: Digest) -> int:
        self._on_gone(digest)
        return self._sizes.pop(digest)

    async def fetch(self, digest: Digest, path: Path) -> None:
        """Write a payload into a file, behind what it has already; it may have any bytes then."""
        await self._objects.fetch(digest, path)

    async def urls(self, digests: Sequence[Digest]) -> list[str]:
        """An address for each payload, empty for what is not there."""
        there = [digest for digest in digests if digest in self._sizes]
        signed = dict(zip(there, await self._objects.urls(there), strict=True))
        return [signed.get(digest, "") for digest in digests]
