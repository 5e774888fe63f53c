"""Changes of small weights in a stream of their own (method SPLIT): a fifth fewer bytes, at half the speed.

An optimizer moves all weights by about the same amount, so the smaller a weight, the likelier its rounded bits change:
at lr 1e-6 3 % of the elements carry half of the changes. Sender and receiver both hold the old state, so they agree
without a word on which elements are small and can number them from the smallest magnitude up; among those the changes
lie close together and their gaps cost less. The price: the state must be at hand, so such chunks cannot be composed
without it.

The key of an element is the highest 8 bits below its sign (the exponent of bf16 and fp32). Layout, little-endian:

     0  u32 threshold t, 1 to 255: small elements are those with key < t; at most one in MAX_SMALL_SHARE is
     4  u32 size of the first part
     8  first part     the changes of the other elements, as GAPULP, positions counted in the chunk; nothing for none
        second part    the changes of the small elements, as GAPULP, positions counted in the order of (key, position);
                       nothing for none
"""

from __future__ import annotations

from struct import Struct

import numpy as np
import numpy.typing as npt

from heterorl.common.errors import MalformedPayload
from heterorl.common.weights.arena import IntArray
from heterorl.common.weights.step_reader import StepReader
from heterorl.common.weights.steps import SCAN_ELEMENTS, IndexArray, StepWriter, U8Array, changes

FloatArray = npt.NDArray[np.float64]

_HEADER = Struct("<2I")
MAX_SMALL_SHARE = 8
MAX_CHANGED_SHARE = 4
"""One in so many elements may be small, or changed: bounds memory; with more, nothing is gained."""
_SAMPLES = 1 << 16
_OVERHEAD_BITS = 8 * 48
"""What the second part costs beside its changes."""


def encode_split(old: IntArray, new: IntArray) -> tuple[bytes, int] | None:
    """Code the elements where `old` and `new` differ; returns (bytes, elements changed), None where it gains nothing.

    The threshold depends on the two states alone, so equal states give equal bytes.
    """
    found: list[IndexArray] = []
    num_changed = 0
    for start, index, _ in changes(old, new):
        found.append(index + start)
        num_changed += index.size
        if num_changed > new.size // MAX_CHANGED_SHARE:
            return None
    if not num_changed:
        return None
    changed = np.concatenate(found)
    del found
    keys = _keys(old[changed])
    threshold = _threshold(old, keys)
    places = _small_places(old, threshold) if threshold else None
    if places is None:
        return None
    is_changed = np.zeros(new.size, np.bool_)
    is_changed[changed] = True
    ranks = np.flatnonzero(is_changed[places])
    del is_changed
    others = changed[keys >= threshold]
    del changed, keys
    first = _part(others, new[others] - old[others])
    small = places[ranks]
    second = _part(ranks, new[small] - old[small])
    return _HEADER.pack(threshold, len(first)) + first + second, num_changed


def apply_split(data: memoryview, chunk: IntArray) -> None:
    """Add the steps to `chunk`, which holds the state that they start from.

    Raises:
        MalformedPayload: the bytes break the format; the chunk is unchanged.
        LimitExceeded: a frame states another size than its header; the chunk is unchanged.
    """
    if len(data) < _HEADER.size:
        raise MalformedPayload("a SPLIT chunk is shorter than its header")
    threshold, first_size = _HEADER.unpack_from(data)
    if not 1 <= threshold <= 255:
        raise MalformedPayload(f"a threshold of {threshold}")
    if _HEADER.size + first_size > len(data):
        raise MalformedPayload("a part of a SPLIT chunk is cut")
    parts = [data[_HEADER.size : _HEADER.size + first_size], data[_HEADER.size + first_size :]]
    places = _small_places(chunk, threshold)
    if places is None:
        raise MalformedPayload("too many elements of a SPLIT chunk are small")
    first, second = (_read(part, count, chunk) for part, count in zip(parts, (chunk.size, places.size), strict=True))
    if not first and not second:
        raise MalformedPayload("a SPLIT chunk changes nothing")
    for index, _ in first:
        if (_keys(chunk[index]) < threshold).any():
            raise MalformedPayload("a small element among the others")
    for index, step in first:
        chunk[index] += step
    for rank, step in second:
        chunk[places[rank]] += step


def _read(part: memoryview, num_elements: int, chunk: IntArray) -> list[tuple[IndexArray, IntArray]]:
    if not len(part):
        return []
    reader = StepReader(part, num_elements=num_elements, dtype=chunk.dtype)
    if reader.num_changed > chunk.size // MAX_CHANGED_SHARE:
        raise MalformedPayload(f"{reader.num_changed} changes in a SPLIT chunk of {chunk.size} elements")
    return list(reader.blocks())


def _part(index: IndexArray, step: IntArray) -> bytes:
    if not index.size:
        return b""
    writer = StepWriter()
    writer.add(0, index, step)
    return writer.finish()


def _keys(values: IntArray) -> U8Array:
    bits = 8 * values.itemsize
    keys: U8Array = ((values.view(f"u{values.itemsize}") << 1) >> (bits - 8)).astype(np.uint8)
    return keys


def _small_places(values: IntArray, threshold: int) -> IndexArray | None:
    """Positions of the small elements in the order of (key, position); None when there are too many."""
    unsigned = values.view(f"u{values.itemsize}")
    bound = unsigned.dtype.type(threshold << (8 * values.itemsize - 8))
    found: list[IndexArray] = []
    count = 0
    for start in range(0, values.size, SCAN_ELEMENTS):
        # Shifting drops the sign.
        index = np.flatnonzero((unsigned[start : start + SCAN_ELEMENTS] << 1) < bound)
        count += index.size
        if count > values.size // MAX_SMALL_SHARE:
            return None
        index += start
        found.append(index)
    places = np.concatenate(found)
    del found
    return places[np.argsort(_keys(values[places]), kind="stable")]


def _threshold(old: IntArray, changed_keys: U8Array) -> int:
    """The threshold that costs least by entropy of the positions; 0 when none gains anything."""
    stride = max(1, old.size // _SAMPLES)
    total = np.bincount(_keys(old[::stride]), minlength=256) * float(stride)
    changed = np.bincount(changed_keys, minlength=256).astype(np.float64)
    total = np.maximum(total, changed)
    small_cost = np.concatenate([[0.0], np.cumsum(_position_bits(changed, total))])
    others = changed_keys.size - np.concatenate([[0.0], np.cumsum(changed)])
    cost = small_cost + _position_bits(others, np.full(257, float(old.size)))
    cost[1:] += _OVERHEAD_BITS
    num_small = np.concatenate([[0.0], np.cumsum(total)])
    # Half of what is allowed, since the numbers are from a sample.
    cost[num_small > old.size / (2 * MAX_SMALL_SHARE)] = np.inf
    best = int(np.argmin(cost[:256]))
    return best if cost[best] < cost[0] else 0


def _position_bits(changed: FloatArray, total: FloatArray) -> FloatArray:
    """Entropy of which `changed` of `total` elements changed, bits."""
    share = np.divide(changed, total, out=np.zeros_like(total), where=total > 0)
    bits = np.zeros_like(total)
    for part in (share, 1.0 - share):
        bits -= np.where(part > 0, part * np.log2(np.where(part > 0, part, 1.0)), 0.0)
    result: FloatArray = bits * total
    return result
