"""Zstandard for streams whose sizes are known beforehand: nothing is allocated on a sender's word alone.

The library's one-shot `decompress` ignores its size cap when the frame states a size, and drops a second frame
silently; so the output is produced in bounded pieces and must end exactly where it should.
"""

from __future__ import annotations

import threading

import zstandard

from services.common.errors import LimitExceeded, MalformedPayload

MAX_WINDOW_BYTES = 8 << 20
_PIECE_BYTES = 1 << 16
_local = threading.local()


def compress(data: bytes | memoryview) -> bytes:
    """One zstd-1 frame that states its size; zstd is used only as an entropy coder, so higher levels gain nothing."""
    compressor = getattr(_local, "compressor", None)
    if compressor is None:
        # One context per thread: contexts are not shareable.
        compressor = _local.compressor = zstandard.ZstdCompressor(level=1, write_content_size=True)
    result: bytes = compressor.compress(data)
    return result


def decompress(data: bytes | memoryview, *, num_bytes: int) -> bytes:
    """Undo `compress`; the content must be exactly `num_bytes` long, in exactly one frame.

    Raises:
        LimitExceeded: the frame states another size or produces more.
        MalformedPayload: not one complete frame.
    """
    try:
        stated = zstandard.get_frame_parameters(data).content_size
        if stated not in (num_bytes, zstandard.CONTENTSIZE_UNKNOWN):
            raise LimitExceeded(f"zstd frame states {stated} bytes, {num_bytes} are expected")
        decoder = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES).decompressobj()
        pieces: list[bytes] = []
        total = 0
        view = memoryview(data)
        for start in range(0, len(view), _PIECE_BYTES):
            piece = decoder.decompress(view[start : start + _PIECE_BYTES])
            total += len(piece)
            if total > num_bytes:
                raise LimitExceeded(f"zstd stream is longer than {num_bytes} bytes")
            pieces.append(piece)
            if decoder.eof and start + _PIECE_BYTES < len(view):
                raise MalformedPayload("bytes after the zstd frame")
    except zstandard.ZstdError as error:
        raise MalformedPayload(f"zstd: {error}") from error
    if not decoder.eof or decoder.unused_data or total != num_bytes:
        raise MalformedPayload(f"zstd stream gives {total} of {num_bytes} bytes or has a tail")
    return b"".join(pieces)
