"""A disk that is really full (a small tmpfs): refusals are typed, nothing acknowledged is lost, room heals it."""

import contextlib
import shutil
import subprocess

import numpy as np
import pytest

from heterorl.common.errors import DiskFull, StoreFull
from heterorl.common.types.rollout import PushStatus
from heterorl.common.wire.common_messages import bytes_digest
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.coordinator.core import Coordinator
from heterorl.coordinator.groups import ledger
from heterorl.coordinator.offline.restore_backup import restore
from tests.support.clock import ManualClock
from tests.support.run import Run, frames

pytestmark = [pytest.mark.process, pytest.mark.sqlite]


@pytest.fixture
def disk(tmp_path):
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {mounted.stderr.decode().strip()}")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def grow(disk, size):
    subprocess.run(["mount", "-o", f"remount,size={size}", str(disk)], check=True)


def config(disk):
    # Without a mark the disk itself refuses.
    return CoordinatorConfig(data_dir=disk / "data", min_free_bytes=0, groups_per_version=1000, max_superseded_s=1e9)


async def begin(disk, tmp_path):
    core = await Coordinator.open(config(disk), ManualClock())
    run = Run(core, tmp_path)
    await run.begin()
    await run.publish()
    await run.register()
    return core, run


async def fill(core, run):
    """Push groups of 20 kB, one by one, until the disk is full; returns acknowledged and refused ones."""
    acknowledged = []
    for work in await run.lease(200):
        group = run.group(work, prompt_token_ids=np.full(20_000, 3, np.int32))
        try:
            (outcome,) = await core.push_groups([group])
        except StoreFull:
            return acknowledged, group
        assert outcome.status is PushStatus.ACCEPTED
        acknowledged.append(group)
    raise AssertionError("the disk never filled")


async def stored(core):
    counts = await core.database.run(ledger.counts)
    assert counts == await core.database.run(ledger.recount)
    assert counts.is_balanced
    sql = "SELECT sequence FROM groups WHERE state = 'pending'"
    return await core.database.run(lambda c: sorted(row[0] for row in c.execute(sql)))


async def test_groups_that_find_no_room_are_refused_and_the_others_kept(disk, tmp_path):
    core, run = await begin(disk, tmp_path)
    acknowledged, refused = await fill(core, run)

    assert len(acknowledged) > 5
    with pytest.raises(StoreFull) as refusal:
        await core.push_groups([refused])
    assert refusal.value.retry_after_s > 0
    assert await stored(core) == [group.id.sequence for group in acknowledged]
    assert not core.on_fatal.done(), "a full disk is not a failed one"

    grow(disk, "16m")
    again = await core.push_groups([*acknowledged, refused])
    assert [outcome.status for outcome in again] == [PushStatus.DUPLICATE] * len(acknowledged) + [PushStatus.ACCEPTED]
    await core.close()


async def test_store_on_a_full_disk_opens_or_says_so_and_has_everything_when_there_is_room(disk, tmp_path):
    core, run = await begin(disk, tmp_path)
    acknowledged, _ = await fill(core, run)
    with contextlib.suppress(OSError):
        (disk / "foreign").write_bytes(b"x" * (1 << 20))
    await core.close()

    with contextlib.suppress(DiskFull):
        await (await Coordinator.open(config(disk), ManualClock())).close()
    grow(disk, "16m")
    core = await Coordinator.open(config(disk), ManualClock())
    assert await stored(core) == [group.id.sequence for group in acknowledged]
    await core.close()


async def test_payload_that_finds_no_room_is_refused_and_resumed_later(disk, tmp_path):
    core, run = await begin(disk, tmp_path)
    request = await run.prepare()
    data = np.random.default_rng(0).bytes(1 << 20)
    digest = bytes_digest(data)
    with pytest.raises(StoreFull) as refusal:
        await core.upload_payload(
            epoch=run.epoch, digest=digest, num_bytes=len(data), offset=0, frames=frames(data, 64 << 10)
        )
    assert refusal.value.retry_after_s > 0
    have = await core.query_upload(digest=digest)
    assert 0 < have < len(data)
    assert not core.on_fatal.done()

    grow(disk, "16m")
    assert await run.upload(data, digest, offset=have) == len(data)
    assert b"".join([frame async for frame in core.read_payload(digest=digest, offset=0)]) == data
    assert await core.publish_version(request) == 1
    await core.close()


async def test_first_start_without_room_is_the_operators_to_solve(disk):
    with contextlib.suppress(OSError):
        (disk / "foreign").write_bytes(b"x" * (1 << 20))

    with pytest.raises(DiskFull, match="no space"):
        await Coordinator.open(config(disk), ManualClock())
    (disk / "foreign").unlink()
    await (await Coordinator.open(config(disk), ManualClock())).close()


@pytest.mark.files
async def test_restore_onto_a_full_disk_says_so(disk, tmp_path):
    core, run = await begin(disk, tmp_path)
    await fill(core, run)
    await core.close()
    source = shutil.copytree(disk / "data", tmp_path / "backup")

    with pytest.raises(DiskFull, match=f"under {disk / 'new'}"):
        restore(source, run_id="run", data_dir=disk / "new", url="", now=0.0)
    grow(disk, "16m")
    assert restore(source, run_id="run", data_dir=disk / "new", url="", now=0.0).missing == ()
