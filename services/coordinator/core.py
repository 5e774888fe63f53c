"""One coordinator: opens what its columns share, holds the columns, closes. Knows no transport.

Guarantees: each mutation is one store operation, answered after its commit; waiters are woken by bells, never by
polling; closing wakes every waiter. Must never decide anything that a pure module can.
"""

from __future__ import annotations

import asyncio

from heterorl.common.process.clock import Clock
from heterorl.coordinator.config import CoordinatorConfig
from heterorl.coordinator.evaluation import EvaluationColumn
from heterorl.coordinator.lease import LearnerLease
from heterorl.coordinator.opening import open_parts
from heterorl.coordinator.parts import Parts
from heterorl.coordinator.policy import PolicyColumn
from heterorl.coordinator.rollout import RolloutColumn
from heterorl.coordinator.run import RunColumn
from heterorl.coordinator.sample import SampleColumn
from heterorl.coordinator.store.database import Database
from heterorl.coordinator.store.engine import Engine


class Coordinator:
    """The columns over one store, and all of heterorl.common.api.CoordinatorApi for callers in the same process."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.lease = LearnerLease(parts)
        self.policy = PolicyColumn(parts)
        self.rollout = RolloutColumn(parts)
        self.run = RunColumn(parts)
        self.evaluation = EvaluationColumn(parts)
        self.sample = SampleColumn(parts)
        # What runs beside the calls, and what is looked at from outside.
        self.config = parts.config
        self.clock = parts.clock
        self.database = parts.database
        self.blobs = parts.blobs
        self.merges = parts.merges
        self.composer = parts.composer
        self.leases = parts.leases
        self.damage = parts.damage
        self.keeper = parts.keeper
        self.room = parts.room
        self.backups = parts.backups
        # CoordinatorApi, call by call: for a caller in this process the columns are one.
        self.acquire_lease = self.lease.acquire_lease
        self.renew_lease = self.lease.renew_lease
        self.release_lease = self.lease.release_lease
        self.query_upload = self.policy.query_upload
        self.upload_payload = self.policy.upload_payload
        self.put_payload = self.policy.put_payload
        self.take_payload = self.policy.take_payload
        self.publish_version = self.policy.publish_version
        self.get_step = self.policy.get_step
        self.watch_head = self.policy.watch_head
        self.get_signed_manifest = self.policy.get_signed_manifest
        self.list_manifests = self.policy.list_manifests
        self.plan_pull = self.policy.plan_pull
        self.read_payload = self.policy.read_payload
        self.lease_work = self.rollout.lease_work
        self.abandon_work = self.rollout.abandon_work
        self.push_groups = self.rollout.push_groups
        self.stream_groups = self.rollout.stream_groups
        self.abandon_groups = self.rollout.abandon_groups
        self.reject_groups = self.rollout.reject_groups
        self.register = self.run.register
        self.heartbeat = self.run.heartbeat
        self.report_canary = self.run.report_canary
        self.get_status = self.run.get_status
        self.list_steps = self.run.list_steps
        self.drain = self.run.drain
        self.rollback = self.run.rollback
        self.list_restorable = self.run.list_restorable
        self.release_site = self.run.release_site
        self.describe_run = self.run.describe_run
        self.note_samples = self.sample.note_samples
        self.list_samples = self.sample.list_samples
        self.get_sample = self.sample.get_sample
        self.lease_evaluation = self.evaluation.lease_evaluation
        self.push_evaluation = self.evaluation.push_evaluation
        self.abandon_evaluation = self.evaluation.abandon_evaluation
        self.list_evaluations = self.evaluation.list_evaluations

    @classmethod
    async def open(
        cls,
        config: CoordinatorConfig,
        clock: Clock,
        *,
        store: type[Database] = Database,
        engine: Engine | None = None,
    ) -> Coordinator:
        """Open the data directory; every lease found there gets a fresh term.

        `store` is how operations run on the database: on a thread of their own, or inline under a virtual clock.
        `engine` is a store that was taken before, as a standby does.

        Raises:
            CorruptStore: the store fails its check or belongs to another run.
        """
        return cls(await open_parts(config, clock, store=store, engine=engine))

    @property
    def on_fatal(self) -> asyncio.Future[None]:
        """Resolves when the store failed and the process must end."""
        return self.database.on_fatal

    async def end_streams(self) -> None:
        """Wake every waiter with the news of the end."""
        self.parts.closing.set()
        self.parts.bell.ring()
        self.parts.head_bell.ring()

    async def close(self) -> None:
        """End the streams and close the store."""
        await self.end_streams()
        await self.keeper.close()
        await self.parts.reader.close()
        await self.database.close()
