"""Fetching a payload into a spool directory: resumable at every byte, over one stream or several.

    DIGEST           the payload's bytes from its beginning
    DIGEST.OFFSET    bytes from an offset on, while several streams fetch; appended to DIGEST when all are there

Guarantees: a fetch goes on from the bytes on disk, also after a restart and with another number of streams; a stream
that brings nothing for a while fails; a file is returned only with the digest it is named by. Each fetch that ends well
says what the link is like, over all its streams together. Never repeats a call.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from pathlib import Path
from typing import BinaryIO

from services.common import metrics
from services.common.api import CoordinatorApi
from services.common.clock import Clock
from services.common.errors import LimitExceeded, MalformedPayload, Unreachable
from services.common.link_estimate import LinkEstimate
from services.common.ranges import Gap, Piece, find_gaps
from services.common.types import PayloadRef
from services.common.weights.payload import file_digest

STALL_S = 60.0
"""A link that brings no frame (at most 1 MiB) for so long is given up; the bytes received stay."""
COPY_BYTES = 1 << 20


class Fetcher:
    """Fetches payloads into one directory, which is its own.

    `on_frame` is called whenever bytes arrive, so that the caller can tell a slow link from a dead one.
    """

    def __init__(self, *, api: CoordinatorApi, spool: Path, clock: Clock, num_streams: int = 1) -> None:
        self._api = api
        self._spool = spool
        self._clock = clock
        self._num_streams = num_streams
        self.link = LinkEstimate()
        self.on_frame: Callable[[], None] = _ignore
        spool.mkdir(parents=True, exist_ok=True)

    async def fetch(self, payload: PayloadRef) -> Path:
        """Return the complete file of a payload.

        Raises:
            Unreachable: the link broke or stalled; calling again goes on from the bytes received.
            UnknownPayload: the coordinator has it no longer.
            CorruptData: it has other bytes than its name says, or more.
        """
        pieces = self._pieces(payload)
        if any(piece.start + piece.length > payload.num_bytes for piece in pieces):
            raise LimitExceeded(f"payload {payload.digest[:12]} is longer than its {payload.num_bytes} bytes")
        gaps = find_gaps(pieces, num_bytes=payload.num_bytes, num_streams=self._num_streams)
        await self._fill(payload, gaps)
        path = self._spool / payload.digest
        await asyncio.to_thread(_join, path, self._parts(payload))
        if await asyncio.to_thread(file_digest, path) != payload.digest:
            raise MalformedPayload(f"payload {payload.digest[:12]} arrived with another digest")
        return path

    def keep_only(self, payloads: tuple[PayloadRef, ...]) -> None:
        """Remove everything but what is fetched of these payloads."""
        names = {payload.digest for payload in payloads}
        for path in self._spool.iterdir():
            if path.name.partition(".")[0] not in names:
                path.unlink()

    def _pieces(self, payload: PayloadRef) -> list[Piece]:
        path = self._spool / payload.digest
        first = Piece(0, path.stat().st_size if path.exists() else 0)
        return [first, *(Piece(start, part.stat().st_size) for start, part in self._parts(payload).items())]

    def _parts(self, payload: PayloadRef) -> dict[int, Path]:
        found = {int(path.suffix[1:]): path for path in self._spool.glob(f"{payload.digest}.*")}
        return dict(sorted(found.items()))

    async def _fill(self, payload: PayloadRef, gaps: list[Gap]) -> None:
        """Fetch gaps, `num_streams` at once. A broken link is told when all have ended: what others bring is kept."""
        free = asyncio.Semaphore(self._num_streams)
        broken: list[Unreachable] = []
        watch = _Stopwatch(clock=self._clock, num_streams=min(len(gaps), self._num_streams))

        async def fill(gap: Gap) -> None:
            async with free:
                try:
                    await self._append(payload, gap, watch)
                except Unreachable as error:
                    broken.append(error)

        streams = [asyncio.ensure_future(fill(gap)) for gap in gaps]
        try:
            await asyncio.gather(*streams)
            if broken:
                raise broken[0]
            watch.tell(self.link)
        finally:
            for stream in streams:
                stream.cancel()
            await asyncio.gather(*streams, return_exceptions=True)

    async def _append(self, payload: PayloadRef, gap: Gap, watch: _Stopwatch) -> None:
        offset = gap.begin
        # Without an end where it is the payload's own: a coordinator that sends more is caught.
        bound = {} if gap.end == payload.num_bytes else {"stop": gap.end}
        frames = self._api.read_payload(digest=payload.digest, offset=offset, **bound)
        path = self._spool / (payload.digest if gap.start == 0 else f"{payload.digest}.{gap.start}")
        with path.open("ab") as file:
            try:
                while (frame := await self._next(frames)) is not None:
                    offset += len(frame)
                    if offset > gap.end:
                        raise LimitExceeded(f"payload {payload.digest[:12]} is longer than stated")
                    file.write(frame)
                    watch.note(len(frame), is_first=offset == gap.begin + len(frame))
                    metrics.BYTES.labels(payload.kind.value, "in").inc(len(frame))
                    self.on_frame()
            finally:
                if isinstance(frames, AsyncGenerator):
                    await frames.aclose()
                await asyncio.to_thread(_sync, file)
        if offset < gap.end:
            raise Unreachable(f"payload {payload.digest[:12]} ended after {offset} bytes", retry_after_s=1.0)

    async def _next(self, frames: AsyncIterator[bytes]) -> bytes | None:
        """The next frame, None at the end.

        Raises:
            Unreachable: none came for STALL_S.
        """
        step = asyncio.ensure_future(_step(frames))
        timer = asyncio.ensure_future(self._clock.sleep(STALL_S))
        try:
            await asyncio.wait([step, timer], return_when=asyncio.FIRST_COMPLETED)
            if not step.done():
                raise Unreachable(f"no bytes of the payload in {STALL_S:g} s", retry_after_s=1.0)
            return step.result()
        finally:
            step.cancel()
            timer.cancel()
            await asyncio.gather(step, timer, return_exceptions=True)


class _Stopwatch:
    """Bytes and seconds of one fetch: until every stream that began has brought a frame, and until the end."""

    def __init__(self, *, clock: Clock, num_streams: int) -> None:
        self._clock = clock
        self._num_waiting = num_streams
        self._begin = clock.monotonic()
        self._first: tuple[int, float] | None = None
        self._num_bytes = 0

    def note(self, num_bytes: int, *, is_first: bool) -> None:
        """A frame arrived, the first of its stream or a later one."""
        self._num_bytes += num_bytes
        self._num_waiting -= is_first
        if self._first is None and self._num_waiting == 0:
            # With streams side by side the first frame alone would hide what the others had brought by then.
            self._first = (self._num_bytes, self._clock.monotonic() - self._begin)

    def tell(self, link: LinkEstimate) -> None:
        """Say what was seen; nothing when nothing was missing."""
        if self._first is not None:
            first_bytes, first_s = self._first
            total_s = self._clock.monotonic() - self._begin
            link.note(first_bytes=first_bytes, first_s=first_s, total_bytes=self._num_bytes, total_s=total_s)


def _join(path: Path, parts: dict[int, Path]) -> None:
    """Append parts to the file that they continue. A crash in between leaves pieces that say again what is missing."""
    for start, part in parts.items():
        with path.open("ab") as whole, part.open("rb") as more:
            more.seek(whole.tell() - start)
            while block := more.read(COPY_BYTES):
                whole.write(block)
            _sync(whole)
        part.unlink()


async def _step(frames: AsyncIterator[bytes]) -> bytes | None:
    async for frame in frames:
        return frame
    return None


def _ignore() -> None:
    pass


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
