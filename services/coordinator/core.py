"""One coordinator in process: opens the shared context, holds the columns, closes.

Each change is one store operation, answered after its commit. A bell wakes its waiters, so they do not poll.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from heterorl.common.errors import ConfigError, ContractMismatch, StoreFull
from heterorl.common.process.clock import Bell, Clock, SlowBell
from heterorl.common.pull.payload_reader import PayloadReader
from heterorl.coordinator import evaluation_jobs
from heterorl.coordinator.context import CoordinatorContext
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.coordinator.evaluation_column import EvaluationColumn
from heterorl.coordinator.groups import queue, validation
from heterorl.coordinator.groups.work_assignments import Deadlines
from heterorl.coordinator.learner_lease import LearnerLease
from heterorl.coordinator.payloads.backup import Backups
from heterorl.coordinator.payloads.damage import Damage
from heterorl.coordinator.payloads.delta_merger import DeltaMerger
from heterorl.coordinator.payloads.garbage_collector import GarbageCollector, Stores
from heterorl.coordinator.payloads.merged_deltas import MergedDeltas
from heterorl.coordinator.payloads.retention import PullLeases
from heterorl.coordinator.payloads.storage_setup import open_payloads
from heterorl.coordinator.policy_column import PolicyColumn
from heterorl.coordinator.rollout_column import RolloutColumn
from heterorl.coordinator.run_column import RunColumn
from heterorl.coordinator.sample_column import SampleColumn
from heterorl.coordinator.sample_ring import SampleRing
from heterorl.coordinator.sites.sites import Sites
from heterorl.coordinator.store.database import Connection, Database, DatabaseEngine, get_meta, set_meta
from heterorl.coordinator.store.disk_space import DiskSpace, operators_error
from heterorl.coordinator.store.engine_choice import open_engine
from heterorl.coordinator.versions import lineage


class Coordinator:
    """The columns over one store: CoordinatorApi for callers in this process."""

    def __init__(self, context: CoordinatorContext) -> None:
        self.context = context
        self.lease = LearnerLease(context)
        self.policy = PolicyColumn(context)
        self.evaluation = EvaluationColumn(context)
        self.rollout = RolloutColumn(context, held_out=self.evaluation.lease)
        self.run = RunColumn(context)
        self.sample = SampleColumn(context)
        self.push_groups = self.rollout.take_groups
        self.on_fatal = context.database.on_fatal
        """Resolves when the store has failed and the process must end."""

    def __getattr__(self, name: str) -> Any:
        """CoordinatorApi and parts of the context, for callers in this process."""
        columns = ("lease", "policy", "evaluation", "rollout", "run", "sample", "context")
        for part in map(self.__dict__.get, () if name.startswith("_") else columns):
            if hasattr(part, name):
                return getattr(part, name)
        raise AttributeError(name)

    @classmethod
    async def open(
        cls,
        config: CoordinatorConfig,
        clock: Clock,
        *,
        store: type[Database] = Database,
        engine: DatabaseEngine | None = None,
    ) -> Coordinator:
        """Open the data directory; raises as `open_context`.

        `store` runs the operations: on a thread, or inline under a virtual clock. `engine` is a store already taken.
        """
        return cls(await open_context(config, clock, store=store, engine=engine))

    async def end_streams(self) -> None:
        self.context.closing.set()
        self.context.bell.ring()
        self.context.head_bell.ring_at_once()

    async def close(self) -> None:
        await self.end_streams()
        await self.context.collector.close()
        await self.context.reader.close()
        await self.context.database.close()


async def open_context(
    config: CoordinatorConfig, clock: Clock, *, store: type[Database], engine: DatabaseEngine | None = None
) -> CoordinatorContext:
    """Open the data directory; each lease found there gets a fresh term.
    Raises CorruptStore: the store fails its check; ContractMismatch: it is of another run or seed; OperatorError: the
    directory cannot be used; Busy: the bucket does not answer."""
    disk = DiskSpace(config.data_dir, min_free_bytes=config.min_free_bytes, clock=clock)
    database = await store.over(
        lambda: engine or open_engine(config.data_dir, config.store.url, is_elsewhere=bool(config.payloads.bucket)),
        on_full=disk.note_refusal_of_postgres if config.store.url else disk.note_refusal,
    )
    now = clock.monotonic()
    ring = SampleRing(
        limit_bytes=config.samples_bytes,
        every=config.samples_every,
        max_sample_bytes=config.max_group_bytes,
        wall=clock.wall,
        may_write=lambda: not disk.problem,
    )

    async def make_room(missing_bytes: int) -> None:
        # The collector is opened below, over these files, before the first upload.
        await collector.collect(missing_bytes=missing_bytes)

    try:
        await database.run(lambda connection: _start(connection, config))
        names = [each.name for each in config.evaluation]
        with contextlib.suppress(StoreFull):
            await database.run(lambda connection: evaluation_jobs.end_removed(connection, names, now=clock.wall()))
        # The bound may have shrunk. On a full disk the next kept sample trims.
        with contextlib.suppress(StoreFull):
            while not await database.run(ring.trim):
                pass
        storage, blobs, cache = await open_payloads(
            config, database, clock, make_room=make_room, on_full=disk.note_refusal
        )
        merges = await asyncio.to_thread(MergedDeltas, config.data_dir / "merged")
        sites = Sites(max_work_ahead_s=config.max_work_ahead_s)
        # The coordinator does not see reads from the bucket.
        lease_s = max(config.pull_lease_s, config.payloads.url_lifetime_s if config.payloads.bucket else 0.0)
        leases = PullLeases(term_s=lease_s, started=now)
        damage = Damage(database=database, blobs=blobs, cache=cache, merges=merges)
        stores = Stores(
            config=config, clock=clock, database=database, blobs=blobs, cache=cache, merges=merges, damage=damage
        )
        collector = GarbageCollector(
            **vars(stores), leases=leases, in_use=sites.versions_in_use, missing_bytes=lambda: disk.missing_bytes
        )
        await collector.recover()
    except BaseException as error:
        await database.close()
        if isinstance(error, OSError):
            raise operators_error(config.data_dir, error) from error
        raise
    if disk.look():
        collector.poke()
    return CoordinatorContext(
        **vars(stores),
        storage=storage,
        merger=DeltaMerger(
            **vars(stores), leased=lambda: leases.payloads(clock.monotonic()), may_write=lambda: not disk.is_full
        ),
        leases=leases,
        reader=PayloadReader(),
        collector=collector,
        disk=disk,
        backups=Backups(**vars(stores), collector=collector),
        sites=sites,
        deadlines=Deadlines(sites=sites, work_lease_s=config.work_lease_s, started=now),
        bell=Bell(),
        head_bell=SlowBell(clock),
        queue=queue.Queue.of(config, ring),
        started=now,
    )


def _start(connection: Connection, config: CoordinatorConfig) -> None:
    run_id = get_meta(connection, "run_id")
    if run_id is None:
        set_meta(connection, "run_id", config.run_id)
    elif run_id != config.run_id:
        raise ContractMismatch(
            f"{config.data_dir} belongs to run {run_id}, not {config.run_id}", action="choose another data_dir"
        )
    seed = get_meta(connection, "seed")
    if seed is not None and seed != str(config.seed):
        raise ContractMismatch(f"the run began with seed {seed}, not {config.seed}", action="set seed to that value")
    if seed is None:
        # Only once, so that a later start on a full disk needs no write.
        set_meta(connection, "seed", str(config.seed))
    contract = lineage.read_contract(connection)
    problem = "" if contract is None else validation.contract_problem(contract, config)
    if problem:
        raise ConfigError("max_message_bytes", problem, action=validation.SIZE_ACTION)
