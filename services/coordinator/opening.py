"""Opens the parts of a coordinator over its data directory, in the order in which they need one another."""

from __future__ import annotations

import contextlib

from heterorl.common.errors import ConfigError, ContractMismatch, StoreFull
from heterorl.common.process.clock import Bell, Clock
from heterorl.common.pull.reader import PayloadReader
from heterorl.coordinator.config import CoordinatorConfig
from heterorl.coordinator.groups import group_size, queue
from heterorl.coordinator.groups.deadlines import Deadlines
from heterorl.coordinator.parts import Parts
from heterorl.coordinator.payloads.backup import Backups
from heterorl.coordinator.payloads.damage import Damage
from heterorl.coordinator.payloads.keeper import Keeper
from heterorl.coordinator.payloads.leases import PullLeases
from heterorl.coordinator.payloads.merging.cache import Merges
from heterorl.coordinator.payloads.merging.composer import Composer
from heterorl.coordinator.payloads.opening import open_payloads
from heterorl.coordinator.samples.ring import Ring
from heterorl.coordinator.sites.sites import Sites
from heterorl.coordinator.store.choice import open_engine
from heterorl.coordinator.store.connection import Connection
from heterorl.coordinator.store.database import Database, get_meta, set_meta
from heterorl.coordinator.store.engine import Engine
from heterorl.coordinator.store.room import Room, operators_error
from heterorl.coordinator.versions import lineage


async def open_parts(
    config: CoordinatorConfig, clock: Clock, *, store: type[Database], engine: Engine | None = None
) -> Parts:
    """Open the data directory; every lease found there gets a fresh term. `engine` is one that is open already.

    Raises:
        CorruptStore: the store fails its check or belongs to another run.
        OperatorError: the directory cannot be used, or the disk is full at the first start.
        Busy: a bucket of payloads does not answer.
    """
    room = Room(config.data_dir, min_free_bytes=config.min_free_bytes, clock=clock)
    database = await store.over(
        lambda: engine or open_engine(config.data_dir, config.store.url, is_elsewhere=bool(config.payloads.bucket)),
        on_full=room.note_refusal,
    )
    now = clock.monotonic()
    ring = Ring(
        limit_bytes=config.samples_bytes,
        every=config.samples_every,
        max_sample_bytes=config.max_group_bytes,
        wall=clock.wall,
        may_write=lambda: not room.is_full,
    )

    async def make_room(missing_bytes: int) -> None:
        # The keeper is opened below, over these files; nothing is uploaded before.
        await keeper.collect(missing_bytes=missing_bytes)

    try:
        await database.run(lambda connection: _start(connection, config))
        # The bound may be smaller than it was; on a full disk the next sample that is kept sees to it.
        with contextlib.suppress(StoreFull):
            while not await database.run(ring.trim):
                pass
        home, blobs, copies, incoming = await open_payloads(
            config, database, clock, make_room=make_room, on_full=room.note_refusal
        )
        merges = Merges(config.data_dir / "merged")
        await merges.open(database)
        sites = Sites(max_work_ahead_s=config.max_work_ahead_s)
        # Who reads from the bucket is not seen to read.
        lease_s = max(config.pull_lease_s, config.payloads.url_lifetime_s if config.payloads.bucket else 0.0)
        leases = PullLeases(term_s=lease_s, started=now)
        damage = Damage(database=database, blobs=blobs, copies=copies, merges=merges)
        keeper = Keeper(
            config=config,
            clock=clock,
            database=database,
            blobs=blobs,
            copies=copies,
            merges=merges,
            damage=damage,
            leases=leases,
            in_use=sites.versions_in_use,
            may_write=lambda: not room.is_full,
        )
        await keeper.recover()
    except BaseException as error:
        await database.close()
        if isinstance(error, OSError):
            raise operators_error(config.data_dir, error) from error
        raise
    if room.look():
        keeper.poke()
    return Parts(
        config=config,
        clock=clock,
        database=database,
        home=home,
        blobs=blobs,
        copies=copies,
        incoming=incoming,
        merges=merges,
        composer=Composer(
            merges=merges,
            database=database,
            path_of=blobs.path,
            copies=copies,
            config=config,
            leased=lambda: leases.payloads(clock.monotonic()),
            may_write=lambda: not room.is_full,
            clock=clock,
        ),
        leases=leases,
        reader=PayloadReader(),
        damage=damage,
        keeper=keeper,
        room=room,
        backups=Backups(
            directory=config.backup_dir or config.data_dir / "backups",
            run_id=config.run_id,
            database=database,
            blobs=blobs,
            copies=copies,
            damage=damage,
            keeper=keeper,
            clock=clock,
            store_url=config.store.url,
        ),
        sites=sites,
        deadlines=Deadlines(sites=sites, work_lease_s=config.work_lease_s, started=now),
        bell=Bell(),
        head_bell=Bell(),
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
        # Only then: a start on a full disk writes nothing that it need not.
        set_meta(connection, "seed", str(config.seed))
    contract = lineage.read_contract(connection)
    problem = "" if contract is None else group_size.problem_of(contract, config)
    if problem:
        raise ConfigError("max_message_bytes", problem, action=group_size.ACTION)
