"""Copies of a bucket's payloads on a disk that has no room for all of them: what is bounded, what goes, what is given."""

import asyncio
import contextlib
import os
import sqlite3
import threading

import pytest

from heterorl.common.errors import Busy, CorruptStore
from heterorl.common.process.clock import SystemClock
from heterorl.common.pull.puller import Puller
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.coordinator.core import Coordinator
from heterorl.coordinator.offline.history import STORE_FILE
from heterorl.coordinator.payloads import garbage_collector
from heterorl.coordinator.payloads.payload_index import DamagedPayload
from heterorl.coordinator.store import blobs, bucket_storage
from heterorl.coordinator.store import bucket_cache as bucket_copies
from heterorl.coordinator.store.bucket_storage import Objects
from heterorl.coordinator.store.payload_files import Repair
from tests.support.bucketed import payloads_of
from tests.support.clock import CountingBell, ManualClock
from tests.support.limits import WAIT_S
from tests.support.narrow import Narrow
from tests.support.relayed import LargeRun

MIB = 1 << 20


@pytest.fixture
def opened(bucket, prefix, tmp_path):
    @contextlib.asynccontextmanager
    async def open_(name="data", *, clock=None, endpoint=None, url="", cache_bytes=64 * MIB):
        changes = {"endpoint": endpoint} if endpoint else {}
        payloads = bucket.config(tmp_path, prefix=prefix, cache_bytes=cache_bytes, **changes)
        config = CoordinatorConfig(
            data_dir=tmp_path / name, payloads=payloads, store={"url": url}, max_staleness_versions=1, keep_versions=1
        )
        core = await Coordinator.open(config, clock or SystemClock())
        try:
            yield core
        finally:
            await core.close()

    return open_


async def begun(core, tmp_path, *, versions):
    run = LargeRun(core, tmp_path)
    await run.begin()
    for _ in range(versions):
        await run.publish(snapshot=True)
        await core.collector.work()
    return run


def files_of(directory, *folders):
    return [path for folder in folders for path in (directory / folder).rglob("*") if path.is_file()]


def bytes_of(directory, *folders):
    total = 0
    for path in files_of(directory, *folders):
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


async def read(core, digest):
    return sum([len(frame) async for frame in core.read_payload(digest=digest, offset=0)])


def is_counted_right(core, directory):
    return core.blobs._used == bytes_of(directory, "blobs", "partial", "copies")


async def test_readers_that_came_and_went_leave_no_more_on_the_disk_than_its_bound(bucket, opened, tmp_path):
    line = Narrow(f"127.0.0.1:{bucket.port}")
    async with line.open(), opened(cache_bytes=16 * MIB, endpoint=f"http://127.0.0.1:{line.port}") as core:
        await begun(core, tmp_path, versions=10)
        copies, data = core.context.cache, tmp_path / "data"
        line.down_bytes_per_s = 4e6
        peak, readers = 0, [asyncio.ensure_future(read(core, d)) for d in sorted(core.context.storage.digests())]
        looks = 0
        while looks < 40 or not files_of(data, "copies"):
            # Whoever waits lets the others on.
            await asyncio.wait(readers, timeout=0.02)
            peak = max(peak, bytes_of(data, "blobs", "partial", "copies"))
            looks += 1
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
        left = [fetch.task for fetch in copies._fetches.values()]
        if left:
            await asyncio.wait(left)
        while core.blobs._locks._locks:  # noqa: ASYNC110 - says nothing
            # What was being deleted for one who has gone.
            await asyncio.sleep(0)
        assert peak <= 16 * MIB
        assert files_of(data, "copies"), "what had arrived is kept for the next one"
        assert is_counted_right(core, data)
        assert not copies._in_use
        assert not copies._promised

        # And it is gone on with, or makes room.
        line.down_bytes_per_s = 0.0
        while line.num_open:  # noqa: ASYNC110 - says nothing
            # What the bucket still sends to those who have gone.
            await asyncio.sleep(0)
        begun_with = {path.name: path.stat().st_size for path in files_of(data, "copies")}
        before = line.down
        digest, have = max(begun_with.items(), key=lambda item: item[1])
        size = await read(core, digest)
        assert line.down - before < size - have + MIB // 2
        for digest in sorted(core.context.storage.digests()):
            assert await read(core, digest) > 0
        assert is_counted_right(core, data)
        assert bytes_of(data, "blobs", "copies") <= 16 * MIB


