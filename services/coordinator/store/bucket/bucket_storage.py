"""A bucket as payload storage.

A payload is complete when the bucket has it. The start lists the bucket; after that only this coordinator writes. A
payload that the bucket refused stays as a file and is put again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from heterorl.common.errors import StoreFull
from heterorl.common.types.common import Digest
from heterorl.coordinator.store.bucket.objects import Objects
from heterorl.coordinator.store.payload_storage import PayloadStorage


@dataclass(eq=False, repr=False)
class BucketStorage(PayloadStorage):
    """Payloads of one run in a bucket, under a claimed prefix.

    It belongs to the event loop. `sizes` lists the prefix. `make_room` gets the missing bytes before a payload is
    refused; `on_kept` and `on_gone` get each payload that enters or leaves the bucket.
    """

    objects: Objects
    sizes: dict[Digest, int]
    _: KW_ONLY
    store_bytes: int
    make_room: Callable[[int], Awaitable[None]]
    on_kept: Callable[[Digest], None]
    on_gone: Callable[[Digest], None]

    @property
    def used_bytes(self) -> int:
        return sum(self.sizes.values())

    def size(self, digest: Digest) -> int | None:
        return self.sizes.get(digest)

    def digests(self) -> frozenset[Digest]:
        return frozenset(self.sizes)

    async def reserve(self, num_bytes: int) -> None:
        """Make room for a payload; concurrent ones may exceed the bound."""
        missing = self.used_bytes + num_bytes - self.store_bytes
        if missing > 0:
            await self.make_room(missing)
        if self.used_bytes + num_bytes > self.store_bytes:
            raise StoreFull(
                f"{num_bytes} more bytes of payloads would exceed store_bytes = {self.store_bytes};"
                f" {self.used_bytes} are in the bucket and nothing more can be deleted now",
                action="raise store_bytes at the coordinator, or repeat after the stated delay",
                retry_after_s=30.0,
            )

    async def keep(self, digest: Digest, path: Path) -> None:
        if digest in self.sizes:
            return
        size = (await asyncio.to_thread(path.stat)).st_size
        await self.objects.put(digest, path)
        self.sizes[digest] = size
        self.on_kept(digest)

    async def erase(self, digest: Digest) -> int:
        if digest not in self.sizes:
            return 0
        await self.objects.delete(digest)
        return self._forget(digest)

    async def set_aside(self, digest: Digest) -> None:
        if digest in self.sizes:
            await self.objects.set_aside(digest)
            self._forget(digest)

    def _forget(self, digest: Digest) -> int:
        self.on_gone(digest)
        return self.sizes.pop(digest)

    async def urls(self, digests: Sequence[Digest]) -> list[str]:
        there = [digest for digest in digests if digest in self.sizes]
        signed = dict(zip(there, await self.objects.urls(there), strict=True))
        return [signed.get(digest, "") for digest in digests]
