"""Codec of one chunk of weights: exact, vectorised, no bit read as a float.

    0  SAME      nothing: no element changed.
    1  GAPULP    changed elements by position and integer step (heterorl.common.weights.sparse_codec).
    2            unused; refused as unknown.
    3  DENSE8    the steps of all elements, one byte each (heterorl.common.weights.dense_codec).
    4  PLANES    the elements, byte planes by significance (the same).
    5  RAW       little-endian integers.
    6  STEP_RAW  the steps of all elements as little-endian integers.

The encoder chooses by the share of changed elements: SAME, GAPULP up to DENSE_SHARE, DENSE8 above; steps that save less
than half are compared with the state itself. A step is the integer difference, wrapping in the element's width (1, 2 or
4 bytes), so steps add up without the state they start from. Method 6 appears only in composed deltas, where the state
is not there for method 5.

Equal inputs give equal bytes. Decoding checks every size before it allocates and every position before it writes; a
failure leaves the chunk unchanged. Memory besides the chunk: at most 20 MB for one of 8 MiB.
"""

from __future__ import annotations

import enum

import numpy as np

from heterorl.common.errors import MalformedPayload
from heterorl.common.weights.arena import IntArray
from heterorl.common.weights.dense_codec import apply_dense, apply_planes, encode_dense, encode_planes
from heterorl.common.weights.sparse_codec import MAX_WIDE_SHARE, StepReader, StepWriter, changes, count_changes


class Method(enum.IntEnum):
    """Coding of a chunk; the numbers are part of the format."""

    SAME = 0
    GAPULP = 1
    DENSE8 = 3
    PLANES = 4
    RAW = 5
    STEP_RAW = 6


METHODS = frozenset(Method)
WHOLE_METHODS = frozenset({Method.PLANES, Method.RAW})
"""Methods that need no state before; the only ones in a snapshot."""
DENSE_SHARE = 0.6
"""Share of changed elements above which steps are coded densely."""


def encode_chunk(old: IntArray | None, new: IntArray) -> tuple[Method, bytes, int]:
    """Code a chunk against the state before (None: no such state); returns (method, bytes, elements changed).

    The bytes are never more than the chunk's own.
    """
    if old is None:
        return *_whole(new), new.size
    best, num_changed = _steps(old, new)
    # Planes of weights save about a third; steps that save a half need no rival.
    if best is not None and len(best[1]) <= new.nbytes // 2:
        return *best, num_changed
    best = _smaller(_denser(best, old, new), _whole(new))
    return *best, num_changed


def encode_composed(values: IntArray, *, is_whole: bool) -> tuple[Method, bytes, int]:
    """Code a chunk that `apply_chunk` made from zeros: steps, or a state if a whole method took part.

    The result depends on the values only, so equal steps give equal bytes however deltas are composed; where the direct
    difference is coded as steps, these are its bytes too. Returns (method, bytes, elements changed); the bytes are
    never more than the chunk's own.
    """
    if is_whole:
        return *_whole(values), values.size
    best, num_changed = _steps(None, values)
    if best is None or len(best[1]) > values.nbytes // 2:
        best = _denser(best, None, values)
        if best is None or len(best[1]) > values.nbytes:
            best = (Method.STEP_RAW, _little(values).tobytes())
    return *best, num_changed


def apply_chunk(method: int, data: memoryview, chunk: IntArray) -> None:
    """Change `chunk` in place from the old state to the new; on MalformedPayload or LimitExceeded it is unchanged."""
    if method == Method.SAME:
        if len(data):
            raise MalformedPayload("a SAME chunk has bytes")
    elif method == Method.GAPULP:
        for index, step in StepReader(data, num_elements=chunk.size, dtype=chunk.dtype).blocks():
            # Positions ascend strictly, so plain addition (which wraps) touches each element once.
            chunk[index] += step
    elif method == Method.DENSE8:
        apply_dense(data, chunk)
    elif method == Method.PLANES:
        apply_planes(data, chunk)
    elif method in (Method.RAW, Method.STEP_RAW):
        if len(data) != chunk.nbytes:
            raise MalformedPayload(f"a {Method(method).name} chunk has {len(data)} bytes, not {chunk.nbytes}")
        values = np.frombuffer(data, chunk.dtype.newbyteorder("<"))
        if method == Method.RAW:
            chunk[:] = values
        else:
            chunk += values
    else:
        raise MalformedPayload(f"unknown method {method}")


def _steps(old: IntArray | None, new: IntArray) -> tuple[tuple[Method, bytes] | None, int]:
    """Steps as their density asks for, and their number; None if too many are wide."""
    writer = StepWriter()
    for block in changes(old, new):
        writer.add(*block)
        if writer.num_wide > new.size // MAX_WIDE_SHARE:
            return None, count_changes(old, new)
        if writer.num_changed > DENSE_SHARE * new.size:
            del writer, block
            dense = encode_dense(old, new)
            return None if dense is None else (Method.DENSE8, dense), count_changes(old, new)
    if not writer.num_changed:
        return (Method.SAME, b""), 0
    return (Method.GAPULP, writer.finish()), writer.num_changed


def _denser(best: tuple[Method, bytes] | None, old: IntArray | None, new: IntArray) -> tuple[Method, bytes] | None:
    """Compare sparse steps that save little with DENSE8, if possible."""
    if best is None or best[0] is Method.DENSE8:
        return best
    dense = encode_dense(old, new)
    return best if dense is None else _smaller(best, (Method.DENSE8, dense))


def _whole(values: IntArray) -> tuple[Method, bytes]:
    planes = encode_planes(values)
    return (Method.PLANES, planes) if len(planes) <= values.nbytes else (Method.RAW, _little(values).tobytes())


def _smaller(one: tuple[Method, bytes] | None, other: tuple[Method, bytes]) -> tuple[Method, bytes]:
    return one if one is not None and len(one[1]) <= len(other[1]) else other


def _little(values: IntArray) -> IntArray:
    return values.astype(values.dtype.newbyteorder("<"), copy=False)