async def test_reader_for_whom_there_is_no_room_waits_for_another_or_comes_again(opened, tmp_path, monkeypatch):
    async with opened(cache_bytes=7 * MIB) as core:
        await begun(core, tmp_path, versions=2)
        first, second = sorted(core.context.storage.digests())
        copies, files = core.context.cache, core.blobs
        files.freed = bell = CountingBell()
        async with copies.at_hand([first]):
            before = bell.num_tickets
            waiting = asyncio.ensure_future(read(core, second))
            await bell.until_asked(before)
            assert not waiting.done()
            assert second not in copies._promised
            assert files.has(first)
            assert not files.has(second)
        assert await waiting > 0

        async with copies.at_hand([first]):
            with monkeypatch.context() as patch:
                patch.setattr(bucket_copies, "WAIT_S", 0.2)
                with pytest.raises(Busy, match="cache_bytes"):
                    await read(core, second)
            # What is there is read by as many as like.
            assert await read(core, first) > 0
        # One reader alone may have more than there is room for, as a proof of a way needs all of it.
        async with copies.at_hand([first, second]):
            assert files.has(first)
            assert files.has(second)
        await copies.make_room(MIB)
        assert is_counted_right(core, tmp_path / "data")


async def test_copy_of_an_upload_makes_room_although_nobody_looked_at_it(opened, tmp_path):
    async with opened(cache_bytes=16 * MIB) as core:
        run = LargeRun(core, tmp_path)
        await run.begin()
        for _ in range(6):
            # The keeper is busy elsewhere.
            await run.publish(snapshot=True)
        assert len(files_of(tmp_path / "data", "blobs")) == 2
        assert is_counted_right(core, tmp_path / "data")


async def test_full_disk_keeps_only_the_copies_that_are_read(opened, tmp_path):
    async with opened() as core:
        await begun(core, tmp_path, versions=3)
        read_now, *others = sorted(core.context.storage.digests())
        core.disk.note_refusal()
        async with core.context.cache.at_hand([read_now]):
            await core.collector.work()
            assert [path.name for path in files_of(tmp_path / "data", "blobs")] == [read_now]
        assert await read(core, others[0]) > 0
        assert is_counted_right(core, tmp_path / "data")


async def test_disk_below_its_mark_keeps_the_copies_that_it_has_room_for(opened, tmp_path):
    async with opened() as core:
        await begun(core, tmp_path, versions=3)
        core.collector.missing_bytes = lambda: 1
        await core.collector.work()
        assert len(files_of(tmp_path / "data", "blobs")) == 2
        assert is_counted_right(core, tmp_path / "data")


async def test_copy_that_is_looked_at_when_room_is_wanted_goes_the_next_time(opened, tmp_path):
    async with opened() as core:
        await begun(core, tmp_path, versions=1)
        (digest,) = core.context.storage.digests()
        async with core.blobs._locks[digest]:
            await core.context.cache.make_room(1)
        assert core.blobs.has(digest)
        await core.context.cache.make_room(1)
        assert not core.blobs.has(digest)


async def test_copy_that_is_read_or_nobody_waits_for_while_it_is_deleted(opened, tmp_path, monkeypatch):
    async with opened() as core:
        await begun(core, tmp_path, versions=2)
        begins, may_end, remove = asyncio.Event(), threading.Event(), blobs.remove_file
        loop = asyncio.get_running_loop()

        def slow(path):
            loop.call_soon_threadsafe(begins.set)
            assert may_end.wait(WAIT_S)
            remove(path)

        monkeypatch.setattr(blobs, "remove_file", slow)
        making = asyncio.ensure_future(core.context.cache.make_room(1))
        await begins.wait()
        (going,) = core.context.cache._going
        reading = asyncio.ensure_future(read(core, going))
        while core.context.cache._num_readers == 0:  # noqa: ASYNC110 - says nothing
            await asyncio.sleep(0)
        making.cancel()
        await asyncio.wait([making])
        may_end.set()
        assert await reading > 0
        assert len(files_of(tmp_path / "data", "blobs")) == 2
        assert is_counted_right(core, tmp_path / "data")
        await core.context.cache.make_room(1)
        assert is_counted_right(core, tmp_path / "data")


async def test_backup_of_more_than_there_is_room_for_goes_payload_by_payload(opened, tmp_path):
    async with opened(cache_bytes=16 * MIB) as core:
        run = await begun(core, tmp_path, versions=5)
        digests = core.context.storage.digests()
        found, link, peak = core.backups._take, [], []

        def take(digest, target):
            peak.append(bytes_of(tmp_path / "data", "blobs", "copies"))
            link.append(digest)
            return found(digest, target)

        core.backups._take = take
        backup = await core.backups.make("one")
        assert backup.num_payloads == len(digests) == len(link)
        assert max(peak) <= 16 * MIB
        assert {path.name for path in files_of(tmp_path / "data" / "backups" / "one", "blobs")} == set(digests)
        assert run.head == backup.head_version


