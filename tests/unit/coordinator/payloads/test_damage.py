"""What a read that fails says: a lost file and a wrong byte are damage, everything else is about today."""

import errno
import os
import shutil
from pathlib import Path

import pytest

from heterorl.common.errors import Busy, UnknownPayload
from heterorl.coordinator.core import Coordinator
from heterorl.coordinator.payloads import payload_index
from heterorl.coordinator.payloads.damage import Damage
from heterorl.coordinator.store import blobs as blobs_module
from tests.support.run import Run

REFUSALS = [errno.EMFILE, errno.ENFILE, errno.EACCES, errno.ESTALE, errno.EIO, errno.ETIMEDOUT, errno.ENOMEM]


@pytest.fixture
async def payload(core, tmp_path):
    run = Run(core, tmp_path)
    await run.begin()
    await run.publish()
    (payload,) = (await plan(core)).payloads
    return payload


async def plan(core):
    return await core.plan_pull(have_version=-1, have_root="", want_version=0)


async def read(core, payload):
    return b"".join([frame async for frame in core.read_payload(digest=payload.digest, offset=0)])


def refuse(code):
    def call(*_args, **_options):
        raise OSError(code, os.strerror(code))

    return call


@pytest.mark.parametrize("code", REFUSALS, ids=lambda code: errno.errorcode[code])
@pytest.mark.parametrize("where", ["open", "dup", "preadv", "pread"])
async def test_system_that_refuses_a_read_damages_nothing(core, payload, monkeypatch, caplog, code, where):
    if where == "pread":
        # The pass that proves the file has succeeded before.
        await read(core, payload)
    with monkeypatch.context() as patch:
        patch.setattr(Path if where == "open" else os, where, refuse(code))
        for _ in range(3):
            with pytest.raises(Busy) as refusal:
                await read(core, payload)

    assert refusal.value.retry_after_s > 0
    assert [payload] == list((await plan(core)).payloads)
    assert len(await read(core, payload)) == payload.num_bytes
    assert not core.on_fatal.done()
    # Once, however often callers come back.
    assert len([record for record in caplog.records if "cannot be read now" in record.message]) == 1


@pytest.mark.files
async def test_payload_that_is_gone_is_offered_no_longer(core, payload):
    core.blobs.path(payload.digest).unlink()

    with pytest.raises(UnknownPayload):
        await read(core, payload)

    assert not await core.database.run(lambda connection: payload_index.is_named(connection, payload.digest))


@pytest.mark.files
@pytest.mark.parametrize("is_mounted_over", [False, True])
async def test_disk_that_was_unmounted_has_lost_nothing(core, payload, tmp_path, is_mounted_over):
    blobs = tmp_path / "data" / "blobs"
    blobs.rename(tmp_path / "elsewhere")
    if is_mounted_over:
        blobs.mkdir()

    with pytest.raises(Busy, match="mounted"):
        await read(core, payload)

    shutil.rmtree(blobs, ignore_errors=True)
    (tmp_path / "elsewhere").rename(blobs)
    assert len(await read(core, payload)) == payload.num_bytes


@pytest.mark.parametrize("code", REFUSALS, ids=lambda code: errno.errorcode[code])
async def test_snapshot_that_cannot_be_read_now_is_verified_later(core, payload, monkeypatch, code):
    real = Path.open

    def refused(path, *args, **options):
        if path == core.blobs.path(payload.digest):
            raise OSError(code, os.strerror(code))
        return real(path, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", refused)
        await core.collector.work()
    assert (await core.get_status()).snapshot_version == -1
    assert [payload] == list((await plan(core)).payloads)

    await core.collector.work()
    assert (await core.get_status()).snapshot_version == 0


@pytest.mark.files
async def test_nobody_can_tell_whether_a_payload_is_there(core, payload, monkeypatch):
    path = core.blobs.path(payload.digest)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", refuse(errno.EACCES))
        for look in (core.blobs.size, core.blobs.query):
            with pytest.raises(Busy):
                look(payload.digest)
        with pytest.raises(Busy):
            await core.damage.put_aside_missing([(payload.digest, path)])
    assert [payload] == list((await plan(core)).payloads)


@pytest.mark.files
async def test_damaged_payload_is_put_aside_where_a_person_finds_it(core, payload, tmp_path):
    path = core.blobs.path(payload.digest)
    path.write_bytes(b"x" + path.read_bytes()[1:])

    with pytest.raises(UnknownPayload, match="damaged"):
        await read(core, payload)

    assert (tmp_path / "data" / "damaged" / payload.digest).is_file()
    assert isinstance(core.damage, Damage)


@pytest.mark.files
@pytest.mark.parametrize("refused", [("name_file",), ("name_file", "remove_file")], ids=" and ".join)
async def test_wrong_bytes_that_could_not_be_moved_are_missing_after_a_restart_too(
    config, clock, core, payload, monkeypatch, refused
):
    path = core.blobs.path(payload.digest)
    right = path.read_bytes()
    path.write_bytes(b"x" + right[1:])

    def busy(*_args, **_options):
        raise Busy("too many files", retry_after_s=1.0)

    with monkeypatch.context() as patch:
        for name in refused:
            patch.setattr(blobs_module, name, busy)
        with pytest.raises(Busy):
            await read(core, payload)
        await core.close()
        again = await Coordinator.open(config, clock)
    try:
        assert again.blobs.query(payload.digest) == 0
        assert not await again.blobs.ensure(digest=payload.digest, num_bytes=payload.num_bytes)

        async def frames():
            yield right

        await again.blobs.append(digest=payload.digest, num_bytes=len(right), offset=0, frames=frames())
        assert path.read_bytes() == right
    finally:
        await again.close()
