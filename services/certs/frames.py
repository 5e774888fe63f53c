"""Messages between a joining node and the authority's desk, over TLS 1.3.

    frame       4 bytes length, big-endian, at most MAX_FRAME; then that many bytes
    desk        1 frame: the authority's certificate, DER
    node        2 frames: number and secret of the token (40 bytes); signing request, DER
    desk        1 frame: a byte of 0 and the certificate, DER; or a byte of `Refused` and a sentence, UTF-8

The desk speaks first, so that the node knows whom it talks to before it says a word.
"""

from __future__ import annotations

import asyncio
import struct

MAX_FRAME = 16 << 10


class BrokenFrame(Exception):
    """The other end closed early, or announced more than a frame may hold."""


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """One frame; the caller bounds the time.

    Raises:
        BrokenFrame: it is incomplete or too long.
    """
    try:
        (length,) = struct.unpack(">I", await reader.readexactly(4))
        if length > MAX_FRAME:
            raise BrokenFrame(f"a frame of {length} bytes")
        return await reader.readexactly(length)
    except asyncio.IncompleteReadError as error:
        raise BrokenFrame("the connection ended") from error


def frame(data: bytes) -> bytes:
    """The bytes of a frame."""
    assert len(data) <= MAX_FRAME
    return struct.pack(">I", len(data)) + data
