"""Handling of payloads that are missing or damaged on disk.

Damage is a missing file that the store offers, or a failed digest check. All other I/O errors are transient: the caller
gets Busy and retries. So is a missing directory, as after an unmount.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from pathlib import Path

from heterorl.common.errors import Busy, RemoteError, UnknownPayload
from heterorl.common.process.metrics import DAMAGED_PAYLOADS, UNREADABLE_PAYLOADS
from heterorl.common.pull.payload_reader import DamagedFile
from heterorl.common.types.common import Digest
from heterorl.coordinator.payloads import payload_index
from heterorl.coordinator.payloads.merged_deltas import MergedDeltas
from heterorl.coordinator.store.blobs import BlobStore
from heterorl.coordinator.store.database import Database
from heterorl.coordinator.store.payload_files import BUSY_S, PayloadCache, Repair, file_size, unreadable

_LOG = logging.getLogger(__name__)


class Damage:
    """Takes damaged payloads out of use. Belongs to the event loop."""

    def __init__(self, *, database: Database, blobs: BlobStore, cache: PayloadCache, merges: MergedDeltas) -> None:
        self._database = database
        self._cache = cache
        self._blobs = blobs
        self._merges = merges
        self._told: set[Digest] = set()
        self._doubted: set[Digest] = set()
        """Payloads that failed a proof once although their copies are right."""

    async def of_read(self, digest: Digest, error: OSError | DamagedFile) -> RemoteError:
        """The error for the caller of a failed read.

        A damaged payload is not offered again. UnknownPayload: missing or damaged; the caller plans again. Busy: it
        cannot be read now.
        """
        if isinstance(error, FileNotFoundError | DamagedFile) and await self._cache.heal(digest) is not Repair.LOST:
            # Even if the file is whole again: an open reader still reads the replaced file.
            return Busy(f"payload {digest[:12]} was fetched again", retry_after_s=BUSY_S)
        if isinstance(error, FileNotFoundError):
            self._check_is_there()
            if await self._database.run(lambda connection: payload_index.is_named(connection, digest)):
                await self.put_aside(digest, str(error))
            return UnknownPayload(f"payload {digest[:12]} is not stored")
        if isinstance(error, DamagedFile):
            await self.put_aside(digest, str(error))
            return UnknownPayload(f"payload {digest[:12]} was damaged on disk")
        self._tell(digest, error)
        return unreadable(error)

    def note_read(self, digest: Digest) -> None:
        """Note a whole read of a payload: its next failure is logged."""
        self._told.discard(digest)

    async def put_aside_unproved(self, digest: Digest, problem: str) -> bool:
        """Put a payload aside that failed a proof, unless right or repaired.
        Returns whether to prove it again at once, since a right copy may have replaced it during the proof."""
        cure = await self._cache.heal(digest)
        if cure is Repair.RIGHT and digest not in self._doubted:
            _LOG.warning("payload %s is verified again: %s", digest[:12], problem)
            self._doubted.add(digest)
            return True
        self._doubted.discard(digest)
        if cure is not Repair.CURED:
            await self.put_aside(digest, problem)
        return False

    def note_proved(self, digests: Iterable[Digest]) -> None:
        self._doubted.difference_update(digests)

    async def put_aside(self, digest: Digest, problem: str) -> None:
        DAMAGED_PAYLOADS.inc()
        _LOG.error("payload %s is out of use, new plans avoid it: %s", digest[:12], problem)
        await self._database.run(lambda connection: payload_index.strike_out(connection, digest))
        # Where the wrong bytes cannot be moved now, the garbage collector deletes them, also after a restart.
        await self._blobs.set_aside(digest)
        await self._database.run(lambda connection: payload_index.forget_retired(connection, {digest: 0}))
        await self._merges.drop(digest)

    async def put_aside_missing(self, files: Iterable[tuple[Digest, Path]]) -> None:
        """Put missing payloads aside. Raises Busy: their state is unknown now."""
        for digest, path in files:
            if await asyncio.to_thread(file_size, path) is None:
                self._check_is_there()
                if await self._cache.heal(digest) is Repair.LOST:
                    await self.put_aside(digest, "it is gone")

    def _check_is_there(self) -> None:
        if not self._blobs.is_there():
            raise Busy("the directory of the payloads is gone: is its disk mounted?", retry_after_s=BUSY_S)

    def _tell(self, digest: Digest, error: OSError) -> None:
        """Log a failure once until the payload can be read again.
        Callers retry every few seconds."""
        UNREADABLE_PAYLOADS.inc()
        if digest not in self._told:
            self._told.add(digest)
            _LOG.error("payload %s cannot be read now and stays in use, check its disk: %s", digest[:12], error)
