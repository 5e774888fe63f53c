"""Payloads: files that hold a state, or lead to the next one.

Chunks of a snapshot are coded without a state before them. A payload is named by the blake3 of its bytes. A version is
named by its state root, since compressed bytes may differ between builds of the compressor.

Layout of the file, little-endian, with n chunks:

         0   8  magic b"HRLW0001"
         8   4  u32 size of the header, 100 + 20 n
        12  32  layout id
        44  32  state root it starts from; zeros: a snapshot
        76  32  state root it leads to
       108   4  u32 n
       112  20  for each chunk, in arena order: u32 method, u64 size of its bytes, u64 xxh3-64 of them
112 + 20 n   8  u64 xxh3-64 of the header
120 + 20 n      the chunks' bytes, in order, to the end of the file

The index is at the front, so every size is checked before any chunk is read. Each number is checked against the file's
size and the caller's chunks before use. A file gets its name only when all of it is durable.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from struct import Struct
from typing import BinaryIO

import blake3
import xxhash

from heterorl.common.errors import LimitExceeded, MalformedPayload, StateMismatch
from heterorl.common.process.files import replacing
from heterorl.common.process.threads import in_order
from heterorl.common.types.common import Digest
from heterorl.common.weights.arena import Arena, Chunk, Layout, state_root
from heterorl.common.weights.codec import METHODS, WHOLE_METHODS, apply_chunk, encode_chunk

MAGIC = b"HRLW0001"
NO_ROOT = "0" * 64
_HEAD = Struct("<8sI")
_FIXED = Struct("<32s32s32sI")
_RECORD = Struct("<IQQ")
_CHECKSUM = Struct("<Q")
_BLOCK_BYTES = 1 << 20
FRAME_BYTES = 1 << 20
"""Payloads travel in frames of at most this size; each block of it in a file has a checksum."""
SLOW_BYTES = 1 << 17
"""Frames on a slow line: a ping waits behind them, and a line that breaks loses the unfinished ones."""
SLOW_S = 1.0
"""A line is slow if a block of FRAME_BYTES takes so long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One chunk in the file: method, and its bytes' size and xxh3-64."""

    method: int
    num_bytes: int
    checksum: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """A payload's header; `from_root` is NO_ROOT for a snapshot."""

    layout_id: Digest
    from_root: str
    to_root: str
    records: tuple[Record, ...]

    @property
    def is_snapshot(self) -> bool:
        return self.from_root == NO_ROOT


def max_file_bytes(chunks: Sequence[Chunk]) -> int:
    """Most bytes of a file; no chunk grows when it is coded."""
    fixed = _HEAD.size + _FIXED.size + _CHECKSUM.size
    return fixed + len(chunks) * _RECORD.size + sum(chunk.num_bytes for chunk in chunks)


def read_header(file: BinaryIO, *, layout_id: str, chunks: Sequence[Chunk]) -> Header:
    """Read the header and leave the file at the first chunk's bytes.

    Raises:
        MalformedPayload: the bytes break the format.
        LimitExceeded: a stated size is impossible for the chunks.
        StateMismatch: the payload belongs to another layout.
    """
    num_file_bytes = os.fstat(file.fileno()).st_size
    head = file.read(_HEAD.size)
    if len(head) != _HEAD.size:
        raise MalformedPayload("a payload is shorter than its head")
    magic, size = _HEAD.unpack(head)
    if magic != MAGIC:
        raise MalformedPayload("not a payload")
    # The file's own length bounds the read.
    if size < _FIXED.size or _HEAD.size + size + _CHECKSUM.size > num_file_bytes:
        raise MalformedPayload(f"a header of {size} bytes is cut")
    data = file.read(size)
    if _CHECKSUM.pack(xxhash.xxh3_64_intdigest(data)) != file.read(_CHECKSUM.size):
        raise MalformedPayload("the header fails its checksum")
    stated_layout, from_root, to_root, num_chunks = _FIXED.unpack_from(data)
    if stated_layout.hex() != layout_id:
        raise StateMismatch(f"the payload belongs to another layout, {stated_layout.hex()[:12]}")
    if num_chunks != len(chunks) or size != _FIXED.size + num_chunks * _RECORD.size:
        raise MalformedPayload(f"a header of {size} bytes and {num_chunks} chunks, of {len(chunks)}")
    header = Header(
        layout_id=Digest(stated_layout.hex()),
        from_root=from_root.hex(),
        to_root=to_root.hex(),
        records=tuple(
            Record(method=method, num_bytes=num_bytes, checksum=checksum)
            for method, num_bytes, checksum in _RECORD.iter_unpack(data[_FIXED.size :])
        ),
    )
    _check_records(header, chunks)
    if file.tell() + sum(record.num_bytes for record in header.records) != num_file_bytes:
        raise MalformedPayload("the chunks do not add up to the file")
    return header


