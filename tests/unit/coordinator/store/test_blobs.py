"""Payload files: resumed in any pieces, across restarts, verified, bounded."""

import asyncio
import errno
import os
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace

import blake3
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heterorl.common.errors import Busy, CorruptStore, DigestMismatch, InvalidRequest, QuotaExceeded, StoreFull
from heterorl.common.pull.payload_reader import PayloadReader
from heterorl.common.types.common import Digest
from heterorl.common.types.policy import NO_VERSION, PayloadKind, PayloadRef
from heterorl.common.weights.payload import FRAME_BYTES, SLOW_BYTES
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.coordinator.core import Coordinator
from heterorl.coordinator.policy_column import PolicyColumn
from heterorl.coordinator.store import blobs as blobs_module
from heterorl.coordinator.store.payload_files import PayloadStorage
from tests.support.clock import ManualClock
from tests.support.crashes import Disk
from tests.support.limits import WAIT_S
from tests.support.run import Run, frames
from tests.support.stores import open_blobs

MAX_BYTES = 1 << 20


def store(path, **changes):
    return open_blobs(path, **{"payload_space_bytes": 1 << 30, "max_payload_bytes": MAX_BYTES} | changes)


def digest_of(data):
    return Digest(blake3.blake3(data).hexdigest())


async def append(blobs, data, *, digest=None, offset=0, end=None, num_bytes=None):
    return await blobs.append(
        digest=digest_of(data) if digest is None else digest,
        num_bytes=num_bytes or len(data),
        offset=offset,
        frames=frames(data[offset:end], 7),
    )


async def content(blobs, digest, offset=0):
    return b"".join([frame async for frame in PayloadReader().read(digest, blobs.path(digest), offset=offset)])


async def broken_link(data):
    yield data
    raise ConnectionError("gone")


@pytest.mark.parametrize("num_bytes", [0, MAX_BYTES + 1])
async def test_payload_of_no_bytes_or_too_many_is_refused_and_leaves_no_file(tmp_path, num_bytes):
    blobs = store(tmp_path)

    with pytest.raises(QuotaExceeded, match=f"a payload of {num_bytes} bytes; the limit is {MAX_BYTES}"):
        await blobs.append(digest=digest_of(b""), num_bytes=num_bytes, offset=0, frames=frames(b""))

    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@settings(max_examples=30, deadline=None)
@given(st.binary(min_size=1, max_size=200), st.lists(st.tuples(st.integers(0, 200), st.integers(0, 80)), max_size=6))
def test_upload_in_any_pieces_with_restarts_and_repeats_arrives_whole(data, pieces):
    async def upload(root):
        digest = digest_of(data)
        for start, length in pieces:
            # Each piece begins somewhere in what is durable; a new store each time is a restart.
            blobs = store(root)
            have = blobs.query(digest)
            if have < len(data):
                start = min(start, have)
                assert await append(blobs, data, offset=start, end=start + length) == min(start + length, len(data))
            assert blobs._used == sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
        blobs = store(root)
        assert await append(blobs, data, offset=min(blobs.query(digest), len(data) - 1)) == len(data)
        assert await content(blobs, digest) == data
        assert list((root / "partial").iterdir()) == []

    with tempfile.TemporaryDirectory() as root:
        asyncio.run(upload(Path(root)))


async def test_power_cut_takes_neither_bytes_called_durable_nor_a_payload_in_a_folder_of_a_killed_process(tmp_path):
    data = bytes(range(100))
    disk = Disk(tmp_path / "root")
    with disk.installed():
        store(disk.root)
        with disk.watch():
            # A process that was killed here had not made the folder's name durable.
            (disk.root / "blobs" / digest_of(data)[:2]).mkdir()
            blobs = store(disk.root)
            disk.acknowledged.append(await append(blobs, data, end=50))
            disk.acknowledged.append(await append(blobs, data, offset=50))

    for number, image in enumerate(disk.images):
        again = store(image.write(tmp_path / f"image-{number}"))
        assert again.query(digest_of(data)) >= max(image.acknowledged, default=0), image
    assert image.acknowledged == (50, 100)


