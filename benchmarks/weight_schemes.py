"""Ways to send changed bf16 weights, ours and the ones that open systems use, behind one pair of functions.

Each codes a chunk against the chunk before and applies the bytes in place, on one thread, with the same numpy and
zstandard. Whole-state schemes ignore the state before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from heterorl.common.weights.codec import apply_chunk, encode_chunk

Chunk = npt.NDArray[np.int16]
Coded = tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """One way: `encode(old, new)` gives parts, whose bytes count as sent; `apply(parts, chunk)` changes the chunk."""

    name: str
    describe: str
    encode: Callable[[Chunk, Chunk], Coded]
    apply: Callable[[Coded, Chunk], None]
    is_whole: bool = False


_COMPRESSOR = zstandard.ZstdCompressor(level=1)
_DECOMPRESSOR = zstandard.ZstdDecompressor()


def _pack(values: npt.NDArray[Any]) -> bytes:
    packed: bytes = _COMPRESSOR.compress(values.data)
    return packed


def _unpack(data: bytes, dtype: Any) -> npt.NDArray[Any]:
    return np.frombuffer(_DECOMPRESSOR.decompress(data), dtype)


def _ours_encode(old: Chunk, new: Chunk) -> Coded:
    return encode_chunk(old, new)[:2]


def _ours_apply(coded: Coded, chunk: Chunk) -> None:
    apply_chunk(coded[0], memoryview(coded[1]), chunk)


def _xor_encode(old: Chunk, new: Chunk) -> Coded:
    return (_pack(old ^ new),)


def _xor_apply(coded: Coded, chunk: Chunk) -> None:
    np.bitwise_xor(chunk, _unpack(coded[0], np.int16), out=chunk)


def _coo_encode(old: Chunk, new: Chunk) -> Coded:
    index = np.flatnonzero(old != new)
    return _pack(np.diff(index, prepend=0).astype(np.int32)), _pack(new[index])


def _coo_apply(coded: Coded, chunk: Chunk) -> None:
    chunk[np.cumsum(_unpack(coded[0], np.int32))] = _unpack(coded[1], np.int16)


def _absolute_encode(old: Chunk, new: Chunk) -> Coded:
    index = np.flatnonzero(old != new)
    return _pack(index.astype(np.int32)), _pack(new[index])


def _absolute_apply(coded: Coded, chunk: Chunk) -> None:
    chunk[_unpack(coded[0], np.int32)] = _unpack(coded[1], np.int16)


def _gap_xor_encode(old: Chunk, new: Chunk) -> Coded:
    index = np.flatnonzero(old != new)
    # Gaps beyond 16 bits do not occur at these densities; such a chunk would need a wider type.
    return _pack(np.diff(index, prepend=0).astype(np.uint16)), _pack(old[index] ^ new[index])


def _gap_xor_apply(coded: Coded, chunk: Chunk) -> None:
    chunk[np.cumsum(_unpack(coded[0], np.uint16), dtype=np.int64)] ^= _unpack(coded[1], np.int16)


def _full_encode(_: Chunk, new: Chunk) -> Coded:
    return (_pack(new),)


def _full_apply(coded: Coded, chunk: Chunk) -> None:
    chunk[:] = _unpack(coded[0], np.int16)


def schemes() -> list[Scheme]:
    """All schemes that can run here; ZipNN only where it is installed."""
    rivals = [
        ("xor_zstd", "XOR of all elements, zstd-1", _xor_encode, _xor_apply),
        ("coo_zstd", "int32 index, new value, zstd-1", _absolute_encode, _absolute_apply),
        ("coo_gap_zstd", "int32 index gap, new value, zstd-1", _coo_encode, _coo_apply),
        ("gap_xor_zstd", "u16 index gap, XOR of value, zstd-1", _gap_xor_encode, _gap_xor_apply),
    ]
    found = [
        Scheme(name="gapulp", describe="ours: gaps and integer steps", encode=_ours_encode, apply=_ours_apply),
        *(Scheme(name=name, describe=text, encode=encode, apply=apply) for name, text, encode, apply in rivals),
        Scheme(name="full_zstd", describe="all weights, zstd-1", encode=_full_encode, apply=_full_apply, is_whole=True),
    ]
    zipnn = _zipnn()
    return [*found, zipnn] if zipnn else found


def _zipnn() -> Scheme | None:
    try:
        from zipnn import ZipNN
    except ImportError:
        return None
    codec = ZipNN(bytearray_dtype="bfloat16", input_format="byte", threads=1)

    def encode(_: Chunk, new: Chunk) -> Coded:
        # It shuffles its input in place.
        return (bytes(codec.compress(bytearray(new.tobytes()))),)

    def apply(coded: Coded, chunk: Chunk) -> None:
        chunk[:] = np.frombuffer(codec.decompress(coded[0]), np.int16)

    return Scheme(name="full_zipnn", describe="all weights, ZipNN", encode=encode, apply=apply, is_whole=True)
