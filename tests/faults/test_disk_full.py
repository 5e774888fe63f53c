"""A full disk is a typed answer: nothing half done, nothing acknowledged lost, and it heals when space is freed."""

import subprocess

import numpy as np
import pytest

from heterorl.common.errors import StoreFull
from heterorl.common.types.rollout import PushStatus
from heterorl.common.wire.common import bytes_digest
from heterorl.coordinator.config import CoordinatorConfig
from heterorl.coordinator.core import Coordinator
from heterorl.coordinator.groups import ledger
from tests.support.clock import ManualClock
from tests.support.run import Run


@pytest.fixture
def small_disk(tmp_path):
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(path)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("needs the right to mount a tmpfs")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


async def test_full_disk_refuses_with_a_delay_and_keeps_what_was_acknowledged(small_disk, tmp_path):
    core = await Coordinator.open(CoordinatorConfig(data_dir=small_disk / "data"), ManualClock())
    run = Run(core, tmp_path)
    await run.begin()
    await run.publish()
    await run.register()
    work = await run.lease(2)
    (first,) = await core.push_groups([run.group(work[0])])
    ballast = small_disk / "ballast"
    with pytest.raises(OSError, match="space"):
        ballast.write_bytes(bytes(4 << 20))

    data = np.random.default_rng(0).bytes(100_000)
    with pytest.raises(StoreFull) as payload:
        await run.upload(data, bytes_digest(data))
    late = run.group(work[1])
    with pytest.raises(StoreFull) as group:
        await core.push_groups([late])
    ballast.unlink()

    assert payload.value.retry_after_s > 0
    assert group.value.retry_after_s > 0
    (second,) = await core.push_groups([late])
    assert [first.status, second.status] == [PushStatus.ACCEPTED] * 2
    assert await run.upload(data, bytes_digest(data), offset=await core.query_upload(digest=bytes_digest(data))) == len(
        data
    )
    counts = await core.database.run(ledger.counts)
    assert counts == await core.database.run(ledger.recount)
    assert (counts.acked, counts.pending) == (2, 2)
    await core.close()
