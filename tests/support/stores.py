"""Databases and payload files without a coordinator."""

from collections.abc import Callable
from pathlib import Path

from heterorl.coordinator.store.blobs import BlobStore
from heterorl.coordinator.store.database import Database
from heterorl.coordinator.store.payload_files import PayloadStorage
from heterorl.coordinator.store.sqlite import SqliteEngine


async def open_database(path: Path, *, on_full: Callable[[], None] = lambda: None) -> Database:
    return await Database.over(lambda: SqliteEngine.open(path), on_full=on_full)


async def no_room(_missing_bytes: int) -> None:
    pass


def open_blobs(
    path: Path,
    *,
    payload_space_bytes: int,
    max_payload_bytes: int,
    on_failed: Callable[[str], object] = lambda _: None,
    storage: PayloadStorage | None = None,
) -> BlobStore:
    return BlobStore(
        path, payload_space_bytes=payload_space_bytes, max_payload_bytes=max_payload_bytes, make_room=no_room, on_full=lambda: None,
        on_failed=on_failed, storage=storage,
    )  # fmt: skip
