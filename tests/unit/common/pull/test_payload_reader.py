"""Reading payloads: one pass for many readers, and no byte that differs from what was proved."""

import asyncio
import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import blake3
import pytest

from heterorl.common.errors import InvalidRequest
from heterorl.common.pull import payload_reader as served
from heterorl.common.pull.payload_reader import DamagedFile, FileIdentity, PayloadReader
from heterorl.common.types.common import Digest
from heterorl.common.weights.payload import FRAME_BYTES

DATA = random.Random(0).randbytes(5 * FRAME_BYTES + 1234)


@pytest.fixture
def passes(monkeypatch):
    """Counts the passes over whole files."""
    counted, real = [], served._prove

    def prove(descriptor, digest, stopping):
        counted.append(digest)
        return real(descriptor, digest, stopping)

    monkeypatch.setattr(served, "_prove", prove)
    return counted


def stored(tmp_path, data=DATA, name="payload"):
    path = tmp_path / name
    path.write_bytes(data)
    return Digest(blake3.blake3(data).hexdigest()), path


async def content(reader, digest, path, offset=0, stop=None):
    return b"".join([frame async for frame in reader.read(digest, path, offset=offset, stop=stop)])


@pytest.mark.parametrize(
    ("offset", "stop"),
    [(0, None), (7, 1000), (7, 7), (FRAME_BYTES - 1, FRAME_BYTES + 1), (FRAME_BYTES, 3 * FRAME_BYTES),
     (3 * FRAME_BYTES + 5, None), (len(DATA) - 1, len(DATA)), (len(DATA), None), (123, 4 * FRAME_BYTES + 99)],
)  # fmt: skip
async def test_range_is_read_exactly(tmp_path, offset, stop):
    digest, path = stored(tmp_path)
    frames = [frame async for frame in PayloadReader().read(digest, path, offset=offset, stop=stop)]

    assert b"".join(frames) == DATA[offset:stop]
    assert all(0 < len(frame) <= FRAME_BYTES for frame in frames)


@pytest.mark.parametrize(("offset", "stop"), [(8, 7), (0, len(DATA) + 1), (-1, 5)])
async def test_range_outside_the_file_is_refused(tmp_path, offset, stop):
    digest, path = stored(tmp_path)

    with pytest.raises(InvalidRequest, match="not within"):
        await content(PayloadReader(), digest, path, offset, stop)


async def test_file_is_read_as_a_whole_once_for_all_readers(tmp_path, passes):
    digest, path = stored(tmp_path)
    reader = PayloadReader()

    for _ in range(2):
        assert await asyncio.gather(*(content(reader, digest, path, offset=n) for n in range(8))) == [
            DATA[n:] for n in range(8)
        ]
    assert passes == [digest]


@pytest.mark.parametrize("change", ["time", "bytes", "file"])
async def test_file_that_was_touched_is_proved_again(tmp_path, passes, change):
    digest, path = stored(tmp_path)
    reader = PayloadReader()
    await content(reader, digest, path)
    if change == "time":
        os.utime(path, ns=(1, 1))
    elif change == "bytes":
        path.write_bytes(DATA + b"x")
    else:
        other, stat = tmp_path / "other", path.stat()
        other.write_bytes(DATA)
        os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        other.replace(path)

    if change == "bytes":
        with pytest.raises(DamagedFile):
            await content(reader, digest, path)
    else:
        assert await content(reader, digest, path) == DATA
    assert passes == [digest, digest]


@pytest.mark.slow
async def test_damage_at_2000_places_that_no_file_time_shows_is_never_sent(tmp_path, monkeypatch):
    digest, path = stored(tmp_path)
    reader, chooser = PayloadReader(), random.Random(2)
    await content(reader, digest, path)
    proof = reader._proofs[digest]
    monkeypatch.setattr(FileIdentity, "of", lambda _descriptor: proof.identity)

    with path.open("r+b", buffering=0) as file:
        for _ in range(2000):
            reader._proofs[digest] = proof
            place = chooser.randrange(len(DATA))
            os.pwrite(file.fileno(), bytes([DATA[place] ^ (1 << chooser.randrange(8))]), place)
            block = place - place % FRAME_BYTES
            start, sent = chooser.randrange(max(0, block - FRAME_BYTES), place + 1), b""
            problem = ""
            try:
                async for frame in reader.read(digest, path, offset=start):
                    sent += frame
            except DamagedFile as error:
                problem = str(error)
            assert f"from {block} on" in problem
            assert len(sent) <= max(0, block - start)
            assert sent == DATA[start : start + len(sent)]
            assert digest not in reader._proofs
            os.pwrite(file.fileno(), DATA[place : place + 1], place)


async def test_file_cut_while_it_is_read_is_noticed(tmp_path):
    digest, path = stored(tmp_path)
    reader = PayloadReader()
    frames = reader.read(digest, path, offset=0)
    await anext(frames)
    os.truncate(path, 3 * FRAME_BYTES)

    with pytest.raises(DamagedFile):
        async for _ in frames:
            pass
    assert digest not in reader._proofs


async def test_file_deleted_while_it_is_read_is_read_to_its_end(tmp_path):
    digest, path = stored(tmp_path)
    frames = PayloadReader().read(digest, path, offset=0)
    first = await anext(frames)
    path.unlink()

    assert first + b"".join([frame async for frame in frames]) == DATA


async def test_pass_goes_on_when_its_caller_has_gone(tmp_path, passes):
    digest, path = stored(tmp_path)
    reader = PayloadReader()
    with path.open("rb") as file, pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await reader._proof(digest, file)

    assert await content(reader, digest, path) == DATA
    assert passes == [digest]
    await reader.close()


async def test_pass_leaves_the_threads_of_others_free(tmp_path, monkeypatch):
    began, may_end, real = asyncio.Event(), threading.Event(), served._prove
    loop = asyncio.get_running_loop()

    def prove(*args):
        loop.call_soon_threadsafe(began.set)
        assert may_end.wait(60.0)
        return real(*args)

    monkeypatch.setattr(served, "_prove", prove)
    loop.set_default_executor(ThreadPoolExecutor(1))
    reading = asyncio.create_task(content(PayloadReader(), *stored(tmp_path)))
    await began.wait()
    try:
        async with asyncio.timeout(30.0):
            await asyncio.to_thread(lambda: None)
    finally:
        may_end.set()

    assert await reading == DATA


async def test_checksums_kept_are_bounded(tmp_path, passes, monkeypatch):
    monkeypatch.setattr(served, "MAX_BLOCKS", 6)
    monkeypatch.setattr(served, "MAX_PROOFS", 3)
    reader = PayloadReader()
    files = [stored(tmp_path, bytes([n]) * (FRAME_BYTES + 1), str(n)) for n in range(5)]
    for digest, path in files:
        await content(reader, digest, path)
    assert list(reader._proofs) == [digest for digest, _ in files[-3:]]
    # Used last is kept longest.
    await content(reader, *files[2])
    await content(reader, *files[0])
    assert list(reader._proofs) == [files[4][0], files[2][0], files[0][0]]
    large = stored(tmp_path, DATA)
    await content(reader, *large)
    assert list(reader._proofs) == [large[0]]
    assert reader._num_blocks == 6
    # Too large to be kept is served all the same.
    monkeypatch.setattr(served, "MAX_BLOCKS", 1)
    assert await content(PayloadReader(), *large) == DATA