def read_roots(path: Path) -> tuple[str, str]:
    """The two states in a payload's header, unverified; raises MalformedPayload."""
    with path.open("rb") as file:
        data = file.read(_HEAD.size + _FIXED.size)
    if len(data) != _HEAD.size + _FIXED.size or not data.startswith(MAGIC):
        raise MalformedPayload("not a payload")
    _, from_root, to_root, _ = _FIXED.unpack_from(data, _HEAD.size)
    return from_root.hex(), to_root.hex()


def read_chunk(file: BinaryIO, record: Record, *, number: int) -> bytes:
    """Read the next chunk's bytes; raises MalformedPayload for a wrong checksum."""
    data = file.read(record.num_bytes)
    if xxhash.xxh3_64_intdigest(data) != record.checksum:
        raise MalformedPayload(f"chunk {number} fails its checksum")
    return data


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenFile:
    """A written payload's header, name and size."""

    header: Header
    digest: Digest
    num_bytes: int


def write_file(
    path: Path, coded: Iterable[tuple[int, bytes]], *, num_chunks: int, header: Callable[[tuple[Record, ...]], Header]
) -> WrittenFile:
    """Write coded chunks, behind the header of their records.

    `header` makes it after the last chunk. The file gets its name once whole and durable.
    """
    with replacing(path) as file:
        file.seek(_HEAD.size + _FIXED.size + num_chunks * _RECORD.size + _CHECKSUM.size)
        records: list[Record] = []
        for method, data in coded:
            records.append(Record(method=method, num_bytes=len(data), checksum=xxhash.xxh3_64_intdigest(data)))
            file.write(data)
        written = header(tuple(records))
        file.seek(0)
        file.write(_header_bytes(written))
        file.flush()
        digest = file_digest(Path(file.name))
        num_bytes = os.fstat(file.fileno()).st_size
    return WrittenFile(header=written, digest=digest, num_bytes=num_bytes)


def _header_bytes(header: Header) -> bytes:
    roots = (bytes.fromhex(root) for root in (header.layout_id, header.from_root, header.to_root))
    data = _FIXED.pack(*roots, len(header.records)) + b"".join(
        _RECORD.pack(record.method, record.num_bytes, record.checksum) for record in header.records
    )
    return _HEAD.pack(MAGIC, len(data)) + data + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(data))


class FrameCutter:
    """Cuts one stream's blocks into frames, small ones on slow lines."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._size = SLOW_BYTES

    def cut(self, block: bytes) -> Iterator[bytes]:
        """Yield frames; asked for the next one, the line took one."""
        began = self._now()
        for start in range(0, len(block), self._size):
            yield block[start : start + self._size]
        self._size = SLOW_BYTES if self._now() - began >= SLOW_S else FRAME_BYTES


def file_digest(path: Path) -> Digest:
    """blake3 of a file's bytes, hex."""
    # Not mapped: mapped pages count as this process's memory, 4 GB for a snapshot.
    hasher = blake3.blake3()
    block = memoryview(bytearray(_BLOCK_BYTES))
    with path.open("rb", buffering=0) as file:
        while num_read := file.readinto(block):
            hasher.update(block[:num_read])
    return Digest(hasher.hexdigest())


def _check_records(header: Header, chunks: Sequence[Chunk]) -> None:
    for number, (record, chunk) in enumerate(zip(header.records, chunks, strict=True)):
        if record.method not in METHODS:
            raise MalformedPayload(f"chunk {number} is coded by an unknown method, {record.method}")
        if header.is_snapshot and record.method not in WHOLE_METHODS:
            raise MalformedPayload(f"chunk {number} of a snapshot is coded as a difference")
        if record.num_bytes > chunk.num_bytes:
            raise LimitExceeded(f"chunk {number} of {chunk.num_bytes} bytes is coded in {record.num_bytes}")