@pytest.mark.parametrize(
    "bad", ["../../etc/passwd", "", "0" * 63, "0" * 65, "G" * 64, "A" * 64, "0" * 63 + "\n", "\0" * 64]
)
async def test_digest_that_is_not_one_names_no_file(tmp_path, bad):
    blobs = store(tmp_path)
    for call in (blobs.size, blobs.query):
        with pytest.raises(InvalidRequest):
            call(bad)
    with pytest.raises(InvalidRequest):
        await append(blobs, b"data", digest=bad)
    with pytest.raises(InvalidRequest):
        await content(blobs, bad)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


async def test_offsets_outside_the_content_are_refused(tmp_path):
    blobs = store(tmp_path)
    with pytest.raises(InvalidRequest):
        await blobs.append(digest=digest_of(b"abc"), num_bytes=3, offset=-1, frames=frames(b"abc"))
    await append(blobs, b"abc")
    with pytest.raises(InvalidRequest):
        await content(blobs, digest_of(b"abc"), offset=-1)
    assert await content(blobs, digest_of(b"abc"), offset=3) == b""


async def test_wrong_content_is_discarded_and_its_bytes_are_free_again(tmp_path):
    blobs = store(tmp_path, payload_space_bytes=100)
    for _ in range(5):
        with pytest.raises(DigestMismatch):
            await append(blobs, b"x" * 60, digest=Digest("1" * 64))
    assert blobs.query(Digest("1" * 64)) == 0
    assert await append(blobs, b"y" * 60) == 60


async def test_uploads_side_by_side_share_what_is_left(tmp_path):
    blobs = store(tmp_path, payload_space_bytes=100)
    results = await asyncio.gather(
        *(append(blobs, bytes([number]) * 60) for number in range(3)), return_exceptions=True
    )
    assert sorted(type(result).__name__ for result in results) == ["StoreFull", "StoreFull", "int"]
    assert blobs._used == 60


async def test_broken_link_keeps_what_arrived_and_counts_it(tmp_path):
    blobs = store(tmp_path, payload_space_bytes=100)
    data = b"z" * 90
    with pytest.raises(ConnectionError):
        await blobs.append(digest=digest_of(data), num_bytes=90, offset=0, frames=broken_link(data[:50]))
    assert blobs.query(digest_of(data)) == 50
    with pytest.raises(StoreFull):
        await append(blobs, b"w" * 51)
    assert await append(blobs, data, offset=50) == 90
    assert blobs._used == store(tmp_path)._used == 90


async def test_two_senders_of_one_payload_take_turns(tmp_path):
    blobs = store(tmp_path)
    data = bytes(range(200))
    assert await asyncio.gather(*(append(blobs, data) for _ in range(3))) == [200] * 3
    assert await content(blobs, digest_of(data)) == data


