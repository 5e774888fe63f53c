"""A full disk: what needs no room goes on, room is made, the process says what is wrong, and it heals by itself."""

import asyncio
import contextlib
import logging
import shutil
import sqlite3
import subprocess
import threading

import numpy as np
import pytest

from heterorl.cli.live.status import status_tables
from heterorl.common.errors import CorruptStore, DiskFull, StoreFull
from heterorl.coordinator import observe
from heterorl.coordinator import status as reports
from heterorl.coordinator.config import CoordinatorConfig
from heterorl.coordinator.core import Coordinator
from heterorl.coordinator.groups import ledger
from heterorl.coordinator.store.database import Database, get_meta, set_meta
from heterorl.coordinator.store.room import HEALED_S, Room
from heterorl.coordinator.store.steady import PAUSE_S, Steady
from tests.support.clock import ManualClock
from tests.support.run import Run

pytestmark = [pytest.mark.process, pytest.mark.sqlite]

BALLAST_BYTES = 64 << 10


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


def config(disk, **changes):
    return CoordinatorConfig(data_dir=disk / "data", ballast_bytes=BALLAST_BYTES, groups_per_version=1000, **changes)


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
    database = await Database.open(disk / "store.sqlite", on_full=lambda: full.append(1))
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
    database = await Database.open(tmp_path / "store.sqlite")
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
    run_table, _ = status_tables(status, width=200)
    assert "DISK FULL" in str(list(run_table.columns[0].cells))
    await observe.observe_run(core)
    assert observe.metrics.DISK_REFUSES._value.get() == 1
    said = [record for record in caplog.records if record.levelno == logging.ERROR and "is full" in record.message]
    assert len(said) == 1

    (disk / "foreign").unlink()
    core.room.look()
    assert core.room.is_full
    clock.advance(HEALED_S)
    core.room.look()
    assert (await core.get_status()).store_problem == ""
    assert not await is_refused(core, run, work[100:])
    counts = await core.database.run(ledger.counts)
    assert counts == await core.database.run(ledger.recount)
    await core.close()


async def test_ballast_makes_the_room_that_deletion_needs_and_is_laid_again(disk, tmp_path):
    clock = ManualClock()
    core, run = await begun(disk, tmp_path, clock, keep_versions=64, pull_lease_s=1.0)
    core.room.lay()
    ballast = disk / "data" / "ballast"
    assert ballast.stat().st_size == BALLAST_BYTES
    for _ in range(80):
        await run.publish(snapshot=True)
    keeper = asyncio.create_task(core.keeper.run())
    await core.keeper.settle()
    keeper.cancel()
    work = await run.lease(100)
    fill(disk)
    assert await is_refused(core, run, work)
    clock.advance(1000.0)
    num_payloads = len(core.blobs.stored())

    await core.relief.make_room()

    assert len(core.blobs.stored()) < num_payloads
    assert ballast.stat().st_size == BALLAST_BYTES
    await core.close()


async def test_nothing_new_is_taken_in_while_room_is_made(disk, tmp_path):
    core, run = await begun(disk, tmp_path)
    (work,) = await run.lease(1)
    group = run.group(work)

    async with core.room.freed():
        with pytest.raises(StoreFull) as refusal:
            await core.push_groups([group])
        with pytest.raises(StoreFull):
            await run.publish()

    assert refusal.value.retry_after_s > 0
    (outcome,) = await core.push_groups([group])
    assert outcome.reason is None
    await core.close()


async def test_ballast_is_small_on_a_small_disk_and_not_laid_without_plenty_of_room(disk):
    room = Room(disk, ballast_bytes=1 << 30, clock=ManualClock())
    fill(disk)
    room.lay()
    assert not (disk / "ballast").exists()
    (disk / "foreign").unlink()

    room.lay()

    assert (disk / "ballast").stat().st_size == (8 << 20) // 64
    Room(disk, ballast_bytes=0, clock=ManualClock()).lay()


async def test_start_on_a_full_disk_gives_the_ballast_up_and_serves(disk, tmp_path):
    core, _ = await begun(disk, tmp_path)
    core.room.lay()
    await core.close()
    fill(disk)

    again = await Coordinator.open(config(disk), ManualClock())

    assert not (disk / "data" / "ballast").exists()
    assert (await again.get_status()).head_version == 0
    await again.close()


async def test_start_on_a_full_disk_without_ballast_reads_the_run(disk, tmp_path):
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
    steady = Steady("keeper", ManualClock())

    async def fails():
        raise error

    async def works():
        return

    assert [await steady.attempt(fails) for _ in range(3)] == [False] * 3
    assert await steady.attempt(works)
    assert len([record for record in caplog.records if "failed and is tried again" in record.message]) == 1


async def test_loop_that_failed_is_tried_again_after_a_pause():
    clock = ManualClock()
    steady, never = Steady("keeper", clock), asyncio.Event()

    async def fails():
        raise StoreFull("full")

    await steady.attempt(fails)
    waiting = asyncio.create_task(steady.pause(never))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not waiting.done()
    clock.advance(PAUSE_S)
    await waiting


@pytest.mark.parametrize("loop", ["keeper", "composer"])
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
    assert Room(disk, ballast_bytes=0, clock=ManualClock()).problem == ""
    assert "store_problem" in reports.run_status.__kwdefaults__
