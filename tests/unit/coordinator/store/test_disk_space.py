"""A full disk: what needs no room goes on, room is made, the process says what is wrong, and it heals by itself."""

import asyncio
import contextlib
import logging
import shutil
import sqlite3
import subprocess
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from heterorl.cli.live.run_tables import status_tables
from heterorl.common.errors import CorruptStore, DiskFull, StoreFull
from heterorl.common.wire.common_messages import bytes_digest
from heterorl.coordinator import run_metrics
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.coordinator.core import Coordinator
from heterorl.coordinator.groups import ledger
from heterorl.coordinator.store import disk_space
from heterorl.coordinator.store.background import PAUSE_S, RetryingLoop
from heterorl.coordinator.store.database import get_meta, set_meta
from heterorl.coordinator.store.disk_space import HEALED_S, LARGEST_SHARE, DiskSpace
from tests.support.clock import ManualClock
from tests.support.run import Run
from tests.support.stores import open_database

pytestmark = [pytest.mark.process, pytest.mark.sqlite]

MARK = (8 << 20) // LARGEST_SHARE
"""Bytes of the low-water mark of the disk of these tests."""


@pytest.fixture
def disk(tmp_path):
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(path)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {mounted.stderr.decode().strip()}")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def fill(disk):
    """Take all the room there is."""
    with contextlib.suppress(OSError), (disk / "foreign").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    assert shutil.disk_usage(disk).free == 0


def leave(disk, num_bytes):
    """Take all the room there is but so many bytes."""
    (disk / "foreign").write_bytes(bytes(shutil.disk_usage(disk).free - num_bytes))


def config(disk, **changes):
    return CoordinatorConfig(data_dir=disk / "data", groups_per_version=1000, **changes)


async def begun(disk, tmp_path, clock=None, **changes):
    core = await Coordinator.open(config(disk, **changes), clock or ManualClock())
    run = Run(core, tmp_path)
    await run.begin()
    await run.publish()
    await run.register()
    return core, run


async def is_refused(core, run, assignments):
    """Push groups until one finds no room."""
    for work in assignments:
        try:
            await core.push_groups([run.group(work, prompt_token_ids=np.full(20_000, 3, np.int32))])
        except StoreFull:
            return True
    return False


async def test_read_that_shares_a_commit_with_a_write_without_room_is_answered(disk):
    full = []
    database = await open_database(disk / "store.sqlite", on_full=lambda: full.append(1))
    await database.run(lambda connection: set_meta(connection, "key", "kept"))
    fill(disk)
    go_on = threading.Event()
    first = database.submit(lambda _: go_on.wait())
    together = [
        database.submit(lambda connection: get_meta(connection, "key")),
        database.submit(lambda connection: set_meta(connection, "large", "x" * (16 << 20))),
        database.submit(lambda connection: get_meta(connection, "key")),
        database.submit(lambda connection: set_meta(connection, "larger", "x" * (17 << 20))),
    ]
    go_on.set()
    await first
    answers = await asyncio.gather(*together, return_exceptions=True)

    assert answers[0] == answers[2] == "kept"
    assert isinstance(answers[1], StoreFull)
    assert isinstance(answers[3], StoreFull)
    # Each caller raises its own.
    assert answers[1] is not answers[3]
    assert full
    assert not database.on_fatal.done()
    await database.close()


async def test_callers_of_a_store_that_failed_have_errors_of_their_own(tmp_path):
    database = await open_database(tmp_path / "store.sqlite")
    go_on = threading.Event()

    def broken(_connection):
        go_on.wait()
        raise sqlite3.OperationalError("disk I/O error")

    waiting = [database.submit(broken), *(database.submit(lambda _: 1) for _ in range(3))]
    go_on.set()
    errors = await asyncio.gather(*waiting, return_exceptions=True)

    assert all(isinstance(error, CorruptStore) for error in errors)
    assert len({id(error) for error in errors}) == 4
    await database.close()


async def test_full_disk_is_said_everywhere_and_the_run_goes_on_when_there_is_room(disk, tmp_path, caplog):
    clock = ManualClock()
    core, run = await begun(disk, tmp_path, clock)
    assert (await core.get_status()).store_problem == ""
    work = list(await run.lease(200))
    fill(disk)
    assert await is_refused(core, run, work[:100])
    await asyncio.sleep(0)

    status = await core.get_status()
    assert str(disk / "data") in status.store_problem
    assert "free space there" in status.store_problem
    run_table, *_ = status_tables(status)
    assert "DISK FULL" in str(list(run_table.columns[0].cells))
    await run_metrics.observe_run(core)
    assert run_metrics.metrics.DISK_REFUSES._value.get() == 1
    said = [record for record in caplog.records if record.levelno == logging.ERROR and "is full" in record.message]
    assert len(said) == 1

    (disk / "foreign").unlink()
    core.disk.look()
    assert core.disk.is_full
    clock.advance(HEALED_S)
    core.disk.look()
    assert (await core.get_status()).store_problem == ""
    assert not await is_refused(core, run, work[100:])
    counts = await core.database.run(ledger.counts)
    assert counts == await core.database.run(ledger.recount)
    await core.close()


