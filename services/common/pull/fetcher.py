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
import os
import shutil
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import blake3

from heterorl.common.api import WeightsApi
from heterorl.common.errors import DiskFull, LimitExceeded, MalformedPayload, Unreachable
from heterorl.common.process import metrics
from heterorl.common.process.clock import Clock
from heterorl.common.process.files import room, write_all
from heterorl.common.process.threads import in_thread, settle
from heterorl.common.rpc.calls import Calls, WeightCalls
from heterorl.common.types.common import Digest, file_name
from heterorl.common.types.policy import PayloadRef
from heterorl.common.weights.payload import FRAME_BYTES

SPLIT_BYTES = 4 << 20
"""Smallest half of a cut range: a stream needs some round trips to reach full speed."""


@dataclass(frozen=True, slots=True, order=True)
class Piece:
    """Bytes [start, start + length) of a payload, in the file of `start`.

    Piece 0 is the payload's known beginning; others exist only while several streams fetch.
    """

    start: int
    length: int


@dataclass(frozen=True, slots=True, order=True)
class Gap:
    """Missing bytes [begin, end), to append to the piece at `start`."""

    begin: int
    end: int
    start: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.begin


def find_gaps(pieces: Sequence[Piece], *, num_bytes: int, num_streams: int) -> list[Gap]:
    """Holes to fetch next, the largest cut in half for `num_streams` streams."""
    known = sorted(pieces)
    ends = [piece.start for piece in known[1:]] + [num_bytes]
    gaps = [
        Gap(begin=piece.start + piece.length, end=end, start=piece.start)
        for piece, end in zip(known, ends, strict=True)
        if piece.start + piece.length < end
    ]
    while gaps and len(gaps) < num_streams:
        largest = max(gaps, key=lambda gap: gap.num_bytes)
        if largest.num_bytes < 2 * SPLIT_BYTES:
            break
        middle = (largest.begin + largest.end) // 2
        gaps.remove(largest)
        gaps += [Gap(largest.begin, middle, largest.start), Gap(middle, largest.end, middle)]
    return sorted(gaps)


BATCH_BYTES = 4 << 20
COPY_BYTES = 1 << 20


class RunningDigest:
    """blake3 of a file's beginning."""

    def __init__(self) -> None:
        self._hasher = blake3.blake3()
        self._num_bytes = 0

    def update(self, data: bytes) -> None:
        self._hasher.update(data)
        self._num_bytes += len(data)

    def catch_up(self, path: Path) -> None:
        with path.open("rb", buffering=0) as file:
            file.seek(self._num_bytes)
            while block := file.read(COPY_BYTES):
                self.update(block)

    def digest(self) -> Digest:
        return Digest(self._hasher.hexdigest())


class PieceWriter:
    """Appends to one file, which it owns.

    A thread writes and hashes frames while the next ones arrive:

        put     waits for room: at most BATCH_BYTES wait during a write; unblocked by the thread
        thread  waits for a frame; unblocked by put

    Over a slow link each frame goes to the thread at once; over a fast one, batches do. Bytes are synced when a fetch
    breaks; before, the kernel writes them back within half a minute or so. A complete file is not synced: it is used at
    once and removed. After a power cut a digest that differs costs one more fetch.
    """

    def __init__(self, path: Path, *, digest: RunningDigest | None = None) -> None:
        """Open or create the file; `digest` follows the bytes."""
        self._path = path
        self._file = path.open("ab", buffering=0)
        self._digest = digest
        self._is_new = True
        self._batch: list[bytes] = []
        self._num_waiting = 0
        self._writing: asyncio.Future[None] | None = None
        self._error: BaseException | None = None

    async def put(self, frame: bytes) -> None:
        """Append a frame; returns when there is room for the next one.

        Raises OSError of this or an earlier write.
        """
        self._batch.append(frame)
        self._num_waiting += len(frame)
        if self._writing is None:
            self._hand_over()
        while self._writing is not None and self._num_waiting >= BATCH_BYTES:
            await asyncio.wait([self._writing])
        self._check()

    async def close(self, *, durable: bool) -> None:
        """Write the rest and close the file, also after a failure.

        `durable` waits for the disk. Raises OSError.
        """
        closing = asyncio.ensure_future(self._finish(durable))
        await settle(closing)
        closing.result()
        self._check()

    async def _finish(self, durable: bool) -> None:
        while self._writing is not None:
            await asyncio.wait([self._writing])
        await asyncio.to_thread(self._close, durable)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _hand_over(self) -> None:
        batch, self._batch, self._num_waiting = self._batch, [], 0
        self._writing = asyncio.get_running_loop().run_in_executor(None, self._write, batch)
        self._writing.add_done_callback(self._written)

    def _written(self, done: asyncio.Future[None]) -> None:
        self._writing = None
        # Always read: the event loop prints exceptions that were not retrieved.
        error = done.exception()
        self._error = self._error or error
        if self._error is not None:
            self._batch = []
        elif self._batch:
            self._hand_over()

    # the thread

    def _write(self, batch: list[bytes]) -> None:
        if self._is_new and self._digest is not None:
            self._digest.catch_up(self._path)
        self._is_new = False
        for frame in batch:
            write_all(self._file, frame)
            if self._digest is not None:
                self._digest.update(frame)

    def _close(self, durable: bool) -> None:
        with self._file:
            if durable:
                os.fsync(self._file.fileno())


def join(path: Path, parts: dict[int, Path], digest: RunningDigest) -> Digest:
    """Append parts to the file that they continue; returns its digest.

    After a crash in between, the remaining pieces still state which ranges are missing.
    """
    for start, part in parts.items():
        with path.open("ab", buffering=0) as whole, part.open("rb", buffering=0) as more:
            more.seek(os.fstat(whole.fileno()).st_size - start)
            while block := more.read(COPY_BYTES):
                write_all(whole, block)
            os.fsync(whole.fileno())
        part.unlink()
    digest.catch_up(path)
    return digest.digest()


STALL_S = 60.0
"""A stream without a frame (128 KiB on slow lines) for so long fails; received bytes stay. Waits for this process's own
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