async def test_content_is_read_in_frames_of_a_bounded_size(tmp_path):
    blobs = store(tmp_path, max_payload_bytes=10 << 20)
    data = os.urandom(FRAME_BYTES + 5)
    await blobs.append(digest=digest_of(data), num_bytes=len(data), offset=0, frames=frames(data))
    digest = digest_of(data)
    sizes = [len(frame) async for frame in PayloadReader().read(digest, blobs.path(digest), offset=0)]
    assert sizes == [SLOW_BYTES] * (FRAME_BYTES // SLOW_BYTES) + [5]


@pytest.mark.parametrize(("code", "error"), [(errno.EIO, CorruptStore), (errno.ENOSPC, StoreFull)])
async def test_file_whose_fsync_failed_is_not_resumed(tmp_path, monkeypatch, code, error):
    # After a failed fsync the kernel may have dropped the pages and call the next fsync a success.
    blobs = store(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", _fails(code))
        with pytest.raises(error):
            await append(blobs, b"data")
    assert blobs.query(digest_of(b"data")) == 0
    assert blobs._used == 0
    assert await append(blobs, b"data") == 4


@pytest.mark.parametrize("number", [2, 3])
async def test_directory_whose_fsync_failed_ends_the_coordinator(tmp_path, monkeypatch, number):
    core = await Coordinator.open(CoordinatorConfig(data_dir=tmp_path / "data"), ManualClock())
    run = Run(core, tmp_path)
    await run.begin()
    data = b"data"
    digest = digest_of(data)
    (tmp_path / "data" / "blobs" / digest[:2]).mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", _fails(errno.EIO, first=number))
        with pytest.raises(CorruptStore):
            await run.upload(data, digest)
    assert await core.on_fatal is None
    with pytest.raises(CorruptStore):
        await core.get_status()
    await core.close()


async def test_full_disk_at_the_rename_is_said_and_repeated_later(tmp_path, monkeypatch):
    blobs = store(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", _fails(errno.ENOSPC))
        with pytest.raises(StoreFull):
            await append(blobs, b"data")
    assert await append(blobs, b"data", offset=4) == 4
    assert await content(blobs, digest_of(b"data")) == b"data"


async def test_upload_that_cannot_begin_says_why(tmp_path):
    blobs = store(tmp_path)
    (tmp_path / "partial" / digest_of(b"data")).mkdir()
    with pytest.raises(CorruptStore):
        await append(blobs, b"data", offset=0)


def _fails(code, *, first=1):
    calls = []
    real = os.fsync

    def fails(*args):
        calls.append(args)
        if len(calls) < first:
            return real(*args)
        raise OSError(code, os.strerror(code))

    return fails


async def test_upload_cut_after_its_last_byte_is_named_when_it_is_needed(tmp_path):
    data = b"whole"
    (tmp_path / "partial").mkdir()
    (tmp_path / "partial" / digest_of(data)).write_bytes(data)
    wrong = Digest("1" * 64)
    (tmp_path / "partial" / wrong).write_bytes(data)
    blobs = store(tmp_path)

    assert not await blobs.ensure(digest=digest_of(data), num_bytes=6)
    assert await blobs.ensure(digest=digest_of(data), num_bytes=5)
    assert await blobs.ensure(digest=digest_of(data), num_bytes=5)
    with pytest.raises(DigestMismatch):
        await blobs.ensure(digest=wrong, num_bytes=5)
    with pytest.raises(InvalidRequest):
        await blobs.ensure(digest=Digest("../x"), num_bytes=5)
    assert await content(blobs, digest_of(data)) == data
    assert blobs._used == 5


async def test_payload_is_not_named_from_an_upload_that_began_anew(tmp_path):
    blobs = store(tmp_path)
    data = b"0123456789"
    (tmp_path / "partial" / digest_of(data)).write_bytes(data)
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def slow():
        yield data[:4]
        begun.set()
        await go_on.wait()
        raise ConnectionError("gone")

    sender = asyncio.create_task(blobs.append(digest=digest_of(data), num_bytes=10, offset=0, frames=slow()))
    await begun.wait()
    asked = asyncio.create_task(blobs.ensure(digest=digest_of(data), num_bytes=10))
    await asyncio.sleep(0)
    go_on.set()
    with pytest.raises(ConnectionError):
        await sender
    assert not await asked
    assert blobs.query(digest_of(data)) == 4


class FailingHome(PayloadStorage):
    """Does not take the first file that it is given."""

    def __init__(self):
        self.kept = []
        self.is_failing = True

    async def keep(self, digest, path):
        if self.is_failing:
            self.is_failing = False
            raise Busy("the bucket is away", retry_after_s=1.0)
        assert path.exists()
        self.kept.append(digest)


@pytest.mark.parametrize("call", ["adopt", "append"])
async def test_what_its_home_did_not_take_is_offered_again_before_it_is_called_durable(tmp_path, call):
    home = FailingHome()
    blobs = open_blobs(tmp_path / "store", payload_space_bytes=1 << 30, max_payload_bytes=MAX_BYTES, storage=home)
    data = b"a snapshot that was composed here"

    async def attempt():
        if call == "append":
            return await append(blobs, data)
        path = tmp_path / "composed"
        path.write_bytes(data)
        return await blobs.adopt(path, digest=digest_of(data), num_bytes=len(data))

    with pytest.raises(Busy):
        await attempt()
    assert not home.kept
    await attempt()
    assert home.kept == [digest_of(data)]


class SlowHome(PayloadStorage):
    """Takes a file for longer than a call may last."""

    def __init__(self):
        self.kept = set()
        self.num_begun = 0
        self.has_time = asyncio.Event()

    async def keep(self, digest, path):
        if digest not in self.kept:
            self.num_begun += 1
            await self.has_time.wait()
            self.kept.add(digest)


async def test_file_reaches_its_home_although_each_publication_that_needs_it_runs_out_of_time(tmp_path):
    home = SlowHome()
    blobs = open_blobs(tmp_path / "store", payload_space_bytes=1 << 30, max_payload_bytes=MAX_BYTES, storage=home)
    data = b"a snapshot"
    # The line broke while the bucket took it: all bytes are here.
    uploading = asyncio.create_task(append(blobs, data))
    while not home.num_begun:  # noqa: ASYNC110 - a number
        await asyncio.sleep(0)
    uploading.cancel()
    await asyncio.gather(uploading, return_exceptions=True)
    assert blobs.query(digest_of(data)) == len(data)

    for _ in range(3):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await blobs.ensure(digest=digest_of(data), num_bytes=len(data))
    home.has_time.set()

    assert await blobs.ensure(digest=digest_of(data), num_bytes=len(data))
    # By the upload, and by all publications together.
    assert home.num_begun == 2


async def test_disk_that_fails_after_a_publication_ran_out_of_time_still_ends_the_process(tmp_path, monkeypatch):
    data, failed, may_go = b"a snapshot", [], threading.Event()
    (tmp_path / "partial").mkdir()
    (tmp_path / "partial" / digest_of(data)).write_bytes(data)
    blobs = store(tmp_path, on_failed=failed.append)

    def fails(*paths):
        may_go.wait(WAIT_S)
        raise CorruptStore("the disk of the payloads failed")

    monkeypatch.setattr(blobs_module, "name_file", fails)
    column = object.__new__(PolicyColumn)
    column._context = SimpleNamespace(blobs=blobs)
    payload = PayloadRef(
        kind=PayloadKind.SNAPSHOT, from_version=NO_VERSION, to_version=0, digest=digest_of(data), num_bytes=len(data)
    )
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await column._publish(None, None, {}, [payload])
    may_go.set()
    async with asyncio.timeout(WAIT_S):
        while not failed:  # noqa: ASYNC110 - a list
            await asyncio.sleep(0.01)

    assert "the disk of the payloads failed" in failed[0]


class Held:
    """A file operation that waits in its thread until it may go on."""

    def __init__(self, monkeypatch, name):
        self._began, self._may_go, self._real = threading.Event(), threading.Event(), getattr(blobs_module, name)
        self.arguments = ()
        self.failures = []
        monkeypatch.setattr(blobs_module, name, self._held)

    def _held(self, *arguments):
        self.arguments = arguments
        self._began.set()
        self._may_go.wait(WAIT_S)
        try:
            self._real(*arguments)
        except Exception as error:
            self.failures.append(error)
            raise

    async def cancel(self, call):
        """Cancel the call while the operation runs, which then goes on."""
        task = asyncio.ensure_future(call)
        await asyncio.to_thread(self._began.wait, WAIT_S)
        task.cancel()
        # The call must not end before its operation.
        await asyncio.wait([task], timeout=0.2)
        self._may_go.set()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_upload_over_a_line_that_breaks_closes_its_file_after_the_running_write(tmp_path, monkeypatch):
    blobs, data = store(tmp_path), bytes(50)
    write = Held(monkeypatch, "write_all")

    await write.cancel(blobs.append(digest=digest_of(data), num_bytes=50, offset=0, frames=frames(data, 50)))

    assert write.failures == []
    assert write.arguments[0].closed
    assert (blobs.query(digest_of(data)), blobs.used_bytes) == (50, 50)


@pytest.mark.parametrize("name", ["remove_file", "name_file"])
async def test_deletion_whose_caller_is_cancelled_is_counted(tmp_path, monkeypatch, name):
    blobs, data = store(tmp_path), bytes(50)
    digest = digest_of(data)
    await append(blobs, data)

    async def never():
        return False

    calls = {"remove_file": lambda: blobs.remove(digest, is_needed=never), "name_file": lambda: blobs.set_aside(digest)}
    await Held(monkeypatch, name).cancel(calls[name]())

    # Payloads set aside count.
    assert (blobs.size(digest), blobs.used_bytes) == (None, 50 if name == "name_file" else 0)


async def test_damaged_payloads_count_and_the_oldest_go_where_room_is_missing(tmp_path):
    blobs = store(tmp_path, payload_space_bytes=250)
    texts = [bytes([number]) * 80 for number in range(3)]
    for data in texts[:2]:
        await append(blobs, data)
        await blobs.set_aside(digest_of(data))
    # Damaged once more: one file.
    await append(blobs, texts[1])
    await blobs.set_aside(digest_of(texts[1]))
    assert blobs.used_bytes == store(tmp_path).used_bytes == 160
    os.utime(tmp_path / "damaged" / digest_of(texts[0]), (1.0, 1.0))
    others = {tmp_path / "damaged" / name for name in ("2026-11", ".nfs0001")}
    for path in others:
        path.mkdir()
        (path / "note").write_bytes(bytes(1000))

    await append(blobs, texts[2])
    await append(blobs, bytes(10))
    damaged = [tmp_path / "damaged" / digest_of(data) for data in texts[:2]]
    assert {*(tmp_path / "damaged").iterdir()} == {*others, *damaged}
    await append(blobs, bytes(20))
    assert {*(tmp_path / "damaged").iterdir()} == {*others, damaged[1]}
    assert blobs.used_bytes == store(tmp_path).used_bytes == 190
    assert await blobs.drop_damaged(1) == 80
    assert blobs.used_bytes == 110


@pytest.mark.parametrize("way", ["append", "ensure", "adopt"])
async def test_wrong_bytes_that_could_not_be_moved_leave_before_the_right_ones_come(tmp_path, monkeypatch, way):
    blobs, digest = store(tmp_path), digest_of(b"data")
    await append(blobs, b"data")
    blobs.path(digest).write_bytes(b"atad")

    def refused(*_args):
        raise Busy("too many files", retry_after_s=1.0)

    with monkeypatch.context() as patch:
        patch.setattr(blobs_module, "name_file", refused)
        for call in (blobs.set_aside(digest), append(blobs, b"data")):
            with pytest.raises(Busy):
                await call
    assert blobs.query(digest) == 0

    if way == "append":
        await append(blobs, b"data")
    elif way == "adopt":
        (tmp_path / "file").write_bytes(b"data")
        await blobs.adopt(tmp_path / "file", digest=digest, num_bytes=4)
    assert await blobs.ensure(digest=digest, num_bytes=4) == (way != "ensure")
    assert way == "ensure" or await content(blobs, digest) == b"data"
    assert (tmp_path / "damaged" / digest).read_bytes() == b"atad"


async def test_readers_hear_of_room_that_a_payload_set_aside_can_give(tmp_path):
    blobs = store(tmp_path)
    await append(blobs, b"data")
    ticket = blobs.freed.ticket()

    await blobs.set_aside(digest_of(b"data"))

    assert ticket.is_set()


async def test_damaged_payload_that_is_deleted_by_hand_meanwhile_counts_as_free(tmp_path, monkeypatch):
    blobs = store(tmp_path)
    await append(blobs, b"data")
    await blobs.set_aside(digest_of(b"data"))
    remove = blobs_module.remove_file

    def deleted_by_hand(path):
        path.unlink()
        remove(path)

    monkeypatch.setattr(blobs_module, "remove_file", deleted_by_hand)

    assert await blobs.drop_damaged(1) == 4
    assert blobs.used_bytes == 0
