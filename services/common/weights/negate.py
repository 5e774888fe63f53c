"""A delta the other way round: steps wrap, so the negated steps lead back from the state after to the state before.

    SAME                 stays SAME
    GAPULP DENSE8        the steps, each negated in the element's width (its smallest value is its own negation), and
    STEP_RAW             coded again by their own density: what is one byte as -128 is none as 128
    PLANES RAW           hold the state after, of which nothing but the state before itself makes the way back: refused

With a and b deltas one after another, negate(compose(a, b)) = compose(negate(b), negate(a)), byte for byte, and both
are the bytes of the direct delta wherever that is coded as steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from heterorl.common.errors import NotReversible
from heterorl.common.weights.arena import Chunk, zeros
from heterorl.common.weights.codec import WHOLE_METHODS, Method, apply_chunk, encode_composed
from heterorl.common.weights.compose import ComposedPayload
from heterorl.common.weights.container import (
    NO_ROOT,
    Header,
    read_chunk,
    read_header,
    write_chunks,
    write_durably,
    write_header,
)


def negate_chunk(method: int, data: bytes, chunk: Chunk) -> tuple[Method, bytes, int]:
    """The way back of one coded chunk; returns (method, bytes, elements changed).

    Raises:
        NotReversible: the chunk holds no steps, or such as need the state before.
        MalformedPayload, LimitExceeded: as `apply_chunk`.
    """
    if method in WHOLE_METHODS:
        raise NotReversible(f"a {Method(method).name} chunk does not say what was there before")
    steps = zeros(chunk)
    apply_chunk(method, memoryview(data), steps)
    np.negative(steps, out=steps)
    return encode_composed(steps, is_whole=False)


def negate(path: Path, target: Path, *, layout_id: str, chunks: Sequence[Chunk]) -> ComposedPayload:
    """Write the payload that undoes a delta; durable when it returns, and no file is left on an error.

    Args:
        path: a delta, single or merged.
        target: the file to write.
        layout_id: its layout.
        chunks: the layout's chunks.

    Raises:
        NotReversible: it is a snapshot, or a chunk of it cannot be undone without the state before.
        MalformedPayload, LimitExceeded, StateMismatch: the file breaks the format or is of another layout.
    """
    with path.open("rb") as source:
        header = read_header(source, layout_id=layout_id, chunks=chunks)
        if header.is_snapshot:
            raise NotReversible("a snapshot does not say what was there before")
        num_changed = 0

        def coded() -> Iterator[tuple[int, bytes]]:
            nonlocal num_changed
            for number, (record, chunk) in enumerate(zip(header.records, chunks, strict=True)):
                data = read_chunk(source, record, number=number)
                method, negated, changed = negate_chunk(record.method, data, chunk)
                num_changed += changed
                yield method, negated

        def content(file: BinaryIO) -> None:
            records = write_chunks(file, coded(), num_chunks=len(chunks))
            back = Header(
                layout_id=header.layout_id, from_root=header.to_root, to_root=header.from_root, records=records
            )
            write_header(file, back)

        _, digest, num_bytes = write_durably(target, content)
    assert header.from_root != NO_ROOT, "only snapshots start from nothing"
    return ComposedPayload(
        digest=digest,
        num_bytes=num_bytes,
        num_changed=num_changed,
        from_root=header.to_root,
        to_root=header.from_root,
    )
