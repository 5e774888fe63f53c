"""Copies of the bucket's payloads in the data directory: bounded, fetched for who reads, compared with their names.

Guarantees: a copy that is read stays; others go when room is wanted, the longest unused first; two who want the same
wait for one fetch, which goes on when they have gone; a copy that a disk changed is fetched again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

from heterorl.common.errors import Busy
from heterorl.common.types.common import Digest
from heterorl.coordinator.store.bucket.files import CopyFiles
from heterorl.coordinator.store.bucket.home import BucketHome
from heterorl.coordinator.store.home import Copies

_LOG = logging.getLogger(__name__)


class BucketCopies(Copies):
    """Copies of one bucket's payloads among the files of one directory. Belongs to the event loop."""

    def __init__(self, files: CopyFiles, home: BucketHome) -> None:
        self._files = files
        self._home = home
        self._in_use: Counter[Digest] = Counter()
        # Longest unused first.
        self._order: OrderedDict[Digest, None] = OrderedDict()
        self._fetching: dict[Digest, asyncio.Task[None]] = {}

    async def settle(self) -> None:
        """Give the bucket the whole files that it has not: of a process that died, or of one without a bucket.

        Raises:
            Busy: it cannot be given now.
        """
        for digest in await asyncio.to_thread(self._files.whole):
            self._order[digest] = None
            await self._home.keep(digest, self._files.path(digest))

    @asynccontextmanager
    async def at_hand(self, digests: Iterable[Digest]) -> AsyncIterator[None]:
        """While copies of these payloads are there, as far as the bucket has them."""
        names = Counter(digests)
        self._in_use += names
        try:
            for digest in names:
                self._order[digest] = None
                self._order.move_to_end(digest)
                if self._home.size(digest) is not None and not await asyncio.to_thread(self._files.has, digest):
                    await self._fetch(digest)
            yield
        finally:
            self._in_use -= names

    async def heal(self, digest: Digest) -> bool:
        """Fetch a payload again whose copy is gone or wrong; False where the copy is right or the bucket's is not."""
        if self._home.size(digest) is None or await asyncio.to_thread(self._files.is_right, digest):
            return False
        _LOG.warning("the copy of payload %s is gone or damaged, and fetched again", digest[:12])
        await self._files.drop(digest)
        try:
            await self._fetch(digest)
        except FileNotFoundError:
            return False
        return await asyncio.to_thread(self._files.has, digest)

    async def make_room(self, missing_bytes: int) -> None:
        """Delete copies that nobody reads, the longest unused first."""
        for digest in [*self._order]:
            if missing_bytes <= 0:
                return
            if self._in_use[digest] or digest in self._fetching or self._home.size(digest) is None:
                continue
            missing_bytes -= await self._files.drop(digest)
            self._order.pop(digest, None)

    async def _fetch(self, digest: Digest) -> None:
        """Make a copy; a payload that arrives with other bytes is no copy.

        Raises:
            FileNotFoundError: the bucket has lost it.
            Busy: the bucket does not answer, or sent other bytes.
            StoreFull: the disk is full.
        """
        task = self._fetching.get(digest)
        if task is None:
            task = asyncio.ensure_future(self._copy(digest))
            self._fetching[digest] = task
            task.add_done_callback(lambda done: self._fetched(digest, done))
        await asyncio.shield(task)

    async def _copy(self, digest: Digest) -> None:
        size = self._home.size(digest)
        assert size is not None
        scratch = self._files.scratch(digest)
        await self._files.room_for_copy(size)
        try:
            await self._home.fetch(digest, scratch)
            if not await self._files.take(scratch, digest=digest, num_bytes=size):
                _LOG.error("the bucket sent other bytes than those of payload %s", digest[:12])
                raise FileNotFoundError("the payload in the bucket is damaged")
        finally:
            await asyncio.to_thread(scratch.unlink, missing_ok=True)

    def _fetched(self, digest: Digest, done: asyncio.Task[None]) -> None:
        del self._fetching[digest]
        if not done.cancelled() and isinstance(error := done.exception(), Busy):
            _LOG.debug("payload %s was not fetched: %s", digest[:12], error)
