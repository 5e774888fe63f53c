"""Payloads: one file that rebuilds a state, or leads from one state to the next.

heterorl.common.weights.payload_file has the layout. Chunks of a snapshot are coded without a state before them. A
payload is named by the blake3 of its bytes. A version is named by its state root, since compressed bytes may differ
between builds of the compressor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO

from heterorl.common.errors import StateMismatch
from heterorl.common.process.threads import in_order
from heterorl.common.types.common import Digest
from heterorl.common.weights.arena import Arena, Chunk, Layout, state_root
from heterorl.common.weights.codec import apply_chunk, encode_chunk
from heterorl.common.weights.payload_file import (
    NO_ROOT,
    Header,
    read_chunk,
    read_header,
    write_chunks,
    write_durably,
    write_header,
)

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
    """Write a payload that rebuilds `arena` from nothing; durable when it returns."""
    return _write(path, None, arena, threads=threads)


def write_delta(path: Path, old: Arena, new: Arena, *, threads: int = 1) -> PayloadInfo:
    """Write a payload that leads from `old` to `new`, of the same layout; durable when it returns.

    The bytes do not depend on `threads`. Each thread needs at most 20 MB besides the arenas.
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
    with path.open("rb") as file:
        header = read_header(file, layout_id=staging.layout.layout_id, chunks=staging.layout.chunks)
        _check_start(header, expected_from_root)
        begin = file.tell()
        for number, record in enumerate(header.records):
            read_chunk(file, record, number=number)
        file.seek(begin)

        def apply(item: tuple[int, int, bytes]) -> None:
            number, method, data = item
            apply_chunk(method, memoryview(data), staging.chunk(number))

        # Read and checked again: the file may have changed between the two passes.
        coded = (
            (number, record.method, read_chunk(file, record, number=number))
            for number, record in enumerate(header.records)
        )
        for _ in in_order(apply, coded, threads=threads):
            pass


class PayloadChunks:
    """A payload's chunks one at a time, in any order; the file is not kept open."""

    def __init__(self, path: Path, *, layout_id: str, chunks: Sequence[Chunk], expected_from_root: str | None) -> None:
        """Read and check the index; raises as `apply_payload`."""
        self._path = path
        with path.open("rb") as file:
            header = read_header(file, layout_id=layout_id, chunks=chunks)
            _check_start(header, expected_from_root)
            self._records = header.records
            self._offsets = list(accumulate((record.num_bytes for record in self._records), initial=file.tell()))

    def read(self, number: int) -> tuple[int, bytes]:
        """Return method and coded bytes of a chunk; raises MalformedPayload if the bytes fail their checksum."""
        record = self._records[number]
        with self._path.open("rb") as file:
            file.seek(self._offsets[number])
            return record.method, read_chunk(file, record, number=number)


def write_coded(path: Path, coded: Iterable[CodedChunk], *, layout: Layout, from_root: str) -> PayloadInfo:
    """Write a payload of coded chunks, in the layout's order; durable when it returns.

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

    def content(file: BinaryIO) -> Digest:
        records = write_chunks(file, chunks(), num_chunks=len(layout.chunks))
        to_root = state_root(layout.layout_id, digests)
        write_header(file, Header(layout_id=layout.layout_id, from_root=from_root, to_root=to_root, records=records))
        return to_root

    to_root, digest, num_bytes = write_durably(path, content)
    return PayloadInfo(
        digest=digest,
        num_bytes=num_bytes,
        num_changed=num_changed,
        num_elements=layout.num_elements,
        to_root=to_root,
        chunk_digests=tuple(digests),
    )


def _write(path: Path, old: Arena | None, new: Arena, *, threads: int) -> PayloadInfo:
    def encode(number: int) -> CodedChunk:
        before = None if old is None else old.chunk(number)
        return *encode_chunk(before, new.chunk(number)), new.digest_chunk(number)

    from_root = NO_ROOT if old is None else old.state_root(threads=threads)
    coded = in_order(encode, range(new.num_chunks), threads=threads)
    return write_coded(path, coded, layout=new.layout, from_root=from_root)


def _check_start(header: Header, expected_from_root: str | None) -> None:
    wanted = NO_ROOT if expected_from_root is None else expected_from_root
    if header.from_root != wanted:
        raise StateMismatch(f"the payload starts from {header.from_root[:12]}, not from {wanted[:12]}")
