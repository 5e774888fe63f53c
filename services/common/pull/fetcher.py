"""Downloads of payloads, resumable at every byte, over one or several streams.

    DIGEST           the payload's bytes from its beginning
    DIGEST.OFFSET    bytes from an offset on, while several streams fetch; appended to DIGEST when all are there

Guarantees: a fetch continues from the bytes on disk, also after a restart and with another number of streams. A stream
without bytes for STALL_S fails. A file is returned only if it has the digest of its name. A payload larger than the
layout allows, or than the disk has room for, is refused before any byte. A fetch never repeats a call.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from heterorl.common.api import WeightsApi
from heterorl.common.errors import DiskFull, LimitExceeded, MalformedPayload, Unreachable
from heterorl.common.process import metrics
from heterorl.common.process.clock import Clock
from heterorl.common.process.files import room
from heterorl.common.process.threads import in_thread, settle
from heterorl.common.pull.partial_download import Gap, Piece, PieceWriter, RunningDigest, find_gaps, join
from heterorl.common.rpc.calls import Calls, WeightCalls
from heterorl.common.types.common import file_name
from heterorl.common.types.policy import PayloadRef
from heterorl.common.weights.payload import FRAME_BYTES

STALL_S = 60.0
"""A stream without a frame (at most 1 MiB) for so long fails; received bytes stay. Waits for this process's own
bandwidth cap come on top."""
MAX_COPIES = 8
"""Largest plan, in copies of the weights; bounds the disk used. A larger plan falls back to a snapshot."""


@dataclass(kw_only=True, eq=False, repr=False)
class Fetcher:
    """Fetches payloads of at most `max_bytes` into one directory, which it owns.

    `on_frame` is called whenever bytes arrive, so that the caller can tell a slow link from a dead one.
    """

    api: WeightsApi
    spool: Path
    clock: Clock
    max_bytes: int
    num_streams: int = 1
    on_frame: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        cap = self.api.down_bytes_per_s if isinstance(self.api, Calls) else 0.0
        self._capped_frame_s = FRAME_BYTES / cap if cap else 0.0
        self._num_running = 0
        self.spool.mkdir(parents=True, exist_ok=True)

    async def fetch(self, payload: PayloadRef) -> Path:
        """Return the complete file of a payload.

        Raises:
            Unreachable: the link broke or stalled; the next call continues behind the bytes received.
            UnknownPayload: the coordinator no longer has it.
            CorruptData: its bytes do not match its name or size, or no payload can be so large.
            DiskFull: the disk has no room for the missing bytes.
        """
        self.check(payload)
        with room(self.spool):
            return await self._fetch(payload)

    def check(self, payload: PayloadRef) -> None:
        """Check a payload's name and size before a request; raises CorruptData."""
        name = file_name(payload.digest)
        if payload.num_bytes < 1:
            raise MalformedPayload(f"payload {name[:12]} states {payload.num_bytes} bytes")
        if payload.num_bytes > self.max_bytes:
            raise LimitExceeded(
                f"payload {name[:12]} states {payload.num_bytes} bytes, the layout allows {self.max_bytes} at most",
                action="distrust the coordinator",
            )

    def check_sizes(self, payloads: Sequence[PayloadRef]) -> None:
        for payload in payloads:
            self.check(payload)
        total = sum(payload.num_bytes for payload in payloads)
        if total > MAX_COPIES * self.max_bytes:
            raise LimitExceeded(f"a plan of {total} bytes is over {MAX_COPIES} copies of the weights")

    async def _fetch(self, payload: PayloadRef) -> Path:
        pieces = self._pieces(payload)
        if any(piece.start + piece.length > payload.num_bytes for piece in pieces):
            raise LimitExceeded(f"payload {payload.digest[:12]} is longer than its {payload.num_bytes} bytes")
        gaps = find_gaps(pieces, num_bytes=payload.num_bytes, num_streams=self.num_streams)
        # Fails before hours of fetching; writes still meet a disk that fills meanwhile.
        needed, free = sum(gap.num_bytes for gap in gaps), shutil.disk_usage(self.spool).free
        if needed > free:
            raise DiskFull(str(self.spool), needed_bytes=needed, free_bytes=free)
        digest = RunningDigest()
        await self._fill(payload, gaps, digest)
        path = self._path(payload)
        # Also when cancelled: the next fetch appends to the same file.
        if await in_thread(join, path, self._parts(payload), digest) != payload.digest:
            if isinstance(self.api, WeightCalls):
                self.api.distrust_address(payload.digest)
            raise MalformedPayload(f"payload {payload.digest[:12]} arrived with another digest")
        return path

    @contextlib.contextmanager
    def sharing_cap(self) -> Iterator[None]:
        """Count a read that shares the bandwidth cap with the fetches."""
        self._num_running += 1
        try:
            yield
        finally:
            self._num_running -= 1

    def keep_only(self, payloads: tuple[PayloadRef, ...]) -> None:
        names = {payload.digest for payload in payloads}
        for path in self.spool.iterdir():
            if path.name.partition(".")[0] not in names:
                path.unlink(missing_ok=True)

    def _path(self, payload: PayloadRef, start: int = 0) -> Path:
        """The only place where a payload's name becomes a path."""
        name = file_name(payload.digest)
        return self.spool / (name if start == 0 else f"{name}.{start}")

    def _pieces(self, payload: PayloadRef) -> list[Piece]:
        path = self._path(payload)
        first = Piece(0, path.stat().st_size if path.exists() else 0)
        return [first, *(Piece(start, part.stat().st_size) for start, part in self._parts(payload).items())]

    def _parts(self, payload: PayloadRef) -> dict[int, Path]:
        paths = self.spool.glob(f"{file_name(payload.digest)}.*")
        found = {int(path.suffix[1:]): path for path in paths if path.suffix[1:].isdecimal()}
        return dict(sorted(found.items()))

    async def _fill(self, payload: PayloadRef, gaps: list[Gap], digest: RunningDigest) -> None:
        """Fetch gaps, `num_streams` at once; raises a broken stream's error last."""
        free = asyncio.Semaphore(self.num_streams)
        broken: list[Unreachable] = []

        async def fill(gap: Gap) -> None:
            async with free:
                try:
                    with self.sharing_cap():
                        await self._append(payload, gap, digest)
                except Unreachable as error:
                    broken.append(error)

        streams = [asyncio.ensure_future(fill(gap)) for gap in gaps]
        try:
            await asyncio.gather(*streams)
            if broken:
                raise broken[0]
        finally:
            for stream in streams:
                stream.cancel()
            await asyncio.gather(*streams, return_exceptions=True)

    async def _append(self, payload: PayloadRef, gap: Gap, digest: RunningDigest) -> None:
        """Fetch one gap; ends when it stalls."""
        pulse = _Pulse(self.clock, allowed_s=self._allowed_s)
        # Two tasks a stream: two a frame would cost more than the frames.
        receiving = asyncio.ensure_future(self._receive(payload, gap, digest, pulse))
        stalled = asyncio.ensure_future(pulse.stop())
        try:
            await asyncio.wait([receiving, stalled], return_when=asyncio.FIRST_COMPLETED)
            if not receiving.done():
                if isinstance(self.api, WeightCalls):
                    # Tell it before the cancellation, which has no reason.
                    self.api.gave_up(payload.digest)
                raise Unreachable(f"no bytes of the payload in {pulse.stall_s:g} s", retry_after_s=1.0)
            receiving.result()
        finally:
            receiving.cancel()
            stalled.cancel()
            # Also when cancelled twice: the next fetch appends to the same file.
            await settle(receiving, stalled)

    def _allowed_s(self) -> float:
        # Each stream, of other reads too, may have one frame that waits for the cap; they are served in order.
        return STALL_S + self._num_running * self._capped_frame_s

    async def _receive(self, payload: PayloadRef, gap: Gap, digest: RunningDigest, pulse: _Pulse) -> None:
        offset = gap.begin
        # No `stop` at the payload's own end, to notice a coordinator that sends more.
        bound = {} if gap.end == payload.num_bytes else {"stop": gap.end}
        count = metrics.BYTES.labels(payload.kind.value, "in").inc
        path = self._path(payload, gap.start)
        writer = PieceWriter(path, digest=digest if gap.start == 0 else None)
        frames = self.api.read_payload(digest=payload.digest, offset=offset, **bound)
        try:
            async for frame in frames:
                if not frame:
                    # Empty frames must not count as signs of life.
                    raise MalformedPayload(f"payload {payload.digest[:12]}: a frame without bytes")
                offset += len(frame)
                if offset > gap.end:
                    raise LimitExceeded(f"payload {payload.digest[:12]} is longer than stated")
                count(len(frame))
                self.on_frame()
                # A slow disk is not a slow link.
                pulse.pause()
                await writer.put(frame)
                pulse.beat()
        finally:
            pulse.pause()
            try:
                if isinstance(frames, AsyncGenerator):
                    await frames.aclose()
            finally:
                await writer.close(durable=offset < gap.end)
        if offset < gap.end:
            raise Unreachable(f"payload {payload.digest[:12]} ended after {offset} bytes", retry_after_s=1.0)


class _Pulse:
    """Signs of life of one stream, and a watch for their absence."""

    def __init__(self, clock: Clock, *, allowed_s: Callable[[], float]) -> None:
        self._clock = clock
        self._allowed_s = allowed_s
        self.stall_s = 0.0
        """Longest time that was allowed since the last beat."""
        self._at: float | None = None
        self.beat()

    def beat(self) -> None:
        self._at = self._clock.monotonic()
        self.stall_s = self._allowed_s()

    def pause(self) -> None:
        self._at = None

    async def stop(self) -> None:
        """Return after `stall_s` without a beat."""
        while True:
            self.stall_s = max(self.stall_s, self._allowed_s())
            left_s = self.stall_s if self._at is None else self._at + self.stall_s - self._clock.monotonic()
            if left_s <= 0:
                return
            await self._clock.sleep(left_s)
