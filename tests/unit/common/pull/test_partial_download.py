"""Frames on their way to disk: soon, whole, bounded in memory, durable when a fetch breaks; and the watch on the link."""

import asyncio
import errno
import gc
import os
import re
import shutil
import threading

import blake3
import pytest

from heterorl.common.errors import DiskFull, MalformedPayload, Unreachable
from heterorl.common.pull import fetcher
from heterorl.common.pull.fetcher import BATCH_BYTES, STALL_S, Fetcher, PieceWriter, RunningDigest
from tests.support.clock import ManualClock
from tests.support.cut_source import DATA, FRAME, PAYLOAD, Source
from tests.support.sampler_world import CountingThreads


class Disk:
    """Holds every write back while `is_open` is clear; knows what was made durable."""

    def __init__(self, monkeypatch):
        self.is_open = threading.Event()
        self.is_open.set()
        self.synced = []
        real_write, real_sync = fetcher.write_all, os.fsync

        def write(file, data):
            self.is_open.wait()
            real_write(file, data)

        def sync(descriptor):
            self.synced.append(os.fstat(descriptor).st_size)
            real_sync(descriptor)

        monkeypatch.setattr(fetcher, "write_all", write)
        monkeypatch.setattr(os, "fsync", sync)


@pytest.fixture
def disk(monkeypatch):
    disk = Disk(monkeypatch)
    yield disk
    disk.is_open.set()


async def until(condition):
    """Let other tasks and threads go on until something holds."""
    while not condition():  # noqa: ASYNC110 - of threads too
        await asyncio.sleep(0.001)


def begin(source, tmp_path, clock=None):
    fetcher = Fetcher(api=source, spool=tmp_path, clock=clock or ManualClock(), max_bytes=1 << 40)
    return asyncio.create_task(fetcher.fetch(PAYLOAD))


async def end(task):
    task.cancel()
    await asyncio.wait([task])


async def test_frame_of_a_slow_link_reaches_the_disk_at_once(tmp_path):
    path = tmp_path / "piece"
    writer = PieceWriter(path)
    for number in range(3):
        await writer.put(DATA[:100])
        await until(lambda number=number: path.stat().st_size == 100 * (number + 1))
    await writer.close(durable=False)


async def test_slow_disk_holds_the_link_back_and_memory_is_bounded(tmp_path, disk):
    source, clock = Source(), ManualClock()
    disk.is_open.clear()
    task = begin(source, tmp_path, clock)
    # The first frame is being written, the rest waits for it; after that nothing more is asked for.
    await until(lambda: source.sent >= FRAME + BATCH_BYTES)
    try:
        for _ in range(20):
            clock.advance(STALL_S)
            for _ in range(10):
                await asyncio.sleep(0)
            # The watch on the link woke, looked and sleeps again.
            assert clock._sleepers
        assert source.sent <= 2 * FRAME + BATCH_BYTES
        assert not task.done()
    finally:
        disk.is_open.set()

    assert (await task).read_bytes() == DATA


async def test_link_that_brings_nothing_is_given_up_and_what_came_is_durable(tmp_path, disk):
    source, clock = Source(), ManualClock()
    plain = source.read_payload

    async def three_frames(**wanted):
        async for frame in plain(**wanted):
            yield frame
            clock.advance(STALL_S - 1.0)
            if source.sent == 3 * FRAME:
                await asyncio.Event().wait()

    source.read_payload = three_frames
    task = begin(source, tmp_path, clock)
    path = tmp_path / PAYLOAD.digest
    await until(lambda: path.exists() and path.stat().st_size == 3 * FRAME)
    await until(lambda: len(clock._sleepers) >= 1)
    clock.advance(1.0)
    with pytest.raises(Unreachable, match="no bytes"):
        await task
    assert disk.synced[-1] == 3 * FRAME
    assert source.open_streams == 0


async def test_file_that_arrived_whole_is_not_waited_for(tmp_path, disk):
    await begin(Source(), tmp_path)

    assert disk.synced == []


async def test_disk_without_room_is_refused_before_the_first_byte(tmp_path, monkeypatch):
    (tmp_path / PAYLOAD.digest).write_bytes(DATA[:FRAME])
    full = shutil.disk_usage(tmp_path)._replace(free=len(DATA) - FRAME - 1)
    monkeypatch.setattr(fetcher.shutil, "disk_usage", lambda _: full)
    source = Source()

    with pytest.raises(DiskFull):
        await begin(source, tmp_path)
    assert source.sent == 0


async def test_disk_that_refuses_ends_the_fetch(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSPC, "no more blocks")

    monkeypatch.setattr(fetcher, "write_all", refuse)
    source = Source()
    with pytest.raises(DiskFull, match=re.escape(f"no space left under {tmp_path} (free space")):
        await begin(source, tmp_path)
    assert source.open_streams == 0


async def test_failures_after_the_first_are_not_left_to_the_event_loop(tmp_path, monkeypatch):
    """What nobody asks a future for is printed by asyncio with a traceback, long after it was told by its type."""
    lost = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: lost.append(context["message"]))

    def refuse(*_):
        raise OSError(errno.ENOSPC, "no more blocks")

    writer = PieceWriter(tmp_path / "piece")
    writer._error = OSError(errno.ENOSPC, "an earlier one")
    monkeypatch.setattr(fetcher, "write_all", refuse)
    for _ in range(2):
        with pytest.raises(OSError, match="earlier"):
            await writer.put(bytes(10))
    with pytest.raises(OSError, match="earlier"):
        await writer.close(durable=True)
    del writer
    gc.collect()
    await asyncio.sleep(0)

    assert lost == []


async def test_cancelling_twice_leaves_no_thread_that_writes(tmp_path, disk):
    threads = CountingThreads()
    asyncio.get_running_loop().set_default_executor(threads)
    source = Source()
    disk.is_open.clear()
    task = begin(source, tmp_path)
    await until(lambda: source.sent >= BATCH_BYTES)
    for _ in range(3):
        task.cancel()
        for _ in range(10):
            await asyncio.sleep(0)
    # No thread but the one that still writes has anything left to do.
    await until(lambda: threads.num_busy == 1)
    assert not task.done()
    disk.is_open.set()
    await asyncio.wait([task])
    size = (tmp_path / PAYLOAD.digest).stat().st_size

    assert (await begin(source, tmp_path)).read_bytes() == DATA
    assert 0 < size < len(DATA)


@pytest.mark.parametrize("place", [0, 2 * FRAME - 1])
async def test_damage_in_what_an_earlier_process_left_is_noticed(tmp_path, place):
    left = bytearray(DATA[: 2 * FRAME])
    left[place] ^= 1
    (tmp_path / PAYLOAD.digest).write_bytes(left)

    with pytest.raises(MalformedPayload):
        await begin(Source(), tmp_path)


def test_digest_follows_a_file_from_wherever_it_is(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(DATA[:1000])
    digest = RunningDigest()
    digest.catch_up(path)
    digest.update(DATA[1000:5000])
    path.write_bytes(DATA[:9000])
    digest.catch_up(path)

    assert digest.digest() == blake3.blake3(DATA[:9000]).hexdigest()
