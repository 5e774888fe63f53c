"""Partial downloads: missing ranges, and the writer that appends frames.

A thread writes and hashes frames while the next ones arrive:

    put     waits for room: at most BATCH_BYTES wait during a write; unblocked by the thread
    thread  waits for a frame; unblocked by put

Over a slow link each frame goes to the thread at once; over a fast one, batches do. Bytes are synced when a fetch
breaks; before, the kernel writes them back within half a minute or so. A complete file is not synced: it is used at
once and removed. After a power cut a digest that differs costs one more fetch.
"""

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import blake3

from heterorl.common.process.files import write_all
from heterorl.common.process.threads import settle
from heterorl.common.types.common import Digest

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
    """Appends to one file, which it owns."""

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