async def test_groups_are_refused_at_the_mark_while_versions_are_published_and_what_may_go_is_deleted(disk, tmp_path):
    clock = ManualClock()
    bounds = {"keep_versions": 32, "max_staleness_versions": 8, "pull_lease_s": 1.0}
    core, run = await begun(disk, tmp_path, clock, **bounds)
    # Fewer to give up than are worth it where there is room.
    for _ in range(10):
        await run.publish(snapshot=True)
    collector = asyncio.create_task(core.collector.run())
    await core.collector.settle()
    collector.cancel()
    (work,) = await run.lease(1)
    group = run.group(work)
    leave(disk, MARK * 3 // 4)
    assert core.disk.look(), "room is to be made"
    assert not core.disk.look(), "once in a while"

    with pytest.raises(StoreFull, match="min_free_bytes") as refusal:
        await core.push_groups([group])
    assert refusal.value.retry_after_s > 0
    assert "is full" in (await core.get_status()).store_problem
    await run.publish()
    clock.advance(1000.0)
    num_payloads = len(core.blobs.stored())
    await core.collector.work()
    assert len(core.blobs.stored()) < num_payloads

    (disk / "foreign").unlink()
    core.disk.look()
    (outcome,) = await core.push_groups([group])
    assert outcome.reason is None
    await core.close()


async def test_payload_that_would_take_the_last_room_is_refused_before_its_first_byte(disk, tmp_path):
    core, run = await begun(disk, tmp_path)
    leave(disk, MARK)
    data = bytes(MARK)
    with pytest.raises(StoreFull, match=f"a payload needs {MARK}"):
        await run.upload(data, bytes_digest(data))
    assert await core.query_upload(digest=bytes_digest(data)) == 0
    assert core.disk.is_full
    assert core.disk.look(), "room is to be made"
    # A small one, and a group, find theirs.
    await run.publish()
    await core.push_groups([run.group(work) for work in await run.lease(1)])
    await core.close()


def test_mark_is_small_on_a_small_disk_and_none_is_asked_for_by_0(disk):
    room = DiskSpace(disk, min_free_bytes=1 << 30, clock=ManualClock())
    assert not room.look()
    leave(disk, MARK // 2)
    assert room.look()
    other = DiskSpace(disk, min_free_bytes=0, clock=ManualClock())
    assert not other.look()
    other.check()
    other.check_payload(1 << 30)


async def test_start_on_a_full_disk_reads_the_run(disk, tmp_path):
    core, _ = await begun(disk, tmp_path)
    await core.close()
    fill(disk)

    again = await Coordinator.open(config(disk), ManualClock())

    assert (await again.get_status()).head_version == 0
    assert [frame async for frame in _frames(again)]
    await again.close()


async def _frames(core):
    (payload,) = (await core.plan_pull(have_version=-1, have_root="", want_version=0)).payloads
    async for frame in core.read_payload(digest=payload.digest, offset=0):
        yield frame


async def test_first_start_on_a_full_disk_is_the_operators(disk):
    fill(disk)

    with pytest.raises(DiskFull, match="no space left under"):
        await Coordinator.open(config(disk), ManualClock())


@pytest.mark.parametrize("error", [StoreFull("full"), OSError("no"), ValueError("a damaged row")])
async def test_loop_survives_what_fails_a_turn_and_says_it_once(error, caplog):
    steady = RetryingLoop("garbage_collector", ManualClock())

    async def fails():
        raise error

    async def works():
        return

    assert [await steady.attempt(fails) for _ in range(3)] == [False] * 3
    assert await steady.attempt(works)
    assert len([record for record in caplog.records if "failed and is tried again" in record.message]) == 1


async def test_loop_that_failed_is_tried_again_after_a_pause():
    clock = ManualClock()
    steady, never = RetryingLoop("garbage_collector", clock), asyncio.Event()

    async def fails():
        raise StoreFull("full")

    await steady.attempt(fails)
    waiting = asyncio.create_task(steady.pause(never))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not waiting.done()
    clock.advance(PAUSE_S)
    await waiting


@pytest.mark.parametrize("loop", ["collector", "merger"])
async def test_background_loop_outlives_a_damaged_row(disk, tmp_path, loop):
    core, _ = await begun(disk, tmp_path)
    await core.database.run(lambda c: c.execute("UPDATE payloads SET kind = 'nonsense'"))
    task = asyncio.create_task(getattr(core, loop).run())
    getattr(core, loop).poke()
    for _ in range(20):
        await core.database.run(lambda _: None)

    assert not task.done()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await core.close()


def test_status_says_nothing_of_a_disk_with_room(disk):
    assert shutil.disk_usage(disk).free > 0
    assert DiskSpace(disk, min_free_bytes=0, clock=ManualClock()).problem == ""


def test_what_the_mark_lacks_is_to_be_freed_and_all_after_a_refusal_above_it(tmp_path, monkeypatch):
    free = 4000
    monkeypatch.setattr(disk_space.shutil, "disk_usage", lambda _: SimpleNamespace(total=1 << 40, free=free))
    room = DiskSpace(tmp_path, min_free_bytes=1000, clock=ManualClock())
    room.look()
    assert room.missing_bytes == 0
    room.note_refusal()
    assert room.missing_bytes == sys.maxsize
    free = 700
    room.look()
    # A quarter of the mark more, so that the next group is not refused again.
    assert room.missing_bytes == 550
    free = 1300
    assert room.missing_bytes == 0
