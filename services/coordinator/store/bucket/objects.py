"""The objects of one run in a bucket.

    PREFIX/run                       the mark: the store whose rows name these payloads
    PREFIX/blobs/ab/DIGEST           payloads; a name appears with all its bytes or not at all
    PREFIX/incoming/DIGEST/OFFSET    pieces that a learner put there; no payload before the coordinator verified them
    PREFIX/damaged/DIGEST            payloads whose bytes changed; for a person to look at, never served

Guarantees: a prefix has one mark, made by a conditional put; nothing is deleted or moved before it was read again, and
a coordinator that finds another store's name in it ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from heterorl.common.errors import ConfigError, CorruptStore
from heterorl.common.types.common import Digest, file_name, is_digest
from heterorl.coordinator.store.bucket.client import PART_BYTES, BucketClient
from heterorl.coordinator.store.files import open_file, write_all

_TAKES = "take a payload"
MARK = "run"
"""Key of the mark."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A piece of a payload that a learner put."""

    digest: Digest
    offset: int
    num_bytes: int
    put_at: float
    """Wall time."""


class Objects:
    """Payloads by digest, below one prefix."""

    def __init__(self, client: BucketClient, *, on_lost: Callable[[str], None]) -> None:
        """Prepare; `claim` comes first.

        Args:
            client: of the prefix.
            on_lost: told why, when the prefix is this store's no longer.
        """
        self._client = client
        self._on_lost = on_lost
        self._owner = ""

    async def owner(self) -> str:
        """The name of the store that has the prefix; empty where none has."""
        try:
            return (await self._client.small(MARK)).decode("utf-8", "replace")
        except FileNotFoundError:
            return ""

    async def claim(self, owner: str) -> None:
        """Put the mark where none is.

        Raises:
            ConfigError: the prefix is another store's.
            Busy: the bucket does not answer, or refuses.
        """
        if not await self._client.create(MARK, owner.encode()) and (found := await self.owner()) != owner:
            raise self.of_another(found)
        self._owner = owner

    @staticmethod
    def of_another(owner: str) -> ConfigError:
        """What is said of a prefix that another store has."""
        return ConfigError(
            "payloads.prefix",
            f"has the payloads of another store, {owner[:64]!r}",
            action=f"name another prefix; or, where that store never runs again, delete the object {MARK} below it",
        )

    async def sizes(self) -> dict[Digest, int]:
        """Every payload that is there, and its bytes."""
        names = ((entry.key.rpartition("/")[2], entry.num_bytes) for entry in await self._client.entries("blobs"))
        return {Digest(name): num_bytes for name, num_bytes in names if is_digest(name)}

    async def _check(self) -> None:
        """Look whether the prefix is still this store's.

        Raises:
            CorruptStore: it is not; the process must end.
        """
        if await self.owner() != self._owner:
            problem = "another store has taken the prefix of the payloads in the bucket, or its mark is gone"
            self._on_lost(problem)
            raise CorruptStore(problem, action="see which coordinators name this prefix: one store alone may")

    async def put(self, digest: Digest, path: Path) -> None:
        """Store a file; what is there under this name already stays."""
        key = _key(digest)
        if (await asyncio.to_thread(path.stat)).st_size <= PART_BYTES:
            await self._client.create(key, await asyncio.to_thread(path.read_bytes), action=_TAKES)
            return
        # The library cannot make the end of an upload in parts conditional. One coordinator alone puts below a prefix
        # that has its mark, so nothing comes between this look and that end.
        try:
            await self._client.size(key)
        except FileNotFoundError:
            await self._client.put_file(key, path, action=_TAKES)

    async def fetch(self, digest: Digest, path: Path) -> None:
        """Write a payload into a file, behind what the file has already; nobody has compared its bytes yet.

        Raises:
            FileNotFoundError: it is not there.
            StoreFull, CorruptStore: the disk refuses.
        """
        key = _key(digest)
        stop = await self._client.size(key)
        file = await asyncio.to_thread(open_file, path, "ab")
        with file:
            async for block in self._client.read(key, offset=file.tell(), stop=stop):
                writing = asyncio.ensure_future(asyncio.to_thread(write_all, file, block))
                try:
                    await asyncio.shield(writing)
                finally:
                    # The file is closed below, also for who is cancelled here.
                    await asyncio.wait([writing])

    async def delete(self, digest: Digest) -> None:
        """Delete a payload, there or not."""
        await self._check()
        await self._client.delete(_key(digest))

    async def set_aside(self, digest: Digest) -> None:
        """Give a payload a name under which it is never served."""
        await self._check()
        try:
            await self._client.rename(_key(digest), f"damaged/{file_name(digest)}")
        except FileNotFoundError:
            return

    async def urls(self, digests: Sequence[Digest]) -> list[str]:
        """Addresses that whoever has them may read for a while. Signed here; the bucket is not asked."""
        return await self._client.urls("GET", [_key(digest) for digest in digests])

    # what learners put

    async def put_url(self, digest: Digest, offset: int) -> str:
        """An address at which whoever has it may put a piece for a while."""
        (url,) = await self._client.urls("PUT", [_piece(digest, offset)])
        return url

    async def pieces(self, digest: Digest | None = None) -> list[Piece]:
        """What was put, of one payload or of all, in order."""
        folder = "incoming" if digest is None else f"incoming/{file_name(digest)}"
        found = []
        for entry in await self._client.entries(folder):
            name, _, offset = entry.key.rpartition("/")
            name = name.rpartition("/")[2]
            if is_digest(name) and offset.isdecimal():
                piece = Piece(digest=Digest(name), offset=int(offset), num_bytes=entry.num_bytes, put_at=entry.put_at)
                found.append(piece)
        return sorted(found, key=lambda piece: (piece.digest, piece.offset))

    async def read_piece(self, piece: Piece, *, skip: int = 0) -> AsyncIterator[bytes]:
        """Yield what was put, but its first bytes.

        Raises:
            FileNotFoundError: it is no longer there.
        """
        key = _piece(piece.digest, piece.offset)
        async for block in self._client.read(key, offset=skip, stop=piece.num_bytes):
            yield block

    async def delete_pieces(self, pieces: Sequence[Piece]) -> None:
        """Delete what was put, there or not."""
        if pieces:
            await self._check()
            await self._client.delete(*[_piece(piece.digest, piece.offset) for piece in pieces])


def _key(digest: Digest) -> str:
    # The one place where a digest becomes a key: whatever else a peer writes there names no object.
    name = file_name(digest)
    return f"blobs/{name[:2]}/{name}"


def _piece(digest: Digest, offset: int) -> str:
    return f"incoming/{file_name(digest)}/{offset:016d}"
