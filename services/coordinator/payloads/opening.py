"""Opens the home of the payloads: the data directory, or a bucket that they move into at the first start with one.

    meta                what it says
    payloads_moving     the name of this store, which has claimed a prefix; payloads are files until all are there
    payloads_owner      the same name, once the bucket has every payload that the store names: it is their home

While it moves, nothing is served, and only the data_dir that has the files may do it. From then on a start lists the
bucket and serves; a moment without it is waited for.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from heterorl.common.errors import Busy, ConfigError
from heterorl.common.process.clock import Clock
from heterorl.coordinator.config import CoordinatorConfig
from heterorl.coordinator.store.blobs import BlobStore
from heterorl.coordinator.store.choice import MOVING, OWNER
from heterorl.coordinator.store.connection import Connection
from heterorl.coordinator.store.database import Database, get_meta, set_meta
from heterorl.coordinator.store.home import Copies, Home, Incoming
from heterorl.coordinator.versions import lineage

if TYPE_CHECKING:
    from heterorl.coordinator.store.bucket.opening import Rows

_LOG = logging.getLogger(__name__)
WAIT_S = 60.0
"""For a bucket that does not answer; then the process ends and is started again, or a standby takes its place."""
PAUSE_S = 1.0
Opened = tuple[Home, BlobStore, Copies, Incoming]


def name_store(connection: Connection, *, is_bucket: bool) -> None:
    """Store operation: give the store the name under which it will claim a prefix, where it has none.

    Raises:
        ConfigError: its payloads are in a bucket, and none is named.
    """
    if not is_bucket:
        if get_meta(connection, OWNER) is not None:
            problem = "is empty, and the payloads of this run are in a bucket"
            raise ConfigError("payloads.bucket", problem, action="name the bucket again")
    elif get_meta(connection, OWNER) is None and not get_meta(connection, MOVING):
        set_meta(connection, MOVING, secrets.token_hex(16))


async def open_payloads(
    config: CoordinatorConfig,
    database: Database,
    clock: Clock,
    *,
    make_room: Callable[[int], Awaitable[None]],
    on_full: Callable[[], None],
) -> Opened:
    """Open the home of the payloads, their files, what makes copies of them, and the place for what is put there.

    Raises:
        ConfigError, DependencyMissing: the bucket cannot be used as it is named.
        Busy: it does not answer, or refuses, for a minute.
    """
    if not config.payloads.bucket:
        files = await asyncio.to_thread(
            BlobStore,
            config.data_dir,
            store_bytes=config.store_bytes,
            max_payload_bytes=config.max_payload_bytes,
            make_room=make_room,
            on_full=on_full,
        )
        return Home(), files, Copies(), Incoming()
    until = clock.monotonic() + WAIT_S
    while True:
        try:
            return await _open_bucket(config, database, clock, make_room=make_room, on_full=on_full)
        except Busy as error:
            if clock.monotonic() >= until:
                action = "check payloads: bucket, endpoint, credentials; the coordinator is to be started again"
                raise Busy(error.args[0], action=action) from None
            _LOG.warning("waiting for the payloads: %s", error.args[0])
        await clock.sleep(PAUSE_S)


async def _open_bucket(
    config: CoordinatorConfig,
    database: Database,
    clock: Clock,
    *,
    make_room: Callable[[int], Awaitable[None]],
    on_full: Callable[[], None],
) -> Opened:
    # Only where there is a bucket: its package is optional.
    from heterorl.coordinator.store.bucket.opening import open_bucket

    rows, is_moving = await database.run(_read_rows)
    home, files, copies, incoming = await open_bucket(
        config.payloads,
        config.data_dir,
        rows,
        run_id=config.run_id,
        store_bytes=config.store_bytes,
        max_payload_bytes=config.max_payload_bytes,
        make_room=make_room,
        on_full=on_full,
        on_lost=database.fail,
        clock=clock,
    )
    if is_moving:
        await copies.give()
        await database.run(_settle)
    return home, files, copies, incoming


def _read_rows(connection: Connection) -> tuple[Rows, bool]:
    from heterorl.coordinator.store.bucket.opening import Rows

    owner, moving = get_meta(connection, OWNER), get_meta(connection, MOVING)
    assert owner or moving, "named at the start"
    named, newest = lineage.offered(connection)
    return Rows(owner=owner or moving or "", named=named, newest=newest), owner is None


def _settle(connection: Connection) -> None:
    set_meta(connection, OWNER, get_meta(connection, MOVING) or "")
    set_meta(connection, MOVING, "")
