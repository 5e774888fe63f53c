"""Opening of the payload storage: data directory or bucket.

The choice is made when a run starts.

With a bucket, the store's meta `payloads_owner` holds the name in the mark of its prefix. A prefix without a mark is
claimed if it has every payload that the store names. A start lists the bucket and waits up to WAIT_S for it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable

from heterorl.common.errors import Busy, ConfigError
from heterorl.common.process.clock import Clock
from heterorl.common.types.common import Digest
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.coordinator.payloads import payload_index
from heterorl.coordinator.store.blobs import BlobStore
from heterorl.coordinator.store.bucket_cache import SCRATCH, BucketCache, CacheFiles
from heterorl.coordinator.store.bucket_storage import BucketStorage, Objects
from heterorl.coordinator.store.database import Connection, Database, get_meta, set_meta
from heterorl.coordinator.store.engine_choice import OWNER
from heterorl.coordinator.store.payload_files import PayloadCache, PayloadStorage

_LOG = logging.getLogger(__name__)
WAIT_S = 60.0
"""Longest wait for a bucket; then the process ends, and is restarted or a standby takes over."""
PAUSE_S = 1.0
Opened = tuple[PayloadStorage, BlobStore, PayloadCache]
MakeRoom = Callable[[int], Awaitable[None]]


async def open_payloads(
    config: CoordinatorConfig, database: Database, clock: Clock, *, make_room: MakeRoom, on_full: Callable[[], None]
) -> Opened:
    """Open payload storage, files and cache.
    Raises ConfigError, DependencyMissing: the bucket cannot be used as named; Busy: it does not answer for WAIT_S."""
    if not config.payloads.bucket:
        if await database.run(_owner):
            problem = "is empty, and the payloads of this run are in a bucket"
            raise ConfigError("payloads.bucket", problem, action="name the bucket again, or begin a new run")
        files = await asyncio.to_thread(
            BlobStore,
            config.data_dir,
            payload_space_bytes=config.payload_space_bytes,
            max_payload_bytes=config.max_payload_bytes,
            make_room=make_room,
            on_full=on_full,
            on_failed=database.fail,
        )
        return PayloadStorage(), files, PayloadCache()
    until = clock.monotonic() + WAIT_S
    while True:
        try:
            return await _open_bucket(config, database, make_room=make_room, on_full=on_full)
        except Busy as error:
            if clock.monotonic() >= until:
                action = "check payloads: bucket, endpoint, credentials; then start the coordinator again"
                raise Busy(error.args[0], action=action) from None
            _LOG.warning("the coordinator waits for the bucket: %s", error.args[0])
        await clock.sleep(PAUSE_S)


async def _open_bucket(
    config: CoordinatorConfig, database: Database, *, make_room: MakeRoom, on_full: Callable[[], None]
) -> Opened:
    payloads = config.payloads
    await asyncio.to_thread(payload_index.empty, config.data_dir / SCRATCH)
    objects = Objects(payloads, run_id=config.run_id, on_lost=database.fail)
    await _claim(objects, database)
    cache: BucketCache

    storage = BucketStorage(
        objects,
        await objects.sizes(),
        payload_space_bytes=config.payload_space_bytes,
        make_room=make_room,
        on_kept=lambda digest: cache.note(digest),
        on_gone=lambda digest: cache.forget(digest),
    )
    files = await asyncio.to_thread(
        CacheFiles,
        config.data_dir,
        payload_space_bytes=payloads.cache_bytes,
        max_payload_bytes=config.max_payload_bytes,
        bound="payloads.cache_bytes",
        make_room=lambda missing_bytes: cache.make_room(missing_bytes),
        on_full=on_full,
        on_failed=database.fail,
        storage=storage,
    )
    cache = BucketCache(files, storage)
    for digest in await asyncio.to_thread(files.whole):
        if storage.size(digest) is not None:
            cache.note(digest)
    return storage, files, cache


async def _claim(objects: Objects, database: Database) -> None:
    """Claim the prefix for this store, or find that it has it."""
    owner, found = await database.run(_owner), await objects.owner()
    if found and found != owner:
        raise objects.of_another(found)
    if not found:
        named = await database.run(_named)
        there = await objects.sizes()
        if missing := [digest for digest, num_bytes in named.items() if there.get(digest) != num_bytes]:
            raise ConfigError(
                "payloads.bucket",
                f"lacks {len(missing)} of the {len(named)} payloads of this run: a bucket is chosen when a run begins",
                action="begin a new run, or copy the payloads to its prefix first: docs/operate.md has the steps",
            )
    if not owner:
        # Before the mark, so that a crash leaves no mark with an unknown owner.
        owner = secrets.token_hex(16)
        await database.run(lambda connection: set_meta(connection, OWNER, owner))
    await objects.claim(owner)


def _owner(connection: Connection) -> str:
    return get_meta(connection, OWNER) or ""


def _named(connection: Connection) -> dict[Digest, int]:
    rows = connection.execute("SELECT digest, num_bytes FROM payloads")
    return {Digest(digest): int(num_bytes) for digest, num_bytes in rows}
