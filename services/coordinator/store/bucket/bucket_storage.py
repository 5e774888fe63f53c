"""A bucket as payload storage, and direct uploads of learners into it.

A payload is complete when the bucket has it. The start lists the bucket; after that only this coordinator writes. A
payload that the bucket refused stays as a file and is put again.

A learner puts a payload in pieces, each one object, so a broken upload repeats one piece. The coordinator reads and
verifies pieces before they become a payload. Open addresses are bounded; pieces that no call took are deleted when the
last address expires.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from heterorl.common.errors import Busy, DigestMismatch, PayloadMissing, StoreFull
from heterorl.common.process.clock import Clock
from heterorl.common.types.common import Digest
from heterorl.common.types.policy import NO_PLACE, PutPlace
from heterorl.coordinator.store.background import RetryingLoop
from heterorl.coordinator.store.bucket.objects import Objects, Piece
from heterorl.coordinator.store.payload_storage import DirectUploads, PayloadStorage


@dataclass(eq=False, repr=False)
class BucketStorage(PayloadStorage):
    """Payloads of one run in a bucket, under a claimed prefix.

    It belongs to the event loop. `sizes` lists the prefix. `make_room` gets the missing bytes before a payload is
    refused; `on_kept` and `on_gone` get each payload that enters or leaves the bucket.
    """

    objects: Objects
    sizes: dict[Digest, int]
    _: KW_ONLY
    store_bytes: int
    make_room: Callable[[int], Awaitable[None]]
    on_kept: Callable[[Digest], None]
    on_gone: Callable[[Digest], None]

    @property
    def used_bytes(self) -> int:
        return sum(self.sizes.values())

    def size(self, digest: Digest) -> int | None:
        return self.sizes.get(digest)

    def digests(self) -> frozenset[Digest]:
        return frozenset(self.sizes)

    async def reserve(self, num_bytes: int) -> None:
        """Make room for a payload; concurrent ones may exceed the bound."""
        missing = self.used_bytes + num_bytes - self.store_bytes
        if missing > 0:
            await self.make_room(missing)
        if self.used_bytes + num_bytes > self.store_bytes:
            raise StoreFull(
                f"{num_bytes} more bytes of payloads would exceed store_bytes = {self.store_bytes};"
                f" {self.used_bytes} are in the bucket and nothing more can be deleted now",
                action="raise store_bytes at the coordinator, or repeat after the stated delay",
                retry_after_s=30.0,
            )

    async def keep(self, digest: Digest, path: Path) -> None:
        if digest in self.sizes:
            return
        size = (await asyncio.to_thread(path.stat)).st_size
        await self.objects.put(digest, path)
        self.sizes[digest] = size
        self.on_kept(digest)

    async def erase(self, digest: Digest) -> int:
        if digest not in self.sizes:
            return 0
        await self.objects.delete(digest)
        return self._forget(digest)

    async def set_aside(self, digest: Digest) -> None:
        if digest in self.sizes:
            await self.objects.set_aside(digest)
            self._forget(digest)

    def _forget(self, digest: Digest) -> int:
        self.on_gone(digest)
        return self.sizes.pop(digest)

    async def urls(self, digests: Sequence[Digest]) -> list[str]:
        there = [digest for digest in digests if digest in self.sizes]
        signed = dict(zip(there, await self.objects.urls(there), strict=True))
        return [signed.get(digest, "") for digest in digests]


_LOG = logging.getLogger(__name__)
PIECE_BYTES = 64 << 20
MAX_OPEN = 16
"""Payloads with open addresses at once; a learner uploads one after another."""
SWEEP_S = 300.0
ANSWER_S = 10.0
"""Limit of the bucket's answer: a learner waits for it."""