async def test_backup_outlasts_a_moment_without_the_bucket(bucket, opened, tmp_path):
    line = Narrow(f"127.0.0.1:{bucket.port}")

    class Clock(SystemClock):
        async def sleep(self, seconds):
            line.mend()

    async with line.open():
        endpoint = f"http://127.0.0.1:{line.port}"
        async with opened(endpoint=endpoint, clock=Clock(), cache_bytes=16 * MIB) as core:
            await begun(core, tmp_path, versions=4)
            line.cut()
            assert (await core.backups.make("one")).num_payloads == 4


async def test_backup_that_lacks_one_payload_fetches_no_other_one_to_say_so(
    bucket, prefix, opened, tmp_path, monkeypatch
):
    async with opened() as core:
        await begun(core, tmp_path, versions=4)
        named = "SELECT DISTINCT digest FROM payloads"
        lost, *others = await core.database.run(lambda connection: [row[0] for row in connection.execute(named)])
        await core.context.cache.make_room(1 << 40)
        bucket.remove(prefix, f"blobs/{lost[:2]}/{lost}")
        fetches, fetch = [], Objects.fetch

        async def noted(self, digest, path):
            fetches.append(digest)
            await fetch(self, digest, path)

        monkeypatch.setattr(Objects, "fetch", noted)
        with pytest.raises(Busy, match=lost[:12]):
            await core.backups.make("one")
        assert set(fetches) == {lost}
        assert (await core.backups.make("one")).num_payloads == len(others) == 3


async def test_start_puts_nothing_and_what_another_coordinator_retired_goes_after_two_versions(
    bucket, prefix, opened, url, tmp_path, monkeypatch
):
    clock = ManualClock()
    async with opened("a", clock=clock, url=url) as core:
        run = await begun(core, tmp_path, versions=8)
    before = {path.name for path in files_of(tmp_path / "a", "blobs")}
    async with opened("b", clock=clock, url=url) as core:
        await core.collector.work()
        clock.advance(20_000)
        assert await core.collector.collect(missing_bytes=1) > 0
    kept = {name.rpartition("/")[2] for name in payloads_of(bucket.names(prefix))}
    assert kept < before
    puts, put = [], Objects.put

    async def noted(self, digest, path):
        puts.append(digest)
        await put(self, digest, path)

    monkeypatch.setattr(Objects, "put", noted)
    async with opened("a", clock=clock, url=url) as core:
        assert is_counted_right(core, tmp_path / "a")
        await core.collector.collect()
        assert puts == []
        puller = Puller(api=core, spool=tmp_path / "spool", layout=run.layout, clock=SystemClock())
        assert (await puller.pull(held=None, want_version=-1)).manifest.state_root == run.roots[7]
        run.api = core
        for _ in range(2):
            await run.publish(snapshot=True)
        await core.collector.collect()
        assert not (before - kept) & {path.name for path in files_of(tmp_path / "a", "blobs")}
        assert is_counted_right(core, tmp_path / "a")


def damage(path):
    """Change late bytes of a file, as a disk does: nothing else tells."""
    times = path.stat()
    with path.open("r+b") as file:
        file.seek(-8, 2)
        last = file.read()
        file.seek(-8, 2)
        file.write(bytes(byte ^ 1 for byte in last))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


async def test_reader_of_the_old_file_of_a_copy_that_another_one_had_healed_strikes_nothing_out(
    bucket, prefix, opened, tmp_path
):
    async with opened() as core:
        await begun(core, tmp_path, versions=1)
        (digest,) = core.context.storage.digests()
        slow = core.read_payload(digest=digest, offset=0)
        await anext(slow)
        damage(core.blobs.path(digest))
        with pytest.raises(Busy, match="fetched again"):
            await read(core, digest)
        size = await read(core, digest)
        with pytest.raises(Busy, match="fetched again"):
            async for _ in slow:
                pass
        assert await read(core, digest) == size
        assert f"blobs/{digest[:2]}/{digest}" in bucket.names(prefix)
        plan = await core.plan_pull(have_version=-1, have_root="", want_version=-1)
        assert [payload.digest for payload in plan.payloads] == [digest]


