"""Zstandard for streams whose exact size is known beforehand: nothing is allocated on a sender's word alone.

The library is bounded only where a frame states its size: a frame without one grows as far as its blocks say (64 KiB
can become 2 GiB in one call), a stated one is allocated before it is believed, and a second frame is dropped in
silence. So a frame must state exactly the size that the caller expects, must not ask for a large window, and must be
all there is. Nothing at all stands for an empty stream.
"""

from __future__ import annotations

import threading

import zstandard

from heterorl.common.errors import LimitExceeded, MalformedPayload

MAX_WINDOW_BYTES = 8 << 20


class _Contexts(threading.local):
    """Zstandard contexts of one thread: they are dear to make and cannot be shared."""

    def __init__(self) -> None:
        # Zstandard only serves as an entropy coder here, so levels above 1 gain nothing.
        self.compressor = zstandard.ZstdCompressor(level=1, write_content_size=True)
        self.decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)


_contexts = _Contexts()


def compress(data: bytes | memoryview) -> bytes:
    """One frame that states its size, or nothing for nothing."""
    if not len(data):
        return b""
    result: bytes = _contexts.compressor.compress(data)
    return result


def decompress(data: bytes | memoryview, *, num_bytes: int) -> bytes:
    """Undo `compress`, allocating no more than `num_bytes` and a window.

    Args:
        data: what `compress` returned.
        num_bytes: exact size of the content; the caller has checked it against what it can hold.

    Raises:
        LimitExceeded: the frame states another size, none, or too large a window.
        MalformedPayload: not exactly one complete frame.
    """
    if num_bytes == 0:
        if len(data):
            raise MalformedPayload(f"{len(data)} bytes stand for an empty zstd stream")
        return b""
    try:
        frame = zstandard.get_frame_parameters(data)
        if frame.content_size != num_bytes:
            raise LimitExceeded(f"a zstd frame states {frame.content_size} bytes, {num_bytes} are expected")
        if frame.window_size > MAX_WINDOW_BYTES:
            raise LimitExceeded(f"a zstd frame asks for a window of {frame.window_size} bytes")
        # One shot is bounded now: the library allocates the stated size and refuses blocks that exceed it, fall short
        # of it, or are not the end of the data.
        content: bytes = _contexts.decompressor.decompress(data, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise MalformedPayload(f"zstd: {error}") from error
    return content
