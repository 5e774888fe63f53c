"""Fuzz targets: the chunk codecs of each width, and the reader of zstandard frames.

Half of the cases damage encoded bytes; half build random streams with headers that nearly fit, to reach the code after
the frames' own checks.
"""

from __future__ import annotations

import random
import struct

import numpy as np
import zstandard

from campaigns.fuzz.mutate import EDGES, mutated
from heterorl.common.errors import CorruptData
from heterorl.common.weights.arena import IntArray
from heterorl.common.weights.codec import Method, apply_chunk, encode_chunk, encode_composed
from heterorl.common.weights.sparse_codec import compress, decompress

DTYPES = {1: np.int8, 2: np.int16, 4: np.int32}


class ChunkTarget:
    """apply_chunk of one width: a typed error leaves the chunk unchanged, anything else applies."""

    def __init__(self, width: int) -> None:
        self._width = width
        generator = np.random.default_rng(width)
        self._chunks: list[IntArray] = []
        self._coded: list[tuple[int, bytes]] = []
        for size in (1, 40, 300, 700):
            values = (generator.standard_normal(size) * 0.02).astype(np.float32).view(np.int32)
            old: IntArray = (values >> (32 - 8 * width)).astype(DTYPES[width])
            self._chunks.append(old)
            for share in (0.02, 0.2, 0.9):
                new = old.copy()
                mask = generator.random(size) < share
                new[mask] += generator.choice([-300, -4, -1, 1, 2, 9], int(mask.sum())).astype(DTYPES[width])
                found = [encode_chunk(old, new)[:2], encode_chunk(None, new)[:2]]
                found.append(encode_composed(new - old, is_whole=False))
                self._coded += [(int(method), data) for method, data in found]

    def case(self, draw: random.Random) -> tuple[int, bytes, int]:
        """A method, its bytes, and the chunk they are applied to."""
        method, data = draw.choice(self._coded)
        chunk = draw.randrange(len(self._chunks))
        if draw.random() < 0.5:
            if draw.random() < 0.1:
                method = draw.choice((*range(8), 255, 2**32 - 1))
            return method, mutated(data, draw, other=draw.choice(self._coded)[1]), chunk
        size = self._chunks[chunk].size
        steps = draw.choice((self._gapulp, self._gapulp, self._dense, self._planes))
        return *steps(draw, size), chunk

    def run(self, case: tuple[int, bytes, int]) -> None:
        method, data, number = case
        chunk = self._chunks[number].copy()
        try:
            apply_chunk(method, memoryview(data), chunk)
        except CorruptData:
            assert np.array_equal(chunk, self._chunks[number]), "a refused chunk changed"
            raise

    def _gapulp(self, draw: random.Random, size: int) -> tuple[int, bytes]:
        return int(Method.GAPULP), self._streams(draw, size)

    def _streams(self, draw: random.Random, size: int) -> bytes:
        count = draw.randint(1, max(1, min(size, 30)))
        gaps = bytes(draw.choice((0, 1, 2, 254, draw.randrange(16))) for _ in range(count))
        if draw.random() < 0.3:
            at = draw.randrange(count)
            gaps = gaps[:at] + b"\xff" * draw.randint(1, 3) + gaps[at:]
        codes = draw.randbytes((count + 3) // 4) if draw.random() < 0.5 else bytes((count + 3) // 4)
        if count % 4 and draw.random() < 0.8:
            codes = codes[:-1] + bytes([codes[-1] & ((1 << 2 * (count % 4)) - 1)])
        signs = draw.randbytes((count + 7) // 8)
        if count % 8 and draw.random() < 0.8:
            signs = signs[:-1] + bytes([signs[-1] & (0xFF00 >> count % 8) & 0xFF])
        threes = sum((byte >> shift) & 3 == 3 for byte in codes for shift in (0, 2, 4, 6))
        escapes = bytes(draw.choice((0, 1, 124, 125, 254, 255)) for _ in range(self._near(draw, threes)))
        wide = draw.randbytes(self._near(draw, escapes.count(255)) * self._width)
        if draw.random() < 0.3:
            wide = b"\xff" * len(wide)
        frames = [compress(part) for part in (gaps, codes, escapes, wide)]
        numbers = [count, len(gaps), len(escapes), len(wide) // self._width, *(len(frame) for frame in frames)]
        if draw.random() < 0.2:
            numbers[draw.randrange(8)] = draw.choice(EDGES)
        return struct.pack("<8I", *numbers) + frames[0] + signs + b"".join(frames[1:])

    def _dense(self, draw: random.Random, size: int) -> tuple[int, bytes]:
        folded = bytearray(self._near(draw, size))
        for _ in range(draw.randrange(8)):
            if folded:
                folded[draw.randrange(len(folded))] = draw.choice((1, 2, 254, 255, 255))
        count = self._near(draw, folded.count(255))
        wide = draw.choice((b"\xff", b"\0", b"\1")) * (count * self._width)
        frames = [compress(bytes(folded)), compress(wide)]
        return int(Method.DENSE8), struct.pack("<3I", count, *(len(frame) for frame in frames)) + b"".join(frames)

    def _planes(self, draw: random.Random, size: int) -> tuple[int, bytes]:
        data = b""
        for _ in range(self._near(draw, self._width)):
            plane = bytes(self._near(draw, size))
            part = compress(plane) if draw.random() < 0.5 else plane
            data += struct.pack("<I", self._near(draw, len(part))) + part
        return int(Method.PLANES), data

    @staticmethod
    def _near(draw: random.Random, value: int) -> int:
        return value if draw.random() < 0.85 else max(0, value + draw.choice((-1, 1, 2)))


class ZstdTarget:
    """decompress: exactly the stated bytes, or a typed error."""

    def __init__(self) -> None:
        draw = random.Random(0)
        contents = [b"", b"a", bytes(300), draw.randbytes(300), bytes(100) + draw.randbytes(100) + bytes(5000)]
        self._frames = [(compress(content), len(content)) for content in contents]
        self._frames += [
            (zstandard.ZstdCompressor(level=3, write_checksum=True).compress(contents[4]), len(contents[4])),
            (zstandard.ZstdCompressor(write_content_size=False).compress(contents[4]), len(contents[4])),
            (zstandard.ZstdCompressor().compress(bytes(1 << 24)), 5),
        ]

    def case(self, draw: random.Random) -> tuple[bytes, int]:
        """A frame and its expected size."""
        frame, num_bytes = draw.choice(self._frames)
        if draw.random() < 0.3:
            num_bytes = draw.choice((0, 1, num_bytes + 1, 300, 5200))
        return mutated(frame, draw, other=draw.choice(self._frames)[0]), num_bytes

    def run(self, case: tuple[bytes, int]) -> None:
        content = decompress(case[0], num_bytes=case[1])
        assert len(content) == case[1], "another size than expected"
