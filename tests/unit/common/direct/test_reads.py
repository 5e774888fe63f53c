"""A store that brings some bytes all the time, and too few, is slow."""

import asyncio

import pytest

from heterorl.common.direct import reads


async def _drops():
    while True:
        await asyncio.sleep(0)
        yield b"x"


async def test_drops_are_too_little_however_regular_they_are(monkeypatch):
    monkeypatch.setattr(reads, "BRISK_S", 0.05)

    with pytest.raises(reads.Slow, match="less than 1048576 bytes in 0.05 s"):
        async for _ in reads._brisk(_drops()):
            pass
