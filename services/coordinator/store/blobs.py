"""Payload files named by their digest.

    data_dir/blobs/ab/<digest>      complete, verified, never changed
    data_dir/partial/<digest>       an upload; `query` reports its length
    data_dir/damaged/<digest>       a payload whose bytes changed on disk; for inspection, until room is missing

A name exists only when all its bytes are durable and right: verify, fsync file, rename, fsync directory. A file whose
fsync failed is removed, because a second fsync would not tell its content. A publication holds its payloads, so that
none is deleted between check and commit. A cancelled call, such as an upload over a broken line, ends its thread first:
its file stays open so long, and the bytes are counted as they are.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from weakref import WeakValueDictionary

from heterorl.common.errors import Busy, CorruptStore, DigestMismatch, InvalidRequest, QuotaExceeded, StoreFull
from heterorl.common.process.clock import Bell
from heterorl.common.process.files import make_directory, sync_directory
from heterorl.common.process.threads import ArgumentsT, ResultT, in_thread, opened_in_thread
from heterorl.common.types.common import Digest, is_digest
from heterorl.common.weights.payload import file_digest
from heterorl.coordinator.store.payload_files import (
    PayloadStorage,
    cut,
    file_size,
    identity,
    name_file,
    open_file,
    payload_files,
    remove_file,
    sync_and_close,
    unreadable,
    write_all,
)


class Locks:
    """Locks by name for the event loop; unused ones take no memory."""

    def __init__(self) -> None:
        # Holders and waiters keep a lock alive.
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def __getitem__(self, name: str) -> asyncio.Lock:
        return self._locks.setdefault(name, asyncio.Lock())

    def is_held(self, name: str) -> bool:
        lock = self._locks.get(name)
        return lock is not None and lock.locked()


class BlobStore:
    """Content-addressed payload files under one directory."""

    def __init__(
        self,
        root: Path,
        *,
        payload_space_bytes: int,
        max_payload_bytes: int,
        bound: str = "payload_space_bytes",
        make_room: Callable[[int], Awaitable[None]],
        on_full: Callable[[], None],
        on_failed: Callable[[str], object],
        storage: PayloadStorage | None = None,
    ) -> None:
        """Open the directory; `bound` is the key of `payload_space_bytes` in errors.
        `make_room` gets the missing bytes before an upload is refused; `on_full` is called when the disk is full.
        `on_failed` gets the reason when it failed and the process must end, also without a caller, from any thread."""
        self._storage = storage or PayloadStorage()
        self._blobs, self._partial, self._damaged = (root / name for name in ("blobs", "partial", "damaged"))
        self._space_bytes, self._bound = payload_space_bytes, bound
        self._max_payload_bytes = max_payload_bytes
        self._locks = Locks()
        self._held: Counter[Digest] = Counter()
        self._wrong: set[Digest] = set()
        """Payloads whose wrong bytes could not be moved yet."""
        self._used = 0
        self.freed = Bell()
        """Rings when there may be more room."""
        self._make_room, self._on_full, self._on_failed = make_room, on_full, on_failed
        for directory in (self._blobs, self._partial):
            make_directory(directory)
        self._identity = identity(self._blobs)
        for path in self._partial.iterdir():
            # After a power cut a complete payload may have both names.
            if (self._blobs / path.name[:2] / path.name).exists():
                path.unlink()
        for directory in (self._blobs, self._partial):
            # An earlier process may have died between a new name and the fsync of its directory.
            sync_directory(directory)
            for path in directory.rglob("*"):
                if path.is_dir():
                    sync_directory(path)
                else:
                    self._used += path.stat().st_size
        self._used += sum(file_size(path) or 0 for path in payload_files(self._damaged.glob("*")))

    @property
    def used_bytes(self) -> int:
        """Bytes of all payloads, damaged ones too, and of reserved room."""
        at_home = self._storage.used_bytes
        return self._used if at_home is None else at_home

    def size(self, digest: Digest) -> int | None:
        at_home = self._storage.size(digest)
        return file_size(self.path(digest)) if at_home is None else at_home

    def is_there(self) -> bool:
        """Whether the directory is the opened one.
        On an unmounted disk all payloads would seem lost."""
        try:
            return identity(self._blobs) == self._identity
        except OSError:
            return False

    def query(self, digest: Digest) -> int:
        size = None if digest in self._wrong else self.size(digest)
        return self._partial_size(digest) if size is None else size

    async def append(self, *, digest: Digest, num_bytes: int, offset: int, frames: AsyncIterator[bytes]) -> int:
        """Write frames from `offset`; returns the durable bytes.
        The last byte completes the payload. Raises InvalidRequest: impossible digest, offset or size; QuotaExceeded:
        too large; StoreFull; DigestMismatch: wrong content, start again; CorruptStore: the disk failed, the process
        must end."""
        if not 0 < num_bytes <= self._max_payload_bytes:
            raise QuotaExceeded(f"a payload of {num_bytes} bytes; the limit is {self._max_payload_bytes}")
        async with self._locks[digest]:
            await self._free_name(digest)
            if self.size(digest) is not None:
                await self._storage.keep(digest, self.path(digest))
                return num_bytes
            have = self._partial_size(digest)
            if not 0 <= offset <= have:
                raise InvalidRequest(f"offset {offset} is beyond the {have} durable bytes", action="ask QueryUpload")
            # Reserved before the first byte, for concurrent uploads.
            await self._reserve(num_bytes - have)
            with self._settled(digest, num_bytes):
                written = await self._write(digest, offset=offset, num_bytes=num_bytes, frames=frames)
                if written == num_bytes:
                    await self._in_thread(self._complete, digest)
            if written == num_bytes:
                await self._storage.keep(digest, self.path(digest))
            return written

    async def ensure(self, *, digest: Digest, num_bytes: int) -> bool:
        """Whether the payload is complete.
        Completes an upload that was cut before its rename. Raises DigestMismatch: wrong content, start again;
        CorruptStore: the disk failed, the process must end."""
        # Goes on without its caller: a large payload takes longer into the bucket than a publication has time. The
        # next call waits for the lock, and finds it there.
        return await asyncio.shield(self._ensure(digest, num_bytes))

    async def _ensure(self, digest: Digest, num_bytes: int) -> bool:
        # Under the lock, so that a running deletion ends first.
        async with self._locks[digest]:
            await self._free_name(digest)
            if self.size(digest) is None and self._partial_size(digest) == num_bytes:
                with self._settled(digest, num_bytes):
                    await self._in_thread(self._complete, digest)
            if self.size(digest) != num_bytes:
                return False
            await self._storage.keep(digest, self.path(digest))
            return True

    @contextmanager
    def held(self, digests: Iterable[Digest]) -> Iterator[None]:
        """Keep `remove` from payloads, present or not, while the context is open."""
        names = Counter(digests)
        self._held += names
        try:
            yield
        finally:
            self._held -= names

    async def adopt(self, path: Path, *, digest: Digest, num_bytes: int) -> None:
        """Move a durable file of this file system among the payloads.
        Raises StoreFull: the quota is reached; CorruptStore: the disk failed, the process must end."""
        async with self._locks[digest]:
            await self._free_name(digest)
            if self.size(digest) is not None:
                await asyncio.to_thread(path.unlink)
            else:
                await self._reserve(num_bytes)
                with self._settled(digest, num_bytes):
                    await self._in_thread(name_file, path, self.path(digest))
            await self._storage.keep(digest, self.path(digest))

    async def remove(self, digest: Digest, *, is_needed: Callable[[], Awaitable[bool]]) -> int | None:
        """Delete a payload or upload; returns freed bytes, None if kept.

        A publication holds the payload, then looks for it under its lock. So this sees the hold, the publication sees
        the deletion, or `is_needed` sees the publication.
        """
        if self._locks.is_held(digest):
            # In use. Not waited for, since a writer may wait for the room.
            return None
        async with self._locks[digest]:
            if digest in self._held or await is_needed():
                return None
            at_home = await self._storage.erase(digest)
            return max(at_home, await self._remove_files(self.path(digest), self._partial / digest))

    async def _remove_files(self, *paths: Path) -> int:
        freed = 0
        for path in paths:
            if (size := file_size(path)) is not None:
                with self._released(path, size):
                    await self._in_thread(remove_file, path)
                freed += size
        return freed

    async def set_aside(self, digest: Digest) -> None:
        """Move a payload's wrong bytes, now or before its next upload.
        Raises Busy: they cannot be moved now."""
        async with self._locks[digest]:
            self.doubt([digest])
            await self._free_name(digest)

    def doubt(self, digests: Iterable[Digest]) -> None:
        """Treat payloads as missing, and move their bytes before the next upload."""
        self._wrong.update(digests)

    async def _free_name(self, digest: Digest) -> None:
        if digest not in self._wrong:
            return
        await self._storage.set_aside(digest)
        path, aside = self.path(digest), self._damaged / digest
        if file_size(path) is not None:
            async with self._locks[self._damaged.name]:
                await self._remove_files(aside)
                await self._in_thread(name_file, path, aside)
            self.freed.ring()
        self._wrong.discard(digest)

    async def drop_damaged(self, missing_bytes: int) -> int:
        """Delete damaged payloads, the longest unchanged first; returns the freed bytes."""
        freed = 0
        if missing_bytes > 0:
            async with self._locks[self._damaged.name]:
                for path in await asyncio.to_thread(payload_files, self._damaged.glob("*")):
                    if freed < missing_bytes:
                        freed += await self._remove_files(path)
        return freed

    def stored(self) -> frozenset[Digest]:
        """All payloads and uploads, except those in use."""
        paths = payload_files(chain(self._blobs.rglob("*"), self._partial.rglob("*")))
        found = {Digest(path.name) for path in paths} | self._storage.digests()
        return frozenset(digest for digest in found if not self._locks.is_held(digest) and digest not in self._held)

    def count(self, num_bytes: int) -> None:
        self._used += num_bytes
        if num_bytes < 0:
            self.freed.ring()

    async def _reserve(self, num_bytes: int) -> None:
        await self._storage.reserve(num_bytes)
        missing = self._used + num_bytes - self._space_bytes
        missing -= await self.drop_damaged(missing)
        if missing > 0:
            await self._make_room(missing)
        if self._used + num_bytes > self._space_bytes:
            raise StoreFull(
                f"{num_bytes} more bytes of payloads would exceed {self._bound} = {self._space_bytes};"
                f" {self._used} are used and nothing more can be deleted now",
                action=f"raise {self._bound} at the coordinator, or repeat after the stated delay",
                retry_after_s=30.0,
            )
        self.count(num_bytes)

    async def _write(self, digest: Digest, *, offset: int, num_bytes: int, frames: AsyncIterator[bytes]) -> int:
        path = self._partial / digest
        is_new = file_size(path) is None
        file = await opened_in_thread(self.watched()(lambda: open_file(path, "w+b" if is_new else "r+b")))
        try:
            position = offset
            self.watched()(cut)(file, offset)
            async for frame in frames:
                if position + len(frame) > num_bytes:
                    raise InvalidRequest(f"the frames exceed the stated {num_bytes} bytes")
                await self._in_thread(write_all, file, frame)
                position += len(frame)
            return position
        finally:
            # After a broken link too: the sender resumes behind the durable bytes.
            await self._in_thread(sync_and_close, file, path, is_new=is_new)

    async def _in_thread(
        self, function: Callable[ArgumentsT, ResultT], *args: ArgumentsT.args, **kwargs: ArgumentsT.kwargs
    ) -> ResultT:
        return await in_thread(self.watched()(function), *args, **kwargs)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Report a failed disk; also decorates a function for a thread."""
        try:
            yield
        except CorruptStore as error:
            self._on_failed(str(error))
            raise

    def _complete(self, digest: Digest) -> None:
        partial, target = self._partial / digest, self.path(digest)
        try:
            found = file_digest(partial)
        except OSError as error:
            raise unreadable(error) from error
        if found != digest:
            partial.unlink()
            raise DigestMismatch(f"the content of payload {digest[:12]} has digest {found[:12]}")
        # Again: the bytes may be of a process that died before its fsync.
        sync_and_close(open_file(partial, "rb"), partial)
        name_file(partial, target)

    def path(self, digest: Digest) -> Path:
        # The only place where a digest becomes a path.
        if not is_digest(digest):
            raise InvalidRequest("digest: not 64 lower-case hex digits")
        return self._blobs / digest[:2] / digest

    def _partial_size(self, digest: Digest) -> int:
        return file_size(self._partial / digest) or 0

    @contextmanager
    def _released(self, path: Path, num_bytes: int) -> Iterator[None]:
        """Count the bytes of a file that is gone as free."""
        try:
            yield
        finally:
            with suppress(Busy):
                if file_size(path) is None:
                    self.count(-num_bytes)

    @contextmanager
    def _settled(self, digest: Digest, num_bytes: int) -> Iterator[None]:
        """Release the reservation beyond the bytes on disk.
        It stays while they are unknown."""
        try:
            yield
        except StoreFull:
            self._on_full()
            raise
        finally:
            with suppress(Busy):
                self.count(self.query(digest) - num_bytes)
