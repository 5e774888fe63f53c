"""Shared context of a coordinator's columns: store, payloads, sites, bells, clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from heterorl.common.process.clock import Bell, Clock, SlowBell
from heterorl.common.pull.payload_reader import PayloadReader
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.coordinator.groups.deadlines import Deadlines
from heterorl.coordinator.groups.queue import Queue
from heterorl.coordinator.payloads.backup import Backups
from heterorl.coordinator.payloads.damage import Damage
from heterorl.coordinator.payloads.delta_merger import DeltaMerger
from heterorl.coordinator.payloads.garbage_collector import GarbageCollector
from heterorl.coordinator.payloads.merged_deltas import MergedDeltas
from heterorl.coordinator.payloads.retention import PullLeases
from heterorl.coordinator.sites.sites import Sites
from heterorl.coordinator.store.blobs import BlobStore
from heterorl.coordinator.store.database import Connection, Database
from heterorl.coordinator.store.disk_space import DiskSpace
from heterorl.coordinator.store.payload_storage import PayloadCache, PayloadStorage
from heterorl.coordinator.versions.lineage import Standing

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorContext:
    """The parts of one coordinator. Times are monotonic seconds."""

    config: CoordinatorConfig
    clock: Clock
    database: Database
    storage: PayloadStorage
    blobs: BlobStore
    cache: PayloadCache
    merges: MergedDeltas
    merger: DeltaMerger
    leases: PullLeases
    reader: PayloadReader
    damage: Damage
    collector: GarbageCollector
    disk: DiskSpace
    backups: Backups
    sites: Sites
    deadlines: Deadlines
    bell: Bell
    """Rings when groups or the lease change: for the learner's stream."""
    head_bell: SlowBell
    """Rings when a version is published: for all samplers, perhaps a thousand."""
    queue: Queue
    started: float
    standing: Standing = field(default_factory=Standing)
    closing: asyncio.Event = field(default_factory=asyncio.Event)

    async def change(self, operation: Callable[[Connection], ResultT], *, is_publication: bool = False) -> ResultT:
        """Run an operation, then wake the waiters, even after a cancellation."""
        future = self.database.submit(operation)
        future.add_done_callback(lambda _: self.bell.ring())
        if is_publication:
            future.add_done_callback(lambda _: self.head_bell.ring())
        return await asyncio.shield(future)
