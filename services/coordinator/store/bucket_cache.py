"""Bounded cache of the bucket's payloads in the data directory.

Room is reserved before the first byte is fetched, so the bound holds for all readers together; a single reader may
exceed it. Files in use stay; others are evicted, the longest unused first. Readers of one payload share a fetch. A
damaged file is fetched again. A reader waits WAIT_S for room, then gets Busy.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from heterorl.common.errors import Busy
from heterorl.common.types.common import Digest
from heterorl.common.weights.payload import file_digest
from heterorl.coordinator.store.blobs import BlobStore
from heterorl.coordinator.store.bucket_storage import BucketStorage
from heterorl.coordinator.store.payload_files import BUSY_S, PayloadCache, Repair, file_size, name_file, payload_files

SCRATCH = "copies"
"""Directory of partial fetches, next to the payloads."""


class CacheFiles(BlobStore):
    """Payload files in the cache.
    Each whole one is a copy of the bucket's, or about to be put there."""

    def whole(self) -> list[Digest]:
        """Complete payloads, the longest unchanged first; blocks."""
        return [Digest(path.name) for path in payload_files(self._blobs.rglob("*"))]

    def has(self, digest: Digest) -> bool:
        return file_size(self.path(digest)) is not None

    def is_right(self, digest: Digest) -> bool:
        try:
            return file_digest(self.path(digest)) == digest
        except OSError:
            return False

    async def drop(self, digest: Digest) -> int:
        """Delete a copy; returns its bytes, 0 if it is in use."""
        if self._locks.is_held(digest):
            return 0
        async with self._locks[digest]:
            return await self._remove_files(self.path(digest))

    def scratch(self, digest: Digest) -> Path:
        return self._blobs.parent / SCRATCH / digest

    def scratch_bytes(self, digest: Digest) -> int:
        return file_size(self.scratch(digest)) or 0

    def missing_bytes(self, num_bytes: int) -> int:
        """Bytes beyond the bound after adding `num_bytes`; 0 or less: they fit."""
        return self._used + num_bytes - self._space_bytes

    async def take(self, scratch: Path, *, digest: Digest, num_bytes: int) -> bool:
        """Adopt a fetched file; returns whether its digest is right.
        Its bytes are reserved. Raises StoreFull, Busy, CorruptStore: the disk refuses."""
        async with self._locks[digest]:
            if file_size(self.path(digest)) is not None:
                # It was counted when it came.
                self.count(-num_bytes)
                return True
            if await asyncio.to_thread(file_size, scratch) != num_bytes:
                return False
            if await asyncio.to_thread(file_digest, scratch) != digest:
                return False
            await self._in_thread(name_file, scratch, self.path(digest))
            return True


_LOG = logging.getLogger(__name__)
FETCHES_AT_ONCE = 4
WHOLE_READS = 3
"""Reads from the first byte, until a payload with a wrong digest counts as damaged in the bucket."""
WAIT_S = 30.0


@dataclass(slots=True, eq=False)
class _Fetch:
    task: asyncio.Task[None]
    num_waiting: int = 0
    is_arriving: bool = True
    is_given_up: bool = False


