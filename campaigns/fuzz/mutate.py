"""Damages bytes: bit flips, numbers at the limits of their types, cuts, repeats and splices."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable

EDGES = (0, 1, 2, 3, 4, 7, 8, 127, 128, 254, 255, 256, 32767, 32768, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1)
LONG_EDGES = (*EDGES, 2**32, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1)


def _flip(data: bytearray, draw: random.Random, _: bytes) -> None:
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)


def _byte(data: bytearray, draw: random.Random, _: bytes) -> None:
    data[draw.randrange(len(data))] = draw.choice((0, 1, 2, 3, 127, 128, 254, 255, draw.randrange(256)))


def _number(data: bytearray, draw: random.Random, _: bytes) -> None:
    # Most fields are aligned and near the front.
    at = min(4 * draw.randrange(12), len(data)) if draw.random() < 0.7 else draw.randrange(len(data))
    if draw.random() < 0.7:
        (old,) = struct.unpack("<I", bytes(data[at : at + 4]).ljust(4, b"\0"))
        value = draw.choice((draw.choice(EDGES), (old + draw.choice((-2, -1, 1, 2))) % 2**32))
        data[at : at + 4] = struct.pack("<I", value)
    else:
        data[at : at + 8] = struct.pack("<Q", draw.choice(LONG_EDGES))


def _cut(data: bytearray, draw: random.Random, _: bytes) -> None:
    start = draw.randrange(len(data))
    del data[start : start + draw.choice((1, 1, 2, 4, 8, draw.randrange(1, 64)))]


def _truncate(data: bytearray, draw: random.Random, _: bytes) -> None:
    del data[draw.randrange(len(data)) :]


def _insert(data: bytearray, draw: random.Random, _: bytes) -> None:
    at = draw.randrange(len(data) + 1)
    data[at:at] = draw.randbytes(draw.choice((1, 1, 2, 4, 8, 32)))


def _repeat(data: bytearray, draw: random.Random, _: bytes) -> None:
    start = draw.randrange(len(data))
    part = data[start : start + draw.randrange(1, 64)]
    at = draw.randrange(len(data) + 1)
    data[at:at] = part


def _splice(data: bytearray, draw: random.Random, other: bytes) -> None:
    if other:
        data[draw.randrange(len(data)) :] = other[draw.randrange(len(other)) :]


_WAYS: tuple[Callable[[bytearray, random.Random, bytes], None], ...] = (
    _flip, _flip, _byte, _byte, _number, _number, _number, _cut, _truncate, _insert, _repeat, _splice
)  # fmt: skip


def mutated(data: bytes, draw: random.Random, *, other: bytes = b"") -> bytes:
    """Up to four damages to `data`; `other` may be spliced in."""
    result = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 4))):
        if not result:
            return draw.randbytes(draw.randrange(64))
        draw.choice(_WAYS)(result, draw, other)
    return bytes(result)
