"""Shared context of a coordinator's columns: store, payloads, sites, bells, clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from heterorl.common.process.clock import Bell, SlowBell
from heterorl.common.pull.payload_reader import PayloadReader
from heterorl.coordinator.groups.queue import Queue
from heterorl.coordinator.groups.work_assignments import Deadlines
from heterorl.coordinator.payloads.backup import Backups
from heterorl.coordinator.payloads.delta_merger import DeltaMerger
from heterorl.coordinator.payloads.garbage_collector import GarbageCollector, Stores
from heterorl.coordinator.payloads.retention import PullLeases
from heterorl.coordinator.sites.sites import Sites
from heterorl.coordinator.store.database import Connection
from heterorl.coordinator.store.disk_space import DiskSpace
from heterorl.coordinator.store.payload_files import PayloadStorage
from heterorl.coordinator.versions.lineage import Standing

ResultT = TypeVar("ResultT")


@dataclass(kw_only=True, eq=False, repr=False)
class CoordinatorContext(Stores):
    """The parts of one coordinator. Times are monotonic seconds."""

    storage: PayloadStorage
    merger: DeltaMerger
    leases: PullLeases
    reader: PayloadReader
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
