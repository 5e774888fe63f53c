"""What the learner does when its own disk, or the coordinator's, does not give back what was written."""

import asyncio
import errno
import os
import random
from pathlib import Path

import pytest

from heterorl.common.errors import ConfigError, DiskFull, UnknownPayload
from heterorl.common.types.policy import PayloadKind
from heterorl.learner.publish import checkpoint_store, version_payloads
from tests.support.learner_world import (
    FragileApi,
    Killed,
    NumpyBackend,
    fill,
    head_root,
    learn,
    learner_config,
    open_coordinator,
    rows,
)

QUEUE = 6


@pytest.fixture
async def coordinator(tmp_path):
    core = await open_coordinator(tmp_path)
    yield core
    await core.close()


class Disk:
    """`file_digest` over a disk that fails under one directory, so many times."""

    def __init__(self, monkeypatch, code, times=1_000_000):
        self.code, self.left, self.broken = code, times, None
        self.read = checkpoint_store.file_digest
        monkeypatch.setattr(checkpoint_store, "file_digest", self)

    def __call__(self, path):
        if self.broken is not None and self.broken in path.parents and self.left > 0:
            self.left -= 1
            raise OSError(self.code, os.strerror(self.code), str(path))
        return self.read(path)


async def _killed_before_the_last_commit(coordinator, tmp_path):
    """Checkpoints 2 and 3 on disk, the second of them of a version that is not committed."""
    filling = asyncio.create_task(fill(coordinator, QUEUE))
    with pytest.raises(Killed):
        await learn(learner_config(tmp_path), FragileApi(coordinator, die_before=("publish_version", 4)))
    await filling
    directory = tmp_path / "learner" / "checkpoints"
    assert sorted(path.name for path in directory.iterdir()) == ["v00000002", "v00000003"]
    return directory


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.ESTALE])
async def test_checkpoint_before_is_used_when_the_newest_cannot_be_read(
    coordinator, tmp_path, monkeypatch, caplog, code
):
    directory = await _killed_before_the_last_commit(coordinator, tmp_path)
    disk = Disk(monkeypatch, code)
    disk.broken = directory / "v00000003"

    result = await learn(learner_config(tmp_path), coordinator)

    assert (result.step, result.version, result.is_finished) == (3, 3, True)
    assert "CHECKPOINT" in caplog.text
    assert "CANNOT BE READ" in caplog.text
    # Nobody has looked into it, so nobody may say that it is worth nothing.
    kept = directory / "unreadable-v00000003-1"
    assert (kept / "cursor.json").exists()
    assert (kept / "backend" / "weights.npy").exists()


async def test_unreadable_checkpoint_is_not_counted_among_those_to_keep(coordinator, tmp_path, monkeypatch):
    """With it and one more kept, the only sound one would go before its successor's publication is committed."""
    await asyncio.gather(learn(learner_config(tmp_path), coordinator), fill(coordinator, QUEUE))
    directory = tmp_path / "learner" / "checkpoints"
    disk = Disk(monkeypatch, errno.EIO)
    disk.broken = directory / "v00000003"
    api = FragileApi(coordinator, die_before=("publish_version", 1))

    with pytest.raises(Killed):
        # It goes back to version 2, and dies before that is committed as version 4.
        await learn(learner_config(tmp_path, max_steps=4), api)

    assert sorted(path.name for path in directory.iterdir()) == ["v00000002", "v00000003", "v00000004"]


async def test_disk_that_fails_for_a_moment_costs_nothing(coordinator, tmp_path, monkeypatch, caplog):
    directory = await _killed_before_the_last_commit(coordinator, tmp_path)
    disk = Disk(monkeypatch, errno.EIO, times=2)
    disk.broken = directory / "v00000003"
    backend = NumpyBackend()

    result = await learn(learner_config(tmp_path), coordinator, backend)

    assert result.is_finished
    assert backend.trained == [], "the step in the checkpoint was published, not taken again"
    assert "CANNOT BE READ" not in caplog.text


async def test_directory_that_may_not_be_listed_is_not_taken_for_damaged(tmp_path, monkeypatch):
    path = tmp_path / "v00000001"
    path.mkdir()
    (path / "DONE").write_text('{"format": 1, "files": {}}')
    walk = os.walk

    def refused(root, onerror=None):
        onerror(PermissionError(errno.EACCES, "Permission denied", str(root)))
        return walk(root)

    monkeypatch.setattr(checkpoint_store.os, "walk", refused)

    with pytest.raises(PermissionError):
        checkpoint_store.read_checkpoint(path)


async def test_no_checkpoint_can_be_read_and_the_optimizer_is_not_thrown_away(coordinator, tmp_path, monkeypatch):
    await asyncio.gather(learn(learner_config(tmp_path), coordinator), fill(coordinator, QUEUE))
    disk = Disk(monkeypatch, errno.EACCES)
    disk.broken = tmp_path / "learner" / "checkpoints"

    with pytest.raises(ConfigError, match="adopt_without_optimizer"):
        await learn(learner_config(tmp_path, max_steps=4), coordinator)

    disk.broken = None
    result, _ = await asyncio.gather(
        learn(learner_config(tmp_path, max_steps=4), coordinator), fill(coordinator, 2, incarnation="later")
    )
    assert (result.step, result.version) == (4, 4), "nothing was lost meanwhile"


