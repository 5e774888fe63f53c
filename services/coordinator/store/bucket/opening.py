"""Opens a bucket as the home of payloads, with the files that belong to it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from heterorl.common.process.clock import Clock
from heterorl.common.process.files import make_directory
from heterorl.coordinator.store.bucket.config import BucketConfig
from heterorl.coordinator.store.bucket.copies import BucketCopies
from heterorl.coordinator.store.bucket.files import SCRATCH, CopyFiles
from heterorl.coordinator.store.bucket.home import BucketHome
from heterorl.coordinator.store.bucket.incoming import BucketIncoming
from heterorl.coordinator.store.bucket.objects import Objects


async def open_bucket(
    config: BucketConfig,
    root: Path,
    *,
    run_id: str,
    owner: str,
    store_bytes: int,
    max_payload_bytes: int,
    make_room: Callable[[int], Awaitable[None]],
    on_full: Callable[[], None],
    clock: Clock,
) -> tuple[BucketHome, CopyFiles, BucketCopies, BucketIncoming]:
    """Open the bucket, and the directory of its copies; whole files that the bucket has not are given to it.

    Args:
        config: names the bucket.
        root: the data directory.
        run_id: the prefix, where none is named.
        owner: the store whose rows name the payloads.
        store_bytes: bytes that payloads may occupy in the bucket.
        max_payload_bytes: the largest payload.
        make_room: called with the bytes that are missing in the bucket.
        on_full: called when the disk refused a payload.
        clock: for the ends of addresses.

    Raises:
        DependencyMissing: obstore is not installed.
        ConfigError: credentials cannot be read, or the prefix is another store's.
        Busy: the bucket does not answer, or refuses.
    """
    await asyncio.to_thread(_empty, root / SCRATCH)
    objects = Objects(config, run_id=run_id)
    home = await BucketHome.open(objects, owner=owner, store_bytes=store_bytes, make_room=make_room)

    async def make_room_here(missing_bytes: int) -> None:
        await copies.make_room(missing_bytes)

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
    copies = BucketCopies(files, home)
    await copies.settle()
    incoming = BucketIncoming(objects, clock=clock, put_bytes=config.put_bytes, lifetime_s=config.url_lifetime_s)
    await incoming.sweep()
    return home, files, copies, incoming


def _empty(directory: Path) -> None:
    make_directory(directory)
    for path in directory.iterdir():
        path.unlink()
