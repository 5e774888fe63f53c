"""A payload: one file that rebuilds a state, or leads from one state to the next.

    8   magic b"HRLW0001"
    4   u32 size of the header, then the header:
          32  layout id          32  state root it starts from (zeros: a snapshot)     32  state root it leads to
           4  u32 number of chunks
          per chunk: u32 method, u64 bytes, u64 elements changed, u64 xxh3-64 of the bytes
    8   u64 xxh3-64 of the header
        the chunks' bytes, in order

Little-endian throughout. The index stands in front, so that sizes are checked before any chunk is read. A payload is
named by the blake3 of its bytes; a version is named by its state root, never by compressed bytes.
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path

import blake3
import xxhash

from services.common.errors import LimitExceeded, MalformedPayload, StateMismatch
from services.common.types import Digest
from services.common.weights.arena import Arena, Layout, state_root
from services.common.weights.codec import Method, apply_chunk, encode_chunk

MAGIC = b"HRLW0001"
NO_ROOT = "0" * 64
_RECORD = struct.Struct("<IQQQ")
_FIXED = struct.Struct("<32s32s32sI")
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


@dataclass(frozen=True, slots=True, kw_only=True)
class PayloadInfo:
    """What was written: its name, its size, and how much of the state it changes."""

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
    num_changed: int
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

    Every check that needs no decoding happens before the first write; on any error the staging arena is to be
    thrown away.

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
        if os.fstat(file.fileno()).st_size < len(MAGIC) + _U32.size:
            raise MalformedPayload("a payload is shorter than its head")
        # Not closed by hand: an error's traceback may still hold views into it.
        _apply(memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)), staging, expected_from_root)


def _apply(data: memoryview, staging: Arena, expected_from_root: str | None) -> None:
    from_root, records, position = _read_header(data, staging.layout)
    wanted = NO_ROOT if expected_from_root is None else expected_from_root
    if from_root != wanted:
        raise StateMismatch(f"the payload starts from {from_root[:12]}, not from {wanted[:12]}")
    start = position
    for number, record in enumerate(records):
        if xxhash.xxh3_64_intdigest(data[start : start + record.num_bytes]) != record.checksum:
            raise MalformedPayload(f"chunk {number} fails its checksum")
        start += record.num_bytes
    for number, record in enumerate(records):
        with data[position : position + record.num_bytes] as part:
            if from_root == NO_ROOT and record.method not in (Method.PLANES, Method.RAW):
                raise MalformedPayload(f"chunk {number} of a snapshot is coded as a difference")
            apply_chunk(record.method, part, staging.chunk(number))
        position += record.num_bytes


def _read_header(data: memoryview, layout: Layout) -> tuple[str, list[_Record], int]:
    if bytes(data[: len(MAGIC)]) != MAGIC:
        raise MalformedPayload("not a payload")
    (size,) = _U32.unpack_from(data, len(MAGIC))
    begin = len(MAGIC) + _U32.size
    if size != _FIXED.size + len(layout.chunks) * _RECORD.size:
        raise LimitExceeded(f"a header of {size} bytes does not fit {len(layout.chunks)} chunks")
    if begin + size + _U64.size > len(data):
        raise MalformedPayload("the header is cut")
    header = data[begin : begin + size]
    if xxhash.xxh3_64_intdigest(header) != _U64.unpack_from(data, begin + size)[0]:
        raise MalformedPayload("the header fails its checksum")
    layout_id, from_root, _, num_chunks = _FIXED.unpack_from(header)
    if layout_id.hex() != layout.layout_id or num_chunks != len(layout.chunks):
        raise StateMismatch("the payload belongs to another layout")
    records = [
        _Record(method=method, num_bytes=num_bytes, num_changed=num_changed, checksum=checksum)
        for method, num_bytes, num_changed, checksum in _RECORD.iter_unpack(header[_FIXED.size :])
    ]
    position = begin + size + _U64.size
    if position + sum(record.num_bytes for record in records) != len(data):
        raise MalformedPayload("the chunks do not add up to the file")
    return from_root.hex(), records, position


def _write(path: Path, old: Arena | None, new: Arena) -> PayloadInfo:
    layout = new.layout
    records: list[bytes] = []
    num_changed = 0
    digests = new.digests()
    to_root = state_root(layout.layout_id, digests)
    from_root = NO_ROOT if old is None else old.state_root()
    header_size = _FIXED.size + len(layout.chunks) * _RECORD.size
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        # The index needs the sizes, so the chunks go first and the head last.
        file.seek(len(MAGIC) + _U32.size + header_size + _U64.size)
        for number in range(new.num_chunks):
            before = None if old is None else old.chunk(number)
            method, coded, changed = encode_chunk(before, new.chunk(number))
            records.append(_RECORD.pack(method, len(coded), changed, xxhash.xxh3_64_intdigest(coded)))
            num_changed += changed
            file.write(coded)
        fixed = _FIXED.pack(
            bytes.fromhex(layout.layout_id), bytes.fromhex(from_root), bytes.fromhex(to_root), len(records)
        )
        header = fixed + b"".join(records)
        file.seek(0)
        file.write(MAGIC + _U32.pack(header_size) + header + _U64.pack(xxhash.xxh3_64_intdigest(header)))
        file.flush()
        os.fsync(file.fileno())
    digest = file_digest(temporary)
    num_bytes = temporary.stat().st_size
    temporary.replace(path)
    return PayloadInfo(
        digest=digest,
        num_bytes=num_bytes,
        num_changed=num_changed,
        num_elements=layout.num_elements,
        to_root=to_root,
        chunk_digests=digests,
    )


def file_digest(path: Path) -> Digest:
    """blake3 of a file's bytes, hex."""
    hasher = blake3.blake3()
    hasher.update_mmap(path)
    return Digest(hasher.hexdigest())
