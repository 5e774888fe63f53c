"""Bombs and half frames: refused with a typed error, in bounded memory."""

import contextlib
import os
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from heterorl.common.errors import CorruptData, LimitExceeded, MalformedPayload
from heterorl.common.weights.sparse_codec import MAX_WINDOW_BYTES, compress, decompress

ROOT = Path(__file__).parents[4]
MAGIC = b"\x28\xb5\x2f\xfd"
BLOCK = 128 << 10


def bomb(num_blocks, *, stated, window_log=20):
    """A frame of run-length blocks, 4 bytes for 128 KiB each (RFC 8878, 3.1.1)."""
    window = bytes([(window_log - 10) << 3])
    # Frame header descriptor: content size of 4 bytes (0x80) or none, window descriptor present.
    head = b"\x80" + window + struct.pack("<I", stated) if stated is not None else b"\x00" + window
    blocks = [struct.pack("<I", BLOCK << 3 | 1 << 1 | (i == num_blocks - 1))[:3] + b"a" for i in range(num_blocks)]
    return MAGIC + head + b"".join(blocks)


@given(st.binary(max_size=2000))
def test_content_survives(data):
    assert decompress(compress(data), num_bytes=len(data)) == data
    assert decompress(memoryview(compress(memoryview(data))), num_bytes=len(data)) == data


def test_nothing_stands_for_nothing():
    assert compress(b"") == b""
    with pytest.raises(MalformedPayload, match="empty"):
        decompress(zstandard.compress(b""), num_bytes=0)


def test_bomb_built_here_is_a_valid_frame():
    assert decompress(bomb(2, stated=2 * BLOCK), num_bytes=2 * BLOCK) == b"a" * 2 * BLOCK


@pytest.mark.parametrize("num_bytes", [0, 1, 99, 101, 2**40])
def test_frame_of_another_stated_size_is_refused(num_bytes):
    with pytest.raises(CorruptData):
        decompress(compress(bytes(100)), num_bytes=num_bytes)


def test_frame_without_a_stated_size_is_refused():
    frame = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(100))

    with pytest.raises(LimitExceeded, match="states"):
        decompress(frame, num_bytes=100)


def test_frame_with_a_large_window_is_refused():
    with pytest.raises(LimitExceeded, match="window"):
        decompress(bomb(1, stated=BLOCK, window_log=24), num_bytes=BLOCK)
    assert len(decompress(bomb(1, stated=BLOCK, window_log=23), num_bytes=BLOCK)) == BLOCK
    assert MAX_WINDOW_BYTES == 1 << 23


@pytest.mark.parametrize("tail", [b"x", zstandard.compress(b"second"), zstandard.compress(b"")])
def test_bytes_after_the_frame_are_refused(tail):
    with pytest.raises(MalformedPayload, match="zstd"):
        decompress(compress(b"first") + tail, num_bytes=5)


def test_every_cut_of_a_frame_is_refused():
    frame = compress(os.urandom(50) + bytes(500))

    for length in range(len(frame)):
        with pytest.raises(MalformedPayload, match="zstd"):
            decompress(frame[:length], num_bytes=550)


def test_skippable_frame_is_no_content():
    # A skippable frame of four bytes reads as a content size of four.
    with pytest.raises(MalformedPayload, match="zstd"):
        decompress(b"\x50\x2a\x4d\x18" + struct.pack("<I", 4) + b"abcd", num_bytes=4)


def test_frame_that_needs_a_dictionary_is_refused():
    dictionary = zstandard.ZstdCompressionDict(
        b"some words of a dictionary " * 40, dict_type=zstandard.DICT_TYPE_RAWCONTENT
    )
    frame = zstandard.ZstdCompressor(dict_data=dictionary).compress(b"some words of a dictionary " * 3)

    with pytest.raises(MalformedPayload, match="zstd"):
        decompress(frame, num_bytes=81)


@pytest.mark.process
@pytest.mark.parametrize("stated", [None, 1000, 16000 * BLOCK], ids=["undeclared", "understated", "declared"])
def test_bomb_is_refused_without_its_memory(stated):
    # 64 KB that unfold to 2 GiB: a process of its own may use 300 MB of addresses beyond what importing takes.
    program = (
        "import resource, sys\n"
        "from heterorl.common.errors import CorruptData\n"
        "from heterorl.common.weights.sparse_codec import decompress\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + (300 << 20),) * 2)\n"
        "try:\n"
        "    decompress(sys.stdin.buffer.read(), num_bytes=1000)\n"
        "except CorruptData:\n"
        "    status = open('/proc/self/status').read()\n"
        "    print('refused', status.split('VmHWM:')[1].split()[0])\n"
    )

    result = subprocess.run(
        [sys.executable, "-c", program], input=bomb(16000, stated=stated), cwd=ROOT, capture_output=True, check=True
    )

    word, peak_kib = result.stdout.split()
    assert word == b"refused"
    assert int(peak_kib) < 200 << 10


def test_threads_do_not_share_contexts():
    contents = [bytes([number]) * 100_000 + os.urandom(1000) for number in range(64)]

    with ThreadPoolExecutor(8) as pool:
        frames = list(pool.map(compress, contents))
        back = list(
            pool.map(lambda pair: decompress(pair[1], num_bytes=len(pair[0])), zip(contents, frames, strict=True))
        )

    assert back == contents


@given(st.binary(max_size=100), st.integers(0, 1000))
def test_any_bytes_are_refused_or_give_the_expected_size(data, num_bytes):
    for candidate in (data, MAGIC + data):
        with contextlib.suppress(CorruptData):
            assert len(decompress(candidate, num_bytes=num_bytes)) == num_bytes
