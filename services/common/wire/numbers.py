"""Lists of numbers as protobuf packs them, read and written by numpy: no number becomes an object of Python's.

ids        varints: seven bits a byte, lowest first; a byte below 128 is a number's last
log-probs  four bytes each, little-endian
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np

from heterorl.common.errors import MalformedPayload
from heterorl.common.types.common import Float32Array, Int32Array
from heterorl.common.wire.common import MAX_INT32

_MAX_VARINT = 5
"""Bytes of the largest number of 32 bits."""
_FLOAT_BYTES = 4


def pack_ids(ids: Int32Array) -> bytes:
    """Write token ids.

    Raises:
        ValueError: one is negative, which no vocabulary has.
    """
    if not ids.size:
        return b""
    if ids.min() < 0:
        raise ValueError(f"token id {ids.min()} is negative")
    wide = ids.astype(np.uint32)
    places = np.arange(_MAX_VARINT, dtype=np.uint32)
    # A number has its first byte in any case, and another one as long as bits are left for it.
    is_there = (wide[:, np.newaxis] >> (7 * places)) > 0
    is_there[:, 0] = True
    digits = ((wide[:, np.newaxis] >> (7 * places)) & 127).astype(np.uint8)
    digits[:, :-1] |= is_there[:, 1:].astype(np.uint8) << 7
    return digits[is_there].tobytes()


def unpack_ids(parts: Sequence[bytes]) -> tuple[list[Int32Array], int]:
    """Read lists of token ids, all in one pass; also the largest id of all, as it was before it was clamped.

    An id beyond int32 is clamped, not wrapped: it stays outside every vocabulary and is refused as such.

    Raises:
        MalformedPayload: a number does not end, or has more than 32 bits.
    """
    if any(part and part[-1] > 127 for part in parts):
        raise MalformedPayload("not a list of ids: a number does not end")
    data = np.frombuffer(b"".join(parts), np.uint8)
    if not data.size:
        return [np.zeros(0, np.int32) for _ in parts], 0
    stops = np.flatnonzero(data < 128)
    starts = np.empty_like(stops)
    starts[0] = 0
    np.add(stops[:-1], 1, out=starts[1:])
    more = stops - starts
    longest = int(more.max())
    if longest >= _MAX_VARINT:
        raise MalformedPayload(f"not a list of ids: a number of {longest + 1} bytes")
    low = data & 127
    wide = low[starts].astype(np.uint32)
    for place in range(1, longest + 1):
        digit = low.take(starts + place, mode="clip").astype(np.uint32)
        # Behind a number's end stand the bytes of others.
        digit *= more >= place
        wide |= digit << (7 * place)
    highest = int(wide.max())
    ids = np.minimum(wide, MAX_INT32, out=wide).view(np.int32)
    # One number for each stop, in the list in whose bytes it stands.
    ends = np.searchsorted(stops, list(accumulate(map(len, parts)))).tolist()
    return [ids[start:end] for start, end in pairwise((0, *ends))], highest


def pack_logprobs(logprobs: Float32Array) -> bytes:
    """Write log-probs, bit for bit."""
    return logprobs.astype("<f4", copy=False).tobytes()


def unpack_logprobs(parts: Sequence[bytes]) -> list[Float32Array]:
    """Read lists of log-probs.

    Raises:
        MalformedPayload: bytes are left over.
    """
    if any(len(part) % _FLOAT_BYTES for part in parts):
        raise MalformedPayload("not a list of log-probs: bytes are left over")
    # Of a bytearray: an array that cannot be written to is a nuisance to whoever works on it.
    joined: Float32Array = np.frombuffer(bytearray().join(parts), dtype="<f4")
    ends = accumulate(len(part) // _FLOAT_BYTES for part in parts)
    return [joined[start:end] for start, end in pairwise((0, *ends))]
