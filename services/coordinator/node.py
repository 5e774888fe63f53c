"""What the parts of the coordinator share: the store, the payloads, the sites, the bell, the clock."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from services.common.bell import Bell
from services.common.clock import Clock
from services.coordinator.blobs import BlobStore
from services.coordinator.composer import Composer
from services.coordinator.config import CoordinatorConfig
from services.coordinator.database import Database
from services.coordinator.merges import Merges
from services.coordinator.pull_leases import PullLeases
from services.coordinator.queue import Queue
from services.coordinator.sites import Sites
from services.coordinator.upkeep import Keeper

ResultT = TypeVar("ResultT")


@dataclass(slots=True)
class Node:
    """One coordinator's parts. Times are instants of the monotonic clock."""

    config: CoordinatorConfig
    clock: Clock
    database: Database
    blobs: BlobStore
    merges: Merges
    composer: Composer
    leases: PullLeases
    keeper: Keeper
    sites: Sites
    bell: Bell
    queue: Queue
    started: float
    lease_expires: float
    is_closing: bool = False
    stream: object = None
    """The learner's newest stream of groups; read and written by store operations only."""

    async def change(self, operation: Callable[[sqlite3.Connection], ResultT]) -> ResultT:
        """Run an operation and wake the waiters after it, also when the caller went away meanwhile."""
        future = self.database.submit(operation)
        future.add_done_callback(lambda _: self.bell.ring())
        return await asyncio.shield(future)
