"""Who waits for room is told of all room that comes; what is remembered of copies is bounded by the payloads."""

import asyncio
import contextlib

import pytest
from blake3 import blake3

from heterorl.common.errors import CorruptStore
from heterorl.coordinator.store import blobs, bucket_cache
from heterorl.coordinator.store.bucket_cache import SCRATCH, WHOLE_READS, BucketCache, CacheFiles
from heterorl.coordinator.store.payload_files import Repair
from tests.support.clock import CountingBell

MIB = 1 << 20
DATA = {blake3(data).hexdigest(): data for data in (bytes([number]) * (6 * MIB) for number in range(3))}
A, B, C = DATA


class Home:
    """A bucket that sends some payloads in part, and ends their fetches only when it may."""

    used_bytes = 0

    def __init__(self):
        self.there = {*DATA}
        self.slow, self.sent, self.failed = set(), 3 * MIB, []
        self.num_wrong = 0
        self.begins, self.may_end = asyncio.Event(), asyncio.Event()
        self.objects = self

    def size(self, digest):
        return len(DATA[digest]) if digest in self.there else None

    def digests(self):
        return frozenset(self.there)

    async def reserve(self, num_bytes):
        pass

    async def erase(self, digest):
        return 0

    async def fetch(self, digest, path):
        if digest not in self.slow:
            path.write_bytes(DATA[digest] if self.num_wrong <= 0 else bytes(len(DATA[digest])))
            self.num_wrong -= 1
            return
        path.write_bytes(DATA[digest][: self.sent])
        self.begins.set()
        try:
            await asyncio.Event().wait()
        finally:
            # A block is being written.
            await self.may_end.wait()


@pytest.fixture
def home():
    return Home()


@pytest.fixture
def copies(home, tmp_path, monkeypatch):
    # A reader that is not told of room waits for ever.
    monkeypatch.setattr(bucket_cache, "WAIT_S", 1e6)
    (tmp_path / SCRATCH).mkdir()

    async def make_room(missing_bytes):
        await copies.make_room(missing_bytes)

    files = CacheFiles(
        tmp_path,
        payload_space_bytes=13 * MIB,
        max_payload_bytes=64 * MIB,
        make_room=make_room,
        storage=home,
        on_full=lambda: None,
        on_failed=home.failed.append,
    )
    files.freed = CountingBell()
    copies = BucketCache(files, home)
    return copies


async def read(copies, digest):
    async with copies.at_hand([digest]):
        pass


@contextlib.asynccontextmanager
async def waiting(copies, digest):
    """While a reader waits for room, of which it is told by the end."""
    bell = copies._files.freed
    before = bell.num_tickets
    task = asyncio.ensure_future(read(copies, digest))
    await bell.until_asked(before)
    assert not task.done()
    assert digest not in copies._promised
    yield
    await task


@pytest.mark.parametrize("sent", [3, 6])
async def test_room_of_a_fetch_that_was_given_up_is_told_when_it_has_ended(copies, home, sent):
    home.slow, home.sent = {A}, sent * MIB
    async with copies.at_hand([C]):
        first = asyncio.ensure_future(read(copies, A))
        await home.begins.wait()
        async with waiting(copies, B):
            first.cancel()
            await asyncio.wait([first])
            assert copies._promised
            home.may_end.set()


async def test_reader_hears_of_a_fetch_that_ends_while_room_is_made(copies, home, monkeypatch):
    home.slow, home.sent = {A}, 3 * MIB
    make_room, drop = copies.make_room, copies._files.drop

    async def end():
        home.may_end.set()
        for fetch in [*copies._fetches.values()]:
            await asyncio.wait([fetch.task])

    async def make_and_end(missing_bytes):
        await make_room(missing_bytes)
        await end()

    async def end_and_drop(digest):
        await end()
        return await drop(digest)

    async with copies.at_hand([C]):
        first = asyncio.ensure_future(read(copies, A))
        await home.begins.wait()
        first.cancel()
        await asyncio.wait([first])
        monkeypatch.setattr(copies, "make_room", make_and_end)
        monkeypatch.setattr(copies._files, "drop", end_and_drop)
        await read(copies, B)


async def test_room_of_what_the_keeper_deletes_is_told(copies, home):
    home.there = {B, C}

    async def frames():
        yield DATA[A][: 5 * MIB]
        raise ConnectionError

    async def is_needed():
        return False

    async with copies.at_hand([C]):
        with pytest.raises(ConnectionError):
            await copies._files.append(digest=A, num_bytes=6 * MIB, offset=0, frames=frames())
        async with waiting(copies, B):
            assert await copies._files.remove(A, is_needed=is_needed) == 5 * MIB


async def test_what_no_bucket_has_is_not_remembered(copies):
    for number in range(100):
        await read(copies, blake3(bytes([number])).hexdigest())
    assert not copies._order
    await read(copies, A)
    assert [*copies._order] == [A]


async def test_fetch_of_a_payload_that_is_deleted_meanwhile_makes_room(copies, home):
    home.slow = {A}
    reading = asyncio.ensure_future(read(copies, A))
    await home.begins.wait()
    home.there = {B, C}
    copies.forget(A)
    reading.cancel()
    (fetch,) = copies._fetches.values()
    home.may_end.set()
    await asyncio.wait([reading, fetch.task])
    assert copies._files._used == copies._files.scratch_bytes(A) == 3 * MIB
    copies.forget(A)
    await copies.make_room(1)
    assert copies._files._used == copies._files.scratch_bytes(A) == 0
    assert not copies._order


async def test_payload_is_read_again_before_it_counts_as_damaged_in_the_bucket(copies, home):
    home.num_wrong = WHOLE_READS - 1
    assert await copies.heal(B) is Repair.CURED
    assert copies._files.is_right(B)

    home.num_wrong = WHOLE_READS
    with pytest.raises(FileNotFoundError, match="damaged"):
        await read(copies, C)
    assert home.num_wrong == 0
    await read(copies, C)


async def test_wrong_payload_is_read_again_only_while_readers_wait(copies, home, monkeypatch):
    home.num_wrong = WHOLE_READS
    take = copies._files.take

    async def take_alone(scratch, **payload):
        reading.cancel()
        await asyncio.wait([reading])
        return await take(scratch, **payload)

    monkeypatch.setattr(copies._files, "take", take_alone)
    reading = asyncio.ensure_future(read(copies, B))
    await asyncio.wait([reading])
    await asyncio.wait([fetch.task for fetch in copies._fetches.values()])

    assert home.num_wrong == WHOLE_READS - 1
    assert (copies._files._used, copies._fetches) == (0, {})


@pytest.mark.parametrize("failing", ["fetch", "adoption", "copy", "damaged payload"])
async def test_failed_disk_of_a_copy_is_told_so_that_the_process_ends(copies, home, monkeypatch, tmp_path, failing):
    """Its caller may be a loop that takes the error for the end of the store."""
    await read(copies, A)
    if failing == "damaged payload":
        (tmp_path / "damaged").mkdir()
        (tmp_path / "damaged" / C).write_bytes(DATA[C])

    def fails(*_):
        raise CorruptStore("the disk of the payloads failed")

    patched = {"fetch": (home, "fetch"), "adoption": (bucket_cache, "name_file")}
    monkeypatch.setattr(*patched.get(failing, (blobs, "remove_file")), fails)
    with pytest.raises(CorruptStore):
        await (read(copies, B) if failing in patched else copies.make_room(1))

    (said,) = home.failed
    assert said.startswith("the disk of the payloads failed")