class BucketCache(PayloadCache):
    """Copies of one bucket's payloads among the files of one directory.
    Belongs to the event loop."""

    def __init__(self, files: CacheFiles, storage: BucketStorage) -> None:
        self._files = files
        self._storage = storage
        self._in_use: Counter[Digest] = Counter()
        self._num_readers = 0
        """Readers that have room for all their payloads."""
        # Longest unused first: copies, partial fetches, and wanted payloads.
        self._order: OrderedDict[Digest, None] = OrderedDict()
        self._promised: dict[Digest, int] = {}
        """Bytes reserved for copies that are not there yet."""
        self._begun: dict[Digest, int] = {}
        self._fetches: dict[Digest, _Fetch] = {}
        self._going: set[Digest] = set()
        self._turns = asyncio.Semaphore(FETCHES_AT_ONCE)

    def note(self, digest: Digest) -> None:
        self._order[digest] = None
        self._order.move_to_end(digest)

    def forget(self, digest: Digest) -> None:
        """Note that a payload left the bucket: its file is no copy."""
        if digest not in self._begun:
            self._order.pop(digest, None)

    @asynccontextmanager
    async def at_hand(self, digests: Iterable[Digest]) -> AsyncIterator[None]:
        """Keep copies of payloads in the cache while the context is open.
        Payloads that the bucket lacks are left out."""
        names = Counter(digests)
        self._in_use += names
        try:
            await self._take_room(names)
            self._num_readers += 1
            try:
                for digest in names:
                    if self._storage.size(digest) is not None:
                        self.note(digest)
                        if not self._is_there(digest):
                            await self._fetch(digest)
                yield
            finally:
                self._num_readers -= 1
        finally:
            self._in_use -= names
            for digest in names:
                self._give_back(digest)
            self._files.freed.ring()

    async def heal(self, digest: Digest) -> Repair:
        """Fetch a missing or damaged copy again; LOST: the bucket has none."""
        if self._storage.size(digest) is None:
            return Repair.LOST
        if await asyncio.to_thread(self._files.is_right, digest):
            return Repair.RIGHT
        _LOG.warning("payload %s is fetched again: its copy is missing or damaged", digest[:12])
        await self._drop(digest)
        try:
            async with self.at_hand([digest]):
                # Not whether the copy is there: another reader may be replacing it.
                return Repair.LOST if self._storage.size(digest) is None else Repair.CURED
        except FileNotFoundError:
            # In another or an emptied bucket all payloads would seem lost.
            await self._storage.objects.check()
            return Repair.LOST

    async def make_room(self, missing_bytes: int) -> None:
        """Delete damaged payloads, then copies and partial fetches, the longest unused first."""
        missing_bytes -= await self._files.drop_damaged(missing_bytes)
        for digest in [*self._order]:
            if missing_bytes <= 0:
                return
            if self._in_use[digest] or digest in self._fetches:
                continue
            if (num_bytes := self._begun.pop(digest, None)) is not None:
                self._files.count(-num_bytes)
                missing_bytes -= num_bytes
                if self._storage.size(digest) is None:
                    self.forget(digest)
                await asyncio.to_thread(self._files.scratch(digest).unlink, missing_ok=True)
            elif self._storage.size(digest) is not None:
                missing_bytes -= await self._drop(digest)
                if not self._files.has(digest):
                    # Else it was in use.
                    self._order.pop(digest, None)

    async def _drop(self, digest: Digest) -> int:
        """Delete a copy, which counts as gone at once; returns its bytes."""
        self._going.add(digest)
        dropping = asyncio.ensure_future(self._files.drop(digest))
        dropping.add_done_callback(lambda _: self._going.discard(digest))
        return await asyncio.shield(dropping)

    def _is_there(self, digest: Digest) -> bool:
        return digest not in self._going and self._files.has(digest)

    async def _take_room(self, names: Iterable[Digest]) -> None:
        """Reserve room for missing copies. Raises Busy: other readers fill the cache."""
        try:
            async with asyncio.timeout(WAIT_S):
                while not self._count(wanted := self._wanted(names), may_exceed=False):
                    # Before: a fetch may end while room is made.
                    ticket = self._files.freed.ticket()
                    await self.make_room(self._files.missing_bytes(sum(wanted.values())))
                    # No await between the look and its effect.
                    if self._count(self._wanted(names), may_exceed=not self._num_readers):
                        return
                    await ticket.wait()
        except TimeoutError:
            problem = "copies that are being read fill payloads.cache_bytes"
            raise Busy(problem, action="retry, or raise payloads.cache_bytes", retry_after_s=BUSY_S) from None

    def _wanted(self, names: Iterable[Digest]) -> dict[Digest, int]:
        sizes = {digest: self._storage.size(digest) for digest in names if digest not in self._promised}
        return {
            digest: size - self._begun.get(digest, 0)
            for digest, size in sizes.items()
            if size is not None and not self._is_there(digest)
        }

    def _count(self, wanted: dict[Digest, int], *, may_exceed: bool) -> bool:
        num_bytes = sum(wanted.values())
        if wanted and not may_exceed and self._files.missing_bytes(num_bytes) > 0:
            return False
        self._files.count(num_bytes)
        for digest, rest in wanted.items():
            self._promised[digest] = rest + self._begun.pop(digest, 0)
        return True

    def _give_back(self, digest: Digest) -> None:
        """Reduce the reservation of an incomplete copy to its bytes on disk."""
        if digest in self._promised and not self._in_use[digest] and digest not in self._fetches:
            there = self._files.scratch_bytes(digest)
            self._files.count(there - self._promised.pop(digest))
            if there:
                self._begun[digest] = there
                # So that it can be evicted, even if the payload was deleted.
                self._order.setdefault(digest)

    async def _fetch(self, digest: Digest) -> None:
        """Fetch a copy and verify its digest.
        Raises FileNotFoundError: the bucket lost it; Busy: no answer or wrong bytes; StoreFull: the disk is full."""
        while (fetch := self._fetches.get(digest)) is not None and fetch.is_given_up:
            await asyncio.wait([fetch.task])
        if fetch is None:
            fetch = self._fetches[digest] = _Fetch(asyncio.ensure_future(self._copy(digest)))
            fetch.task.add_done_callback(lambda done: self._fetched(digest, done))
        fetch.num_waiting += 1
        try:
            await asyncio.shield(fetch.task)
        finally:
            fetch.num_waiting -= 1
            if not fetch.num_waiting and fetch.is_arriving and not fetch.task.done():
                fetch.is_given_up = True
                fetch.task.cancel()

    async def _copy(self, digest: Digest) -> None:
        size = self._storage.size(digest)
        assert size is not None
        scratch = self._files.scratch(digest)
        fetch = self._fetches[digest]
        whole_reads = 0
        async with self._turns:
            while not fetch.is_given_up:
                whole_reads += self._files.scratch_bytes(digest) == 0
                with self._files.watched():
                    await self._storage.objects.fetch(digest, scratch)
                # A fetched file is verified and adopted even if all waiters are cancelled.
                fetch.is_arriving = False
                is_right = await self._files.take(scratch, digest=digest, num_bytes=size)
                await asyncio.to_thread(scratch.unlink, missing_ok=True)
                if is_right:
                    self._promised.pop(digest, None)
                    return
                if whole_reads == WHOLE_READS:
                    _LOG.error("payload %s is damaged in the bucket, which sent wrong bytes", digest[:12])
                    raise FileNotFoundError("the payload in the bucket is damaged")
                fetch.is_arriving = True
                fetch.is_given_up = not fetch.num_waiting

    def _fetched(self, digest: Digest, done: asyncio.Task[None]) -> None:
        del self._fetches[digest]
        if not done.cancelled() and isinstance(error := done.exception(), Busy):
            _LOG.debug("payload %s cannot be fetched now: %s", digest[:12], error)
        self._give_back(digest)
        # Again: only now its bytes are free or can be evicted.
        self._files.freed.ring()
