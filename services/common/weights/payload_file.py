"""The file of a payload: a header that states everything, then the bytes of the chunks.

Layout of the file, little-endian, with n chunks:

         0   8  magic b"HRLW0001"
         8   4  u32 size of the header, 100 + 20 n
        12  32  layout id
        44  32  state root it starts from; zeros: from nothing, a snapshot
        76  32  state root it leads to
       108   4  u32 n
       112  20  for each chunk, in arena order: u32 method, u64 size of its bytes, u64 xxh3-64 of them
112 + 20 n   8  u64 xxh3-64 of the header
120 + 20 n      the chunks' bytes, in order, to the end of the file

The index is at the front, so every size is checked before any chunk is read. A payload is named by the blake3 of its
bytes. Each number is checked against the file's size and the caller's chunks before use. A file gets its name only when
all of it is durable.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from typing import BinaryIO, TypeVar

import blake3
import xxhash

from heterorl.common.errors import LimitExceeded, MalformedPayload, StateMismatch
from heterorl.common.process.files import replacing
from heterorl.common.types.common import Digest
from heterorl.common.weights.arena import Chunk
from heterorl.common.weights.codec import METHODS, WHOLE_METHODS

MAGIC = b"HRLW0001"
NO_ROOT = "0" * 64
_HEAD = Struct("<8sI")
_FIXED = Struct("<32s32s32sI")
_RECORD = Struct("<IQQ")
_CHECKSUM = Struct("<Q")
_BLOCK_BYTES = 1 << 20
FRAME_BYTES = 1 << 20
"""Payloads travel in frames of at most this size."""
ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One chunk in the file: its method, the size of its bytes and their xxh3-64."""

    method: int
    num_bytes: int
    checksum: int

    @classmethod
    def of(cls, method: int, coded: bytes) -> Record:
        return cls(method=method, num_bytes=len(coded), checksum=xxhash.xxh3_64_intdigest(coded))


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
    """The largest file of these chunks: no chunk is coded in more bytes than it has."""
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
    """The two states in a payload's header, unverified; raises MalformedPayload if it is not a payload."""
    with path.open("rb") as file:
        data = file.read(_HEAD.size + _FIXED.size)
    if len(data) != _HEAD.size + _FIXED.size or not data.startswith(MAGIC):
        raise MalformedPayload("not a payload")
    _, from_root, to_root, _ = _FIXED.unpack_from(data, _HEAD.size)
    return from_root.hex(), to_root.hex()


def read_chunk(file: BinaryIO, record: Record, *, number: int) -> bytes:
    """Read the next chunk's bytes and check them; raises MalformedPayload if they fail their checksum."""
    data = file.read(record.num_bytes)
    if xxhash.xxh3_64_intdigest(data) != record.checksum:
        raise MalformedPayload(f"chunk {number} fails its checksum")
    return data


def write_chunks(file: BinaryIO, coded: Iterable[tuple[int, bytes]], *, num_chunks: int) -> tuple[Record, ...]:
    """Write the chunks' bytes behind the place of the header, which `write_header` fills later."""
    file.seek(_HEAD.size + _FIXED.size + num_chunks * _RECORD.size + _CHECKSUM.size)
    records: list[Record] = []
    for method, data in coded:
        records.append(Record.of(method, data))
        file.write(data)
    return tuple(records)


def write_header(file: BinaryIO, header: Header) -> None:
    """Write the header to its place."""
    roots = (bytes.fromhex(root) for root in (header.layout_id, header.from_root, header.to_root))
    data = _FIXED.pack(*roots, len(header.records)) + b"".join(
        _RECORD.pack(record.method, record.num_bytes, record.checksum) for record in header.records
    )
    file.seek(0)
    file.write(_HEAD.pack(MAGIC, len(data)) + data + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(data)))


def write_durably(path: Path, write: Callable[[BinaryIO], ResultT]) -> tuple[ResultT, Digest, int]:
    """Write a file that gets its name once it is whole and durable; returns (result, blake3, size in bytes)."""
    with replacing(path) as file:
        result = write(file)
        file.flush()
        digest = file_digest(Path(file.name))
        num_bytes = os.fstat(file.fileno()).st_size
    return result, digest, num_bytes


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
