"""Opens a bucket as the home of payloads, with the files that belong to it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from heterorl.common.process.clock import Clock
from heterorl.common.process.files import make_directory
from heterorl.common.types.common import Digest
from heterorl.coordinator.store.bucket.client import BucketClient
from heterorl.coordinator.store.bucket.config import BucketConfig
from heterorl.coordinator.store.bucket.copies import BucketCopies
from heterorl.coordinator.store.bucket.files import SCRATCH, CopyFiles
from heterorl.coordinator.store.bucket.home import BucketHome
from heterorl.coordinator.store.bucket.incoming import BucketIncoming
from heterorl.coordinator.store.bucket.mark import Mark
from heterorl.coordinator.store.bucket.objects import Objects


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """What the store says of the payloads of a run."""

    owner: str
    """The name under which it has a prefix."""
    named: frozenset[Digest]
    """Payloads that a version offers."""
    newest: float | None
    """Wall time of the newest version; None before the first one."""


async def open_bucket(
    config: BucketConfig,
    root: Path,
    rows: Rows,
    *,
    run_id: str,
    store_bytes: int,
    max_payload_bytes: int,
    make_room: Callable[[int], Awaitable[None]],
    on_full: Callable[[], None],
    on_lost: Callable[[str], None],
    clock: Clock,
) -> tuple[BucketHome, CopyFiles, BucketCopies, BucketIncoming]:
    """Open the bucket, and the directory of its copies; what the bucket lacks is given by `BucketCopies.give` or `run`.

    Args:
        config: names the bucket.
        root: the data directory.
        rows: what the store says.
        run_id: the prefix, where none is named.
        store_bytes: bytes that payloads may occupy in the bucket.
        max_payload_bytes: the largest payload.
        make_room: called with the bytes that are missing in the bucket.
        on_full: called when the disk refused a payload.
        on_lost: told why, when another store has the prefix.
        clock: for the ends of addresses.

    Raises:
        DependencyMissing: obstore is not installed.
        ConfigError: credentials cannot be read, or the prefix is another store's.
        Busy: the bucket does not answer, or refuses.
    """
    await asyncio.to_thread(_empty, root / SCRATCH)
    client = BucketClient(config, run_id=run_id)
    mark = Mark(client, rows.owner, on_lost=on_lost)
    await mark.claim(take_over=config.take_over)
    objects = Objects(client, mark)

    async def make_room_here(missing_bytes: int) -> None:
        await copies.make_room(missing_bytes)

    home = await BucketHome.open(
        objects,
        store_bytes=store_bytes,
        make_room=make_room,
        on_kept=lambda digest: copies.note(digest),
        on_gone=lambda digest: copies.forget(digest),
    )
    files = await asyncio.to_thread(
        CopyFiles,
        root,
        store_bytes=config.cache_bytes,
        max_payload_bytes=max_payload_bytes,
        bound="payloads.cache_bytes",
        make_room=make_room_here,
        on_full=on_full,
        home=home,
    )
    copies = BucketCopies(files, home, clock=clock)
    await copies.settle(named=rows.named, newest=rows.newest)
    incoming = BucketIncoming(objects, clock=clock, put_bytes=config.put_bytes, lifetime_s=config.url_lifetime_s)
    await incoming.sweep()
    return home, files, copies, incoming


def _empty(directory: Path) -> None:
    make_directory(directory)
    for path in directory.iterdir():
        path.unlink()