class BucketUploads(DirectUploads):
    """Objects below `incoming` in one bucket. Belongs to the event loop."""

    def __init__(self, objects: Objects, *, clock: Clock, put_bytes: int, lifetime_s: float) -> None:
        """`put_bytes`: the largest payload with an address; `lifetime_s`: an address's lifetime.
        Call `sweep` first."""
        self._objects = objects
        self._clock = clock
        self._put_bytes = put_bytes
        self._lifetime_s = lifetime_s
        self._open: dict[Digest, float] = {}
        """The monotonic instant at which the last address of each expires."""
        self._read: Counter[Digest] = Counter()

    async def place(self, digest: Digest, num_bytes: int) -> PutPlace:
        now = self._clock.monotonic()
        self._open = {name: until for name, until in self._open.items() if until > now}
        if not 0 < num_bytes <= self._put_bytes:
            return NO_PLACE
        if digest not in self._open and len(self._open) >= MAX_OPEN:
            _LOG.warning("payload %s must be streamed: %d others have open addresses", digest[:12], MAX_OPEN)
            return NO_PLACE
        self._open[digest] = now + self._lifetime_s
        try:
            async with asyncio.timeout(ANSWER_S):
                there = whole_pieces(await self._objects.pieces(digest), num_bytes)
        except TimeoutError:
            return NO_PLACE
        offset = sum(piece.num_bytes for piece in there)
        if offset == num_bytes:
            return PutPlace(url="", offset=offset, num_bytes=0)
        url = await self._objects.put_url(digest, offset)
        return PutPlace(url=url, offset=offset, num_bytes=piece_bytes(offset, num_bytes))

    async def frames(self, digest: Digest, num_bytes: int, offset: int = 0) -> AsyncIterator[bytes]:
        self._read[digest] += 1
        try:
            pieces = await self._objects.pieces(digest)
            there = whole_pieces(pieces, num_bytes)
            put = sum(piece.num_bytes for piece in there)
            wrong = [piece for piece in pieces if piece.offset == put and put < num_bytes]
            if wrong:
                # Before a byte is read: the holder of the URL may have put anything.
                await self.drop(digest)
                problem = f"has {put + wrong[0].num_bytes} bytes, not {num_bytes}"
                raise DigestMismatch(f"what was put as payload {digest[:12]} {problem}")
            if put <= offset:
                raise FileNotFoundError
            for piece in there:
                skip = max(0, offset - piece.offset)
                if skip < piece.num_bytes:
                    async for block in self._objects.read_piece(piece, skip=skip):
                        yield block
        except FileNotFoundError:
            problem = f"payload {digest[:12]} was not put into the bucket, or is no longer there"
            raise PayloadMissing(problem) from None
        finally:
            self._read -= Counter([digest])

    async def drop(self, digest: Digest) -> None:
        """Delete the pieces of a payload.
        The next sweep retries what the bucket refuses."""
        self._open.pop(digest, None)
        try:
            await self._objects.delete_pieces(await self._objects.pieces(digest))
        except Busy as error:
            _LOG.info("payload %s keeps its pieces until the next sweep: %s", digest[:12], error)

    async def sweep(self) -> None:
        """Delete expired pieces; the rest counts as open.
        Raises Busy: the bucket does not answer, or refuses; CorruptStore: another store has the prefix."""
        now, wall = self._clock.monotonic(), self._clock.wall()
        found: dict[Digest, list[Piece]] = {}
        for piece in await self._objects.pieces():
            found.setdefault(piece.digest, []).append(piece)
        for digest, pieces in found.items():
            left_s = max(piece.put_at for piece in pieces) + self._lifetime_s - wall
            if left_s > 0:
                self._open.setdefault(digest, now + left_s)
            elif not self._read[digest]:
                _LOG.info("payload %s: %d pieces that no call took are deleted", digest[:12], len(pieces))
                await self._objects.delete_pieces(pieces)

    async def run(self) -> None:
        """Sweep every SWEEP_S until cancelled; returns when the store ends."""
        await self._clock.sleep(SWEEP_S)
        await RetryingLoop("direct_uploads", self._clock).repeat(self.sweep, every_s=SWEEP_S)


def piece_bytes(offset: int, num_bytes: int) -> int:
    """Bytes of the piece at an offset of a payload."""
    return min(PIECE_BYTES, num_bytes - offset)


def whole_pieces(pieces: Iterable[Piece], num_bytes: int) -> Sequence[Piece]:
    """A payload's first pieces, without a gap, each of the right length."""
    at = {piece.offset: piece for piece in pieces}
    there: list[Piece] = []
    offset = 0
    while offset < num_bytes and offset in at and at[offset].num_bytes == piece_bytes(offset, num_bytes):
        there.append(at[offset])
        offset += at[offset].num_bytes
    return there