async def test_file_system_without_hard_links_has_checkpoints_too(coordinator, tmp_path, monkeypatch):
    def refused(source, target):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(checkpoint_store.os, "link", refused)
    await asyncio.gather(learn(learner_config(tmp_path), coordinator), fill(coordinator, QUEUE))

    # Version 2 has a snapshot beside its delta, which its checkpoint shares.
    paths = sorted((tmp_path / "learner" / "checkpoints").iterdir())
    assert [checkpoint_store.read_checkpoint(path).version for path in paths] == [2, 3]


async def test_journal_that_cannot_be_written_ends_no_run(coordinator, tmp_path, monkeypatch, caplog):
    opened, num_full = Path.open, 0

    def full(path, mode="r", **options):
        nonlocal num_full
        if mode == "a" and path.name in ("versions.jsonl", "steps.jsonl") and (num_full := num_full + 1) in (3, 4):
            with opened(path, mode, **options) as file:
                file.write('{"version": ')
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return opened(path, mode, **options)

    monkeypatch.setattr(Path, "open", full)
    result, _ = await asyncio.gather(learn(learner_config(tmp_path), coordinator), fill(coordinator, QUEUE))

    assert (result.version, result.is_finished) == (3, True)
    assert [row["version"] for row in rows(tmp_path / "learner" / "versions.jsonl")] == [0, 2, 3]
    assert [row["step"] for row in rows(tmp_path / "learner" / "steps.jsonl")] == [2, 3]
    assert caplog.text.count("loses rows") == 2


async def test_disk_without_room_for_a_payload_is_the_operators_and_costs_nothing(coordinator, tmp_path, monkeypatch):
    written = version_payloads.write_delta

    def full(path, *weights, **options):
        if path.name == "v00000002.delta":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return written(path, *weights, **options)

    filling = asyncio.create_task(fill(coordinator, QUEUE))
    monkeypatch.setattr(version_payloads, "write_delta", full)
    with pytest.raises(DiskFull, match=f"no space left under {tmp_path / 'learner' / 'payloads'}"):
        await learn(learner_config(tmp_path), coordinator)
    await filling

    monkeypatch.setattr(version_payloads, "write_delta", written)
    result = await learn(learner_config(tmp_path), coordinator)
    assert (result.step, result.version) == (3, 3)


# ---- the coordinator's disk


async def _damage(core, version):
    """Change the payloads of a version, and have a reader notice."""
    digests = await core.database.run(
        lambda connection: [
            row[0] for row in connection.execute("SELECT digest FROM payloads WHERE to_version = ?", (version,))
        ]
    )
    for digest in digests:
        path = core.blobs.path(digest)
        data = bytearray(path.read_bytes())
        data[random.randrange(len(data))] ^= 1
        path.write_bytes(data)
        with pytest.raises(UnknownPayload):
            async for _ in core.read_payload(digest=digest, offset=0):
                pass


async def test_learner_that_waits_for_groups_repeats_a_head_that_no_sampler_can_pull(tmp_path):
    core = await open_coordinator(tmp_path, learner_lease_s=0.3)
    learning = asyncio.create_task(learn(learner_config(tmp_path, max_steps=1), core))
    await _until_head(core, 0)
    root = await head_root(core)
    await _damage(core, 0)

    await _until_head(core, 1)
    assert await head_root(core) == root
    plan = await core.plan_pull(have_version=-1, have_root="", want_version=1)
    assert [payload.kind for payload in plan.payloads] == [PayloadKind.SNAPSHOT]
    await fill(core, 2)
    result = await learning

    assert (result.step, result.version) == (1, 2)
    await core.close()


async def _until_head(core, version):
    async for _ in core.watch_head(after_version=version - 1):
        break


@pytest.mark.parametrize("is_parent_on_disk", [True, False])
async def test_learner_goes_on_when_the_coordinators_head_is_damaged(
    coordinator, tmp_path, monkeypatch, is_parent_on_disk
):
    """Killed between checkpoint and commit; what it needs of the parent lies on its own disk, or nowhere."""
    filling = asyncio.create_task(fill(coordinator, 2))
    config = learner_config(tmp_path, max_steps=1, snapshot_every_versions=50)
    with pytest.raises(Killed):
        await learn(config, FragileApi(coordinator, die_before=("publish_version", 2)))
    await filling
    await _damage(coordinator, 0)
    if not is_parent_on_disk:
        (tmp_path / "learner" / "checkpoints" / "v00000000" / "published.payload").unlink()

    result = await learn(config, coordinator)

    assert (result.step, result.version) == (1, 1)
    kinds = await coordinator.database.run(
        lambda connection: [row[0] for row in connection.execute("SELECT kind FROM payloads WHERE to_version = 1")]
    )
    # New samplers need a snapshot in either case.
    assert sorted(kinds) == (["delta", "snapshot"] if is_parent_on_disk else ["snapshot"])
    assert await head_root(coordinator)