async def test_copy_is_replaced_or_right_or_lost(bucket, prefix, opened, tmp_path, monkeypatch):
    async with opened() as core:
        await begun(core, tmp_path, versions=1)
        (digest,) = core.context.storage.digests()
        copies, path = core.context.cache, core.blobs.path(digest)
        assert await copies.heal(digest) is Repair.RIGHT
        damage(path)
        assert await copies.heal(digest) is Repair.CURED
        assert await read(core, digest) > 0
        at_hand = copies.at_hand

        @contextlib.asynccontextmanager
        async def raced(digests):
            async with at_hand(digests):
                # Another one found the old bytes too, and replaces what was just fetched.
                await core.blobs.drop(digest)
                yield

        damage(path)
        with monkeypatch.context() as patch:
            patch.setattr(copies, "at_hand", raced)
            assert await copies.heal(digest) is Repair.CURED
        assert await read(core, digest) > 0
        bucket.remove(prefix, f"blobs/{digest[:2]}/{digest}")
        path.unlink()
        assert await copies.heal(digest) is Repair.LOST
        assert await copies.heal("f" * 64) is Repair.LOST


async def test_bucket_that_lost_its_mark_too_costs_the_store_no_payload(bucket, prefix, opened, tmp_path):
    async with opened() as core:
        await begun(core, tmp_path, versions=1)
        (digest,) = core.context.storage.digests()
        await core.context.cache.make_room(1 << 40)
        # Whatever is asked for is missing, as in a bucket of the same name elsewhere.
        bucket.remove(prefix, f"blobs/{digest[:2]}/{digest}")
        bucket.remove(prefix, "run")
        with pytest.raises(CorruptStore, match="its mark is gone"):
            await read(core, digest)
        # The process ends, and its next start waits for the bucket.
        await core.on_fatal
    with contextlib.closing(sqlite3.connect(tmp_path / "data" / STORE_FILE)) as store:
        assert store.execute("SELECT digest FROM payloads").fetchall() == [(digest,)]


async def test_payload_that_came_back_is_not_missing(opened, tmp_path):
    async with opened() as core:
        await begun(core, tmp_path, versions=1)
        (digest,) = core.context.storage.digests()
        nowhere = tmp_path / "nowhere"
        await core.damage.put_aside_missing([(digest, nowhere)])
        assert await read(core, digest) > 0


async def test_payload_whose_copy_is_right_is_proved_twice_before_it_is_put_aside(bucket, prefix, opened, tmp_path):
    async with opened() as core:
        await begun(core, tmp_path, versions=1)
        (digest,) = core.context.storage.digests()
        assert await core.damage.put_aside_unproved(digest, "it leads elsewhere")
        assert payloads_of(bucket.names(prefix)) == [f"blobs/{digest[:2]}/{digest}"]
        assert not await core.damage.put_aside_unproved(digest, "it leads elsewhere")
        assert payloads_of(bucket.names(prefix)) == []


async def test_proof_that_saw_a_copy_before_it_was_replaced_is_made_again(opened, tmp_path, monkeypatch):
    async with opened() as core:
        run = LargeRun(core, tmp_path)
        await run.begin()
        await run.publish(snapshot=True)
        verify, proofs = garbage_collector.verify_way, []

        def refuted_once(*args, **options):
            proofs.append(args)
            if len(proofs) == 1:
                raise DamagedPayload(0, "it leads elsewhere")
            verify(*args, **options)

        monkeypatch.setattr(garbage_collector, "verify_way", refuted_once)
        await core.collector.work()
        assert len(proofs) == 2
        assert not core.damage._doubted
        assert (await core.get_status()).snapshot_version == 0


@pytest.mark.parametrize(
    ("end", "moved_bytes", "num_kept"), [("erase", 0, 0), ("set_aside", 64 * MIB, 1), ("set_aside", MIB, 0)]
)
async def test_payload_that_is_in_the_bucket_no_longer_is_forgotten(
    bucket, prefix, opened, tmp_path, monkeypatch, end, moved_bytes, num_kept
):
    monkeypatch.setattr(bucket_storage, "MOVED_BYTES", moved_bytes)
    async with opened() as core:
        await begun(core, tmp_path, versions=2)
        gone, kept = sorted(core.context.storage.digests())
        await getattr(core.context.storage, end)(gone)
        assert [*core.context.cache._order] == [kept]
    # An object above what S3 copies is deleted.
    assert [name for name in bucket.names(prefix) if gone in name] == [f"damaged/{gone}"] * num_kept
