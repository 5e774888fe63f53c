"""What the parts of the coordinator share: the store, the payloads, the sites, the bell, the clock."""

from __future__ import annotations

from dataclasses import dataclass

from services.common.bell import Bell
from services.common.clock import Clock
from services.coordinator.blobs import BlobStore
from services.coordinator.config import CoordinatorConfig
from services.coordinator.database import Database
from services.coordinator.queue import Queue
from services.coordinator.sites import Sites


@dataclass(slots=True)
class Node:
    """One coordinator's parts. Times are instants of the monotonic clock."""

    config: CoordinatorConfig
    clock: Clock
    database: Database
    blobs: BlobStore
    sites: Sites
    bell: Bell
    queue: Queue
    started: float
    lease_expires: float
    is_closing: bool = False
