"""Composition of deltas: several as one, or one undone, without weights.

Steps are integers that wrap, so they add up. A payload either adds steps to a chunk or sets its values:

    add a, then add b   =  add a + b        set a, then add b  =  set a + b
    add a, then set b   =  set b            set a, then set b  =  set b

So a chunk that one delta stores whole stays whole, and no base is needed. The sum in the element's width is associative
and the encoder sees only the sum: any bracketing gives the same bytes. Steps that cancel vanish; an unchanged chunk
stays SAME. A snapshot may come first and gives a snapshot. Chunks are taken one by one: memory is one chunk, its coded
form and the codec's temporaries, for any model and number of payloads.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import numpy as np

from heterorl.common.errors import NotReversible, StateMismatch
from heterorl.common.weights.arena import Chunk, zeros
from heterorl.common.weights.codec import WHOLE_METHODS, Method, apply_chunk, encode_composed
from heterorl.common.weights.payload import Header, Record, WrittenFile, read_chunk, read_header, write_file

ComposedChunk = tuple[Method, bytes]
"""Method and coded bytes."""
MAX_PAYLOADS = 64
"""Most payloads of one composition; each is an open file."""


def compose(
    paths: Sequence[Path],
    target: Path,
    *,
    layout_id: str,
    chunks: Sequence[Chunk],
    on_chunk: Callable[[], None] = lambda: None,
) -> WrittenFile:
    """Write one payload that does what `paths` do one after another.

    Durable when it returns. Each of `paths`, 1 to MAX_PAYLOADS, starts from the state that the one before leads to.
    `on_chunk` is called before each chunk; an error that it raises ends the work and leaves no file.

    Raises:
        ValueError: no payloads, or too many.
        StateMismatch: a payload does not follow the one before or has another layout.
        MalformedPayload: a payload breaks the format.
        LimitExceeded: a stated size is impossible for the chunks.
    """
    if not 1 <= len(paths) <= MAX_PAYLOADS:
        raise ValueError(f"{len(paths)} payloads to compose, 1 to {MAX_PAYLOADS} are possible")
    with ExitStack() as stack:
        files = [stack.enter_context(path.open("rb")) for path in paths]
        headers = [read_header(file, layout_id=layout_id, chunks=chunks) for file in files]
        for before, after in itertools.pairwise(headers):
            if after.from_root != before.to_root:
                raise StateMismatch(f"a payload starts from {after.from_root[:12]}, not from {before.to_root[:12]}")

        def coded() -> Iterator[ComposedChunk]:
            for number, chunk in enumerate(chunks):
                on_chunk()
                yield _compose_chunk(files, headers, number, chunk)

        def header(records: tuple[Record, ...]) -> Header:
            return replace(headers[0], to_root=headers[-1].to_root, records=records)

        return write_file(target, coded(), num_chunks=len(chunks), header=header)


def _compose_chunk(files: Sequence[BinaryIO], headers: Sequence[Header], number: int, chunk: Chunk) -> ComposedChunk:
    records = [header.records[number] for header in headers]
    values = zeros(chunk)
    is_whole = False
    for file, record in zip(files, records, strict=True):
        data = read_chunk(file, record, number=number)
        apply_chunk(record.method, memoryview(data), values)
        is_whole = is_whole or record.method in WHOLE_METHODS
    return encode_composed(values, is_whole=is_whole)


def negate_chunk(method: int, data: bytes, chunk: Chunk) -> ComposedChunk:
    """The way back of one coded chunk.

        SAME                 stays SAME
        GAPULP DENSE8        the steps, each negated in the element's width (its smallest value is its own negation),
        STEP_RAW             and coded again by their own density
        PLANES RAW           hold the state after, which does not contain the state before: refused

    Raises:
        NotReversible: the chunk holds a state.
        MalformedPayload, LimitExceeded: as `apply_chunk`.
    """
    if method in WHOLE_METHODS:
        raise NotReversible(f"a {Method(method).name} chunk does not say what was there before")
    steps = zeros(chunk)
    apply_chunk(method, memoryview(data), steps)
    np.negative(steps, out=steps)
    return encode_composed(steps, is_whole=False)


def negate(path: Path, target: Path, *, layout_id: str, chunks: Sequence[Chunk]) -> WrittenFile:
    """Write the payload that undoes a delta; durable when it returns.

    No file is left on an error. For consecutive deltas a and b, negate(compose(a, b)) = compose(negate(b), negate(a)),
    byte for byte. Both are the bytes of the direct delta wherever that is coded as steps.

    Raises:
        NotReversible: it is a snapshot, or a chunk cannot be undone without the state before.
        MalformedPayload, LimitExceeded, StateMismatch: the file breaks the format or is of another layout.
    """
    with path.open("rb") as source:
        undone = read_header(source, layout_id=layout_id, chunks=chunks)
        if undone.is_snapshot:
            raise NotReversible("a snapshot does not say what was there before")

        def coded() -> Iterator[ComposedChunk]:
            for number, (record, chunk) in enumerate(zip(undone.records, chunks, strict=True)):
                yield negate_chunk(record.method, read_chunk(source, record, number=number), chunk)

        def header(records: tuple[Record, ...]) -> Header:
            return replace(undone, from_root=undone.to_root, to_root=undone.from_root, records=records)

        return write_file(target, coded(), num_chunks=len(chunks), header=header)