CodedChunk = tuple[int, bytes, int, bytes]
"""Method, coded bytes, changed elements, and the digest of the new chunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PayloadInfo:
    """A written payload: name, size, changes, and the state it leads to."""

    digest: Digest
    num_bytes: int
    num_changed: int
    num_elements: int
    to_root: Digest
    chunk_digests: tuple[bytes, ...]


def write_snapshot(path: Path, arena: Arena, *, threads: int = 1) -> PayloadInfo:
    """Write a payload with the whole `arena`; durable when it returns."""
    return _write(path, None, arena, threads=threads)


def write_delta(path: Path, old: Arena, new: Arena, *, threads: int = 1) -> PayloadInfo:
    """Write a payload from `old` to `new`; durable when it returns.

    Both have the same layout. The bytes do not depend on `threads`. Each thread needs at most 20 MB besides the arenas.
    """
    if old.layout.layout_id != new.layout.layout_id:
        raise ValueError("a delta cannot change the layout; write a snapshot")
    return _write(path, old, new, threads=threads)


def apply_payload(path: Path, staging: Arena, *, expected_from_root: str | None, threads: int = 1) -> None:
    """Apply a payload to a staging arena that no engine uses.

    `staging` is the state that it starts from (ignored by a snapshot), and `expected_from_root` its root; None for a
    snapshot. Every check that needs no decoding happens before the first write; after an error, discard the arena. Each
    thread needs one coded chunk and at most 20 MB.

    Raises:
        MalformedPayload: the bytes break the format.
        LimitExceeded: a stated size is impossible for the layout.
        StateMismatch: the payload starts from another state or belongs to another layout.
    """
    layout = staging.layout
    chunks = PayloadChunks(
        path, layout_id=layout.layout_id, chunks=layout.chunks, expected_from_root=expected_from_root
    )
    for number in range(staging.num_chunks):
        chunks.read(number)

    def apply(item: tuple[int, tuple[int, bytes]]) -> None:
        number, (method, data) = item
        apply_chunk(method, memoryview(data), staging.chunk(number))

    # Read and checked again: the file may have changed between the two passes.
    coded = ((number, chunks.read(number)) for number in range(staging.num_chunks))
    for _ in in_order(apply, coded, threads=threads):
        pass


class PayloadChunks:
    """A payload's chunks, in any order; the file is not kept open."""

    def __init__(self, path: Path, *, layout_id: str, chunks: Sequence[Chunk], expected_from_root: str | None) -> None:
        """Read and check the index; raises as `apply_payload`."""
        self._path = path
        with path.open("rb") as file:
            header = read_header(file, layout_id=layout_id, chunks=chunks)
            wanted = NO_ROOT if expected_from_root is None else expected_from_root
            if header.from_root != wanted:
                raise StateMismatch(f"the payload starts from {header.from_root[:12]}, not from {wanted[:12]}")
            self._records = header.records
            self._offsets = list(accumulate((record.num_bytes for record in self._records), initial=file.tell()))

    def read(self, number: int) -> tuple[int, bytes]:
        """Read a chunk's method and bytes; raises MalformedPayload for a wrong checksum."""
        record = self._records[number]
        with self._path.open("rb") as file:
            file.seek(self._offsets[number])
            return record.method, read_chunk(file, record, number=number)


def write_coded(path: Path, coded: Iterable[CodedChunk], *, layout: Layout, from_root: str) -> PayloadInfo:
    """Write coded chunks, in the layout's order; durable when it returns.

    Equal chunks give the same file on every machine. `from_root` is NO_ROOT for a snapshot.
    """
    digests: list[bytes] = []
    num_changed = 0

    def chunks() -> Iterator[tuple[int, bytes]]:
        nonlocal num_changed
        for method, data, changed, digest in coded:
            digests.append(digest)
            num_changed += changed
            yield method, data

    def header(records: tuple[Record, ...]) -> Header:
        to_root = state_root(layout.layout_id, digests)
        return Header(layout_id=layout.layout_id, from_root=from_root, to_root=to_root, records=records)

    written = write_file(path, chunks(), num_chunks=len(layout.chunks), header=header)
    return PayloadInfo(
        digest=written.digest,
        num_bytes=written.num_bytes,
        num_changed=num_changed,
        num_elements=layout.num_elements,
        to_root=Digest(written.header.to_root),
        chunk_digests=tuple(digests),
    )


def _write(path: Path, old: Arena | None, new: Arena, *, threads: int) -> PayloadInfo:
    def encode(number: int) -> CodedChunk:
        before = None if old is None else old.chunk(number)
        return *encode_chunk(before, new.chunk(number)), new.digest_chunk(number)

    from_root = NO_ROOT if old is None else old.state_root(threads=threads)
    coded = in_order(encode, range(new.num_chunks), threads=threads)
    return write_coded(path, coded, layout=new.layout, from_root=from_root)
