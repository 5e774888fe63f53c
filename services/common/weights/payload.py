"""A payload: one file that rebuilds a state, or leads from one state to the next.

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

The index stands in front, so that every size is checked before any chunk is read. Chunks of a snapshot are coded
without a state before them. A payload is named by the blake3 of its bytes; a version is named by its state root, never
by compressed bytes, which may differ between builds of the compressor. Nothing here trusts a number before it has been
held against the file's size and the receiver's own layout.
"""

from __future__ import annotations

import io
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO

import blake3
import xxhash

from services.common.errors import LimitExceeded, MalformedPayload, StateMismatch
from services.common.types import Digest
from services.common.weights.arena import Arena, Layout, state_root
from services.common.weights.codec import METHODS, WHOLE_METHODS, apply_chunk, encode_chunk

MAGIC = b"HRLW0001"
NO_ROOT = "0" * 64
_HEAD = struct.Struct("<8sI")
_FIXED = struct.Struct("<32s32s32sI")
_RECORD = struct.Struct("<IQQ")
_CHECKSUM = struct.Struct("<Q")


@dataclass(frozen=True, slots=True, kw_only=True)
class PayloadInfo:
    """What was written: its name, its size, how much of the state it changes, and the state it leads to."""

    digest: Digest
    num_bytes: int
    num_changed: int
    num_elements: int
    to_root: Digest
    chunk_digests: tuple[bytes, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Record:
    method: int
    num_bytes: int
    checksum: int


def write_snapshot(path: Path, arena: Arena) -> PayloadInfo:
    """Write a payload that rebuilds `arena` from nothing; durable when it returns."""
    return _write(path, None, arena)


def write_delta(path: Path, old: Arena, new: Arena) -> PayloadInfo:
    """Write a payload that leads from `old` to `new`; durable when it returns.

    Raises:
        ValueError: the layouts differ; a new layout needs a snapshot.
    """
    if old.layout.layout_id != new.layout.layout_id:
        raise ValueError("a delta cannot change the layout; write a snapshot")
    return _write(path, old, new)


def apply_payload(path: Path, staging: Arena, *, expected_from_root: str | None) -> None:
    """Apply a payload to a staging arena that nobody generates with.

    Every check that needs no decoding happens before the first write; on any error the staging arena is to be thrown
    away. Memory: one coded chunk and the temporaries of its decoding.

    Args:
        path: the payload.
        staging: the state it starts from (ignored by a snapshot), changed in place.
        expected_from_root: state root of `staging`; None for a snapshot.

    Raises:
        MalformedPayload: the bytes break the format.
        LimitExceeded: a stated size is impossible for the layout.
        StateMismatch: the payload starts from another state or belongs to another layout.
    """
    with path.open("rb") as file:
        from_root, records = _read_header(file, staging.layout)
        wanted = NO_ROOT if expected_from_root is None else expected_from_root
        if from_root != wanted:
            raise StateMismatch(f"the payload starts from {from_root[:12]}, not from {wanted[:12]}")
        _check_records(records, staging.layout, is_snapshot=from_root == NO_ROOT)
        begin = file.tell()
        if begin + sum(record.num_bytes for record in records) != os.fstat(file.fileno()).st_size:
            raise MalformedPayload("the chunks do not add up to the file")
        for _ in _read_chunks(file, records):
            pass
        file.seek(begin)
        # Read and checked again: between the two passes the file may have changed under us.
        for number, data in enumerate(_read_chunks(file, records)):
            apply_chunk(records[number].method, memoryview(data), staging.chunk(number))


def file_digest(path: Path) -> Digest:
    """blake3 of a file's bytes, hex."""
    hasher = blake3.blake3()
    hasher.update_mmap(path)
    return Digest(hasher.hexdigest())


def _read_header(file: BinaryIO, layout: Layout) -> tuple[str, list[_Record]]:
    head = file.read(_HEAD.size)
    if len(head) != _HEAD.size:
        raise MalformedPayload("a payload is shorter than its head")
    magic, size = _HEAD.unpack(head)
    if magic != MAGIC:
        raise MalformedPayload("not a payload")
    # The file's own length bounds what is read, whatever the stated size.
    if size < _FIXED.size or _HEAD.size + size + _CHECKSUM.size > os.fstat(file.fileno()).st_size:
        raise MalformedPayload(f"a header of {size} bytes is cut")
    header = file.read(size)
    if _CHECKSUM.pack(xxhash.xxh3_64_intdigest(header)) != file.read(_CHECKSUM.size):
        raise MalformedPayload("the header fails its checksum")
    layout_id, from_root, _, num_chunks = _FIXED.unpack_from(header)
    if layout_id.hex() != layout.layout_id:
        raise StateMismatch(f"the payload belongs to another layout, {layout_id.hex()[:12]}")
    if num_chunks != len(layout.chunks) or size != _FIXED.size + num_chunks * _RECORD.size:
        raise MalformedPayload(f"a header of {size} bytes and {num_chunks} chunks, of {len(layout.chunks)}")
    records = [
        _Record(method=method, num_bytes=num_bytes, checksum=checksum)
        for method, num_bytes, checksum in _RECORD.iter_unpack(header[_FIXED.size :])
    ]
    return from_root.hex(), records


def _check_records(records: list[_Record], layout: Layout, *, is_snapshot: bool) -> None:
    for number, (record, chunk) in enumerate(zip(records, layout.chunks, strict=True)):
        if record.method not in METHODS:
            raise MalformedPayload(f"chunk {number} is coded by an unknown method, {record.method}")
        if is_snapshot and record.method not in WHOLE_METHODS:
            raise MalformedPayload(f"chunk {number} of a snapshot is coded as a difference")
        if record.num_bytes > chunk.num_bytes:
            raise LimitExceeded(f"chunk {number} of {chunk.num_bytes} bytes is coded in {record.num_bytes}")


def _read_chunks(file: BinaryIO, records: list[_Record]) -> Iterator[bytes]:
    for number, record in enumerate(records):
        data = file.read(record.num_bytes)
        if xxhash.xxh3_64_intdigest(data) != record.checksum:
            raise MalformedPayload(f"chunk {number} fails its checksum")
        yield data


def _write(path: Path, old: Arena | None, new: Arena) -> PayloadInfo:
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            num_changed, to_root, digests = _write_content(file, old, new)
            file.flush()
            os.fsync(file.fileno())
        digest = file_digest(temporary)
        num_bytes = temporary.stat().st_size
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_directory(path.parent)
    return PayloadInfo(
        digest=digest,
        num_bytes=num_bytes,
        num_changed=num_changed,
        num_elements=new.layout.num_elements,
        to_root=to_root,
        chunk_digests=digests,
    )


def _write_content(file: io.BufferedWriter, old: Arena | None, new: Arena) -> tuple[int, Digest, tuple[bytes, ...]]:
    layout = new.layout
    size = _FIXED.size + len(layout.chunks) * _RECORD.size
    records: list[bytes] = []
    digests: list[bytes] = []
    num_changed = 0
    # The index needs the sizes, so the chunks go first and the header last.
    file.seek(_HEAD.size + size + _CHECKSUM.size)
    for number in range(new.num_chunks):
        method, coded, changed = encode_chunk(None if old is None else old.chunk(number), new.chunk(number))
        records.append(_RECORD.pack(method, len(coded), xxhash.xxh3_64_intdigest(coded)))
        digests.append(new.digest_chunk(number))
        num_changed += changed
        file.write(coded)
    to_root = state_root(layout.layout_id, digests)
    roots = [layout.layout_id, NO_ROOT if old is None else old.state_root(), to_root]
    header = _FIXED.pack(*(bytes.fromhex(root) for root in roots), len(records)) + b"".join(records)
    file.seek(0)
    file.write(_HEAD.pack(MAGIC, size) + header + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(header)))
    return num_changed, to_root, tuple(digests)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class PayloadChunks:
    """A payload's chunks one at a time, in any order; the file stays as it is and is not kept open."""

    def __init__(self, path: Path, layout: Layout, *, expected_from_root: str | None) -> None:
        """Read and check the index.

        Raises:
            MalformedPayload, LimitExceeded, StateMismatch: as `apply_payload`.
        """
        self._path = path
        with path.open("rb") as file:
            from_root, self._records = _read_header(file, layout)
            wanted = NO_ROOT if expected_from_root is None else expected_from_root
            if from_root != wanted:
                raise StateMismatch(f"the payload starts from {from_root[:12]}, not from {wanted[:12]}")
            _check_records(self._records, layout, is_snapshot=from_root == NO_ROOT)
            self._offsets = list(accumulate((record.num_bytes for record in self._records), initial=file.tell()))
            if self._offsets[-1] != os.fstat(file.fileno()).st_size:
                raise MalformedPayload("the chunks do not add up to the file")

    def read(self, number: int) -> tuple[int, bytes]:
        """Method and coded bytes of a chunk.

        Raises:
            MalformedPayload: the bytes fail their checksum.
        """
        with self._path.open("rb") as file:
            file.seek(self._offsets[number])
            (data,) = _read_chunks(file, self._records[number : number + 1])
        return self._records[number].method, data
