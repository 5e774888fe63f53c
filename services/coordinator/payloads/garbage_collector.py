"""The background worker that verifies and writes snapshots, and deletes unneeded payloads.

Deletion survives a crash at any point. One transaction retires the rows and records the files; then the files go, then
the record. So a plan never names a file that may go, and a start finishes an interrupted deletion. Before payloads are
retired, the remaining path to the head is rebuilt and compared with its manifests.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from heterorl.common.errors import Busy, StoreFull
from heterorl.common.process.clock import Clock
from heterorl.common.process.metrics import RECLAIMED_BYTES
from heterorl.common.types.common import Digest
from heterorl.common.types.policy import PayloadKind, PayloadRef
from heterorl.common.weights.compose import MAX_PAYLOADS
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.coordinator.payloads import payload_index
from heterorl.coordinator.payloads.damage import Damage
from heterorl.coordinator.payloads.merged_deltas import MergedDeltas
from heterorl.coordinator.payloads.payload_index import (
    DamagedPayload,
    Work,
    decide_snapshot,
    verify_way,
    write_snapshot,
)
from heterorl.coordinator.payloads.retention import Needs, PullLeases
from heterorl.coordinator.store.background import BackgroundWorker
from heterorl.coordinator.store.blobs import BlobStore
from heterorl.coordinator.store.database import Database
from heterorl.coordinator.store.payload_files import PayloadCache
from heterorl.coordinator.versions import published_variants
from heterorl.coordinator.versions.chain import Chain

_LOG = logging.getLogger(__name__)
ResultT = TypeVar("ResultT")
BATCHES = 8
"""Payloads are retired an eighth of the window at a time, since each time costs a rebuild of the head."""
UNPUBLISHED_VERSIONS = 2
"""Versions after which an upload that no version names is deleted."""


@dataclass(kw_only=True, eq=False, repr=False)
class Stores:
    """Parts that all work on payloads shares."""

    config: CoordinatorConfig
    clock: Clock
    database: Database
    blobs: BlobStore
    cache: PayloadCache
    merges: MergedDeltas
    damage: Damage

    def paths_of(self, payloads: Iterable[PayloadRef]) -> list[Path]:
        """Files of payloads, merged deltas among them."""
        return [
            self.merges.path(payload) if payload.kind is PayloadKind.MERGED else self.blobs.path(payload.digest)
            for payload in payloads
        ]


def stored_of(payloads: Iterable[PayloadRef]) -> list[Digest]:
    """Payloads of the store; merged deltas are only files."""
    return [payload.digest for payload in payloads if payload.kind is not PayloadKind.MERGED]


@dataclass(kw_only=True, eq=False, repr=False)
class GarbageCollector(BackgroundWorker, Stores):
    """Deletes payloads and writes snapshots. Belongs to the event loop."""

    leases: PullLeases
    in_use: Callable[[float], frozenset[int]]
    missing_bytes: Callable[[], int]

    def __post_init__(self) -> None:
        super().__init__("garbage_collector", self.clock)
        self._rebuilt = self.config.data_dir / "rebuilt"
        self.undisturbed = asyncio.Lock()
        """Holds off deletions, for a short time."""
        self._unpublished: dict[Digest, int] = {}

    async def recover(self) -> None:
        """Finish an earlier process's deletions, before anything is served."""
        await asyncio.to_thread(payload_index.empty, self._rebuilt)
        try:
            # Bytes that wait for their deletion may be wrong: no upload relies on them.
            self.blobs.doubt(await self.database.run(payload_index.retired))
            await self._sweep()
        except (StoreFull, Busy) as error:
            _LOG.warning("garbage_collector postpones the deletion of payloads: %s", error)

    async def run(self) -> None:
        """Verify, write and delete what is due until cancelled.
        Returns when the store ends."""
        await self._loop(self.work)

    async def work(self) -> None:
        """Verify, write and delete what is due.
        Where bytes are missing it writes no payload, and deletes unneeded payloads at once."""
        missing_bytes = self.missing_bytes()
        if missing_bytes:
            await self.blobs.drop_damaged(missing_bytes)
            # Merged deltas and copies of a bucket's payloads are caches.
            if self.missing_bytes():
                leased = self.leases.payloads(self.clock.monotonic())
                await self.merges.evict(head=0, window=0, budget_bytes=0, leased=lambda: leased)
            await self.cache.make_room(self.missing_bytes())
        for variant in await self.database.run(published_variants.stored):
            while await self._verify_newest(variant) or (not missing_bytes and await self._write_due(variant)):
                pass
        await self.collect(missing_bytes=missing_bytes)

    async def _verify_newest(self, variant: str) -> bool:
        """Verify the newest snapshot if needed; returns whether to look again."""
        work = await self._ask(variant, payload_index.unverified_snapshot)
        if work is None:
            return False
        if not await self._is_proved(work):
            # It was put aside, so another is the newest; or it is unreadable now.
            return await self._ask(variant, payload_index.unverified_snapshot) != work
        await self._ask(variant, lambda chain: chain.note_verified(work.payloads[0]))
        where = f" in variant {variant}" if variant else ""
        _LOG.info("the snapshot of version %d%s is verified", work.payloads[0].to_version, where)
        return True

    async def _write_due(self, variant: str) -> bool:
        """Write a snapshot if one is due; returns whether to look again."""
        merged_into = functools.partial(self.merges.into, variant=variant)
        way = await self._ask(variant, lambda chain: payload_index.way_of_joiner(chain, merged_into))
        is_due, reason = decide_snapshot(
            way, snapshot_ratio=self.config.snapshot_ratio, window=self.config.merge_window_versions
        )
        if not is_due:
            return False
        # A snapshot on the path shortens a longer one.
        work = await self._ask(variant, lambda chain: payload_index.work(chain, way[:MAX_PAYLOADS]))
        _LOG.debug("version %d gets a snapshot: %s", work.manifests[-1].version, reason)
        scratch = self._rebuilt / "snapshot"
        try:
            async with self.cache.at_hand(stored_of(work.payloads)):
                write = functools.partial(write_snapshot, self.paths_of(work.payloads), scratch, work, self._check_stop)
                payload = await self._in_thread(write)
            await self.blobs.adopt(scratch, digest=payload.digest, num_bytes=payload.num_bytes)
        except DamagedPayload as error:
            await self.damage.put_aside_unproved(work.payloads[error.index].digest, str(error))
            return True
        except (StoreFull, Busy, OSError) as error:
            # The next version is the next attempt.
            version = work.manifests[-1].version
            _LOG.warning("the snapshot of version %d is not written, the next version tries again: %s", version, error)
            return False
        finally:
            scratch.unlink(missing_ok=True)
        return await self._ask(variant, lambda chain: payload_index.add_snapshot(chain, payload))

    async def _is_proved(self, work: Work) -> bool:
        """Rebuild every state along a path; a wrong payload is put aside."""
        try:
            async with self.cache.at_hand(stored_of(work.payloads)):
                paths = self.paths_of(work.payloads)
                await self._in_thread(lambda: verify_way(paths, work.manifests, on_chunk=self._check_stop))
        except DamagedPayload as error:
            if await self.damage.put_aside_unproved(work.payloads[error.index].digest, str(error)):
                return await self._is_proved(work)
        except OSError as error:
            version = work.manifests[-1].version
            _LOG.warning("version %d cannot be rebuilt now, old payloads stay until it can: %s", version, error)
            digests = (payload.digest for payload in work.payloads)
            await self.damage.put_aside_missing(zip(digests, self.paths_of(work.payloads), strict=True))
        else:
            self.damage.note_proved(stored_of(work.payloads))
            return True
        return False

    async def collect(self, *, missing_bytes: int = 0) -> int:
        """Delete payloads that no sampler needs; returns the bytes freed.
        Not in batches if bytes are missing."""
        async with self.undisturbed:
            await self._give_up_unpublished()
            if not self.leases.are_known(self.clock.monotonic()):
                return await self._sweep()
            for variant in await self.database.run(published_variants.stored):
                await self._retire_unneeded(variant, is_pressed=missing_bytes > 0)
            return await self._sweep()

    async def _retire_unneeded(self, variant: str, *, is_pressed: bool) -> None:
        needs = self._needs()
        retirement = await self._ask(variant, lambda chain: payload_index.decide(chain, needs))
        is_worth_it = len(retirement.payloads) * BATCHES >= self.config.merge_window_versions
        if not retirement.payloads or not (is_pressed or is_worth_it):
            return
        proved = retirement.way
        work = await self._ask(variant, lambda chain: payload_index.work(chain, proved))
        if not proved or await self._is_proved(work):
            needs = self._needs()
            await self._ask(variant, lambda chain: payload_index.carry_out(chain, needs, proved=proved))

    def _needs(self) -> Needs:
        now = self.clock.monotonic()
        term_s = self.config.pull_lease_s
        return Needs(
            window=self.config.merge_window_versions,
            staleness=self.config.max_staleness_versions,
            in_use=self.in_use(now - term_s) | self.leases.versions(now),
            leased=self.leases.payloads(now),
        )

    async def _sweep(self) -> int:
        freed: dict[Digest, int] = {}
        for digest in await self.database.run(payload_index.retired):
            num_bytes = await self._remove(digest)
            if num_bytes is not None:
                freed[digest] = num_bytes
        total = sum(freed.values())
        if freed:
            await self.database.run(lambda connection: payload_index.forget_retired(connection, freed))
            RECLAIMED_BYTES.inc(total)
        return total

    async def _remove(self, digest: Digest) -> int | None:
        async def is_needed() -> bool:
            is_named = await self.database.run(lambda connection: payload_index.is_named(connection, digest))
            return is_named or digest in self.leases.payloads(self.clock.monotonic())

        return await self.blobs.remove(digest, is_needed=is_needed)

    async def _give_up_unpublished(self) -> None:
        named, num_versions = await self.database.run(payload_index.named)
        waiting = self.blobs.stored() - named
        self._unpublished = {digest: self._unpublished.get(digest, num_versions) for digest in waiting}
        given_up = [d for d, seen in self._unpublished.items() if num_versions >= seen + UNPUBLISHED_VERSIONS]
        if given_up:
            await self.database.run(lambda connection: payload_index.retire_digests(connection, given_up))

    async def _ask(self, variant: str, operation: Callable[[Chain], ResultT]) -> ResultT:
        return await self.database.run(lambda connection: operation(Chain(connection, variant)))
