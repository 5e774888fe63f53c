"""Reads of payload files for callers; every block that leaves is verified.

A proof is made in one pass over a file: the blake3 of all bytes, which must be its name, and the xxh3-64 of each block.
While device, inode, size and time of change stay the same, the file is not hashed as a whole again. Each block is
compared with its checksum on every send, so bytes that a disk changed never leave.

While a block is sent the next one is read: two blocks in memory for each caller. Callers of the same file share one
pass. The pass goes on when its caller has gone, so a file whose pass is slower than callers wait is served later.
"""

from __future__ import annotations

import asyncio
import os
import threading
from array import array
from collections import OrderedDict
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import blake3
import xxhash

from heterorl.common.errors import CorruptData, Draining, InvalidRequest
from heterorl.common.process.threads import opened_in_thread, settle
from heterorl.common.types.common import Digest
from heterorl.common.weights.payload import FRAME_BYTES, FrameCutter

MAX_BLOCKS = 1 << 20
"""Blocks whose checksums are kept: 8 MiB of memory for 1 TiB of payloads."""
MAX_PROOFS = 4096
"""Files whose checksums are kept."""


class DamagedFile(CorruptData):
    """A file's bytes differ from its name."""


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """Fields that change when a file is replaced or written."""

    device: int
    inode: int
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, descriptor: int) -> FileIdentity:
        stat = os.fstat(descriptor)
        return cls(stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)


@dataclass(frozen=True, slots=True)
class Proof:
    """A file whose bytes matched its name; xxh3-64 of each block."""

    identity: FileIdentity
    checksums: array[int]


class PayloadReader:
    """Frames of payloads and proofs of their files, for one event loop."""

    def __init__(self) -> None:
        self._num_blocks = 0
        self._proofs: OrderedDict[Digest, Proof] = OrderedDict()
        self._proving: dict[Digest, asyncio.Future[Proof]] = {}
        # Passes take minutes, and would hold all threads that frames and the coordinator's status wait for.
        self._provers = ThreadPoolExecutor(thread_name_prefix="proof")
        self._stopping = threading.Event()

    async def read(self, digest: Digest, path: Path, *, offset: int, stop: int | None = None) -> AsyncIterator[bytes]:
        """Yield [offset, stop) of a payload in frames up to 1 MiB.

        A file deleted meanwhile is read to its end.

        Raises:
            DamagedFile: its bytes differ from its name; the frames yielded before were right.
            OSError: it cannot be read.
            InvalidRequest: the range is not within the file.
        """
        with await opened_in_thread(lambda: path.open("rb", buffering=0)) as file:
            proof = await self._proof(digest, file)
            size = proof.identity.size
            end = size if stop is None else stop
            if not 0 <= offset <= end <= size:
                raise InvalidRequest(f"bytes {offset} to {end} are not within the {size} bytes of the payload")
            ahead = _begin(file, proof, offset, end)
            cutter = FrameCutter()
            try:
                while offset < end:
                    block = await asyncio.shield(ahead)
                    offset += len(block)
                    # While this one is sent.
                    ahead = _begin(file, proof, offset, end)
                    for frame in cutter.cut(block):
                        yield frame
            except DamagedFile:
                self._forget(digest)
                raise
            finally:
                # Its thread still reads from the descriptor.
                await settle(ahead)

    async def close(self) -> None:
        self._stopping.set()
        if self._proving:
            await asyncio.wait(list(self._proving.values()))

    async def _proof(self, digest: Digest, file: BinaryIO) -> Proof:
        while True:
            identity = FileIdentity.of(file.fileno())
            known = self._proofs.get(digest)
            if known is not None and known.identity == identity:
                self._proofs.move_to_end(digest)
                return known
            task = self._proving.get(digest)
            if task is None:
                # A descriptor of its own: the pass goes on when this caller has gone.
                own = os.dup(file.fileno())
                loop = asyncio.get_running_loop()
                task = loop.run_in_executor(self._provers, _prove, own, digest, self._stopping)
                self._proving[digest] = task
                task.add_done_callback(lambda done: self._proved(digest, done))
            proof = await asyncio.shield(task)
            if proof.identity == identity:
                return proof

    def _proved(self, digest: Digest, done: asyncio.Future[Proof]) -> None:
        del self._proving[digest]
        self._forget(digest)
        if done.cancelled() or done.exception() is not None:
            return
        self._proofs[digest] = done.result()
        self._num_blocks += len(done.result().checksums)
        while self._num_blocks > MAX_BLOCKS or len(self._proofs) > MAX_PROOFS:
            self._forget(next(iter(self._proofs)))

    def _forget(self, digest: Digest) -> None:
        proof = self._proofs.pop(digest, None)
        if proof is not None:
            self._num_blocks -= len(proof.checksums)


def _prove(descriptor: int, digest: Digest, stopping: threading.Event) -> Proof:
    """Read a file once, and close it; raises DamagedFile or Draining."""
    hasher, checksums, offset = blake3.blake3(), array("Q"), 0
    block = memoryview(bytearray(FRAME_BYTES))
    try:
        identity = FileIdentity.of(descriptor)
        while num_read := _fill(descriptor, block, offset):
            if stopping.is_set():
                raise Draining("the service is stopping", retry_after_s=1.0)
            hasher.update(block[:num_read])
            checksums.append(xxhash.xxh3_64_intdigest(block[:num_read]))
            offset += num_read
    finally:
        os.close(descriptor)
    if hasher.hexdigest() != digest or offset != identity.size:
        raise DamagedFile("its bytes on disk changed")
    return Proof(identity, checksums)


def _fill(descriptor: int, block: memoryview, offset: int) -> int:
    num_read = 0
    while num_read < len(block) and (more := os.preadv(descriptor, [block[num_read:]], offset + num_read)):
        num_read += more
    return num_read


def _begin(file: BinaryIO, proof: Proof, offset: int, end: int) -> asyncio.Future[bytes]:
    return asyncio.ensure_future(asyncio.to_thread(_read_block, file.fileno(), proof, offset, end))


def _read_block(descriptor: int, proof: Proof, offset: int, end: int) -> bytes:
    """The next bytes of [offset, end), empty at the end; raises DamagedFile."""
    if offset >= end:
        return b""
    number = offset // FRAME_BYTES
    start = number * FRAME_BYTES
    block = _read(descriptor, min(FRAME_BYTES, proof.identity.size - start), start)
    # Checksums are of whole blocks.
    if xxhash.xxh3_64_intdigest(block) != proof.checksums[number]:
        raise DamagedFile(f"its bytes from {start} on changed on disk")
    return block[offset - start : end - start]


def _read(descriptor: int, num_bytes: int, offset: int) -> bytes:
    data = os.pread(descriptor, num_bytes, offset)
    while len(data) < num_bytes and (more := os.pread(descriptor, num_bytes - len(data), offset + len(data))):
        data += more
    return data
