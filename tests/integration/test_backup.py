"""A backup of a running coordinator, over gRPC with an operator's certificate, under traffic: started from and checked."""

import asyncio
import dataclasses
import re
import shutil
import sqlite3
import stat
import threading
import time

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from heterorl.cli.main import app
from heterorl.cli.verify_data_dir import SOUND, verify_directory, verify_log
from heterorl.common.errors import Busy, InvalidRequest, PermissionDenied, StoreFull
from heterorl.common.rpc.maintenance import BackupClient
from heterorl.common.types.sample import RolloutNote, SampleFilter, SampleNote, SamplePage
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.coordinator.core import Coordinator
from heterorl.coordinator.groups import ledger
from heterorl.coordinator.payloads import backup
from tests.support.clock import ManualClock
from tests.support.run import Run
from tests.support.secure_run import PATIENT, SecureRun


def is_sound(directory):
    return verify_directory(directory, keys=(), is_replaying=True, console=Console(quiet=True)) == SOUND


async def begun(tmp_path, **changes):
    core = await Coordinator.open(CoordinatorConfig(data_dir=tmp_path / "data", **changes), ManualClock())
    run = Run(core, tmp_path)
    await run.begin()
    await run.publish()
    await run.register()
    return core, run


async def test_backup_under_traffic_is_one_moment_and_a_coordinator_starts_from_it(tmp_path):
    async with SecureRun(tmp_path) as secure:
        run = secure.run
        await run.begin()
        await run.publish()
        await run.register()
        is_over = False

        async def push():
            while not is_over:
                await run.push(2)

        async def publish():
            while not is_over:
                await run.publish()

        traffic = [asyncio.create_task(push()), asyncio.create_task(publish())]
        tls = secure.certificates.tls("operator")
        made, started = [], time.time()
        async with BackupClient(secure.address, tls=tls, policy=PATIENT) as client:
            for number in range(5):
                before = run.head
                made.append((before, await client.backup(name=f"b{number}")))
                assert run.head >= made[-1][1].head_version >= before
            again = await client.backup(name="b0")
            assert dataclasses.replace(again, existed_since=0.0) == made[0][1]
            assert started - 1 <= again.existed_since <= time.time()
        is_over = True
        await asyncio.gather(*traffic)

        for _, copy in made:
            directory = tmp_path / "copies" / copy.path.rpartition("/")[2]
            shutil.copytree(copy.path, directory)
            assert is_sound(directory)
            assert verify_log(directory, expected=copy.audit_digest) == SOUND
            restored = await Coordinator.open(CoordinatorConfig(data_dir=directory), ManualClock())
            status = await restored.get_status()
            assert status.head_version == copy.head_version
            counts = await restored.database.run(ledger.counts)
            assert counts == await restored.database.run(ledger.recount)
            plan = await restored.plan_pull(have_version=-1, have_root="", want_version=-1)
            for payload in plan.payloads:
                frames = [frame async for frame in restored.read_payload(digest=payload.digest, offset=0)]
                assert sum(map(len, frames)) == payload.num_bytes
            await restored.close()


async def test_only_an_operator_may_ask(tmp_path):
    async with SecureRun(tmp_path) as secure:
        for role in ("learner", "sampler"):
            async with BackupClient(secure.address, tls=secure.certificates.tls(role), policy=PATIENT) as client:
                with pytest.raises(PermissionDenied):
                    await client.backup(name="mine")


async def test_backup_has_the_samples(tmp_path):
    core, run = await begun(tmp_path, samples_every=1)
    (group,) = await run.push(1)
    await run.publish(consumed=[group])
    told = RolloutNote(completion="it is 2", reward_parts=(), log_ratios=np.zeros(0, np.float32))
    await core.note_samples(epoch=run.epoch, notes=[SampleNote(group=group, prompt="1+1=", rollouts=(told, told))])
    made = await core.backups.make("one")
    await core.close()

    restored = await Coordinator.open(CoordinatorConfig(data_dir=made.path), ManualClock())
    (summary,) = (await restored.list_samples(wanted=SampleFilter(), page=SamplePage())).samples
    sample = await restored.get_sample(sample_id=summary.id)
    await restored.close()

    assert (summary.group, sample.prompt) == (group, "1+1=")
    assert [each.completion for each in sample.rollouts] == ["it is 2", "it is 2"]


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../other", "/tmp/x", "a/b", "a" * 65, "-rf", ".hidden", "x.partial", "a\n"]
)
async def test_name_is_no_path(tmp_path, name):
    core, _ = await begun(tmp_path)
    with pytest.raises(InvalidRequest, match="name"):
        await core.backups.make(name)
    await core.close()
    assert not (tmp_path / "data" / "backups").exists()


async def test_directory_that_is_no_backup_is_left_alone(tmp_path):
    core, _ = await begun(tmp_path)
    (tmp_path / "data" / "backups" / "mine").mkdir(parents=True)
    with pytest.raises(InvalidRequest, match="is not a backup"):
        await core.backups.make("mine")
    await core.close()


async def test_two_runs_share_a_directory_of_backups(tmp_path):
    # The one run's backup is in progress when the other one begins its own.
    going_on = tmp_path / "all" / ".other.partial"
    going_on.mkdir(parents=True)
    core, _ = await begun(tmp_path / "a", backup_dir=tmp_path / "all")
    config = CoordinatorConfig(data_dir=tmp_path / "b" / "data", backup_dir=tmp_path / "all", run_id="other")
    other = await Coordinator.open(config, ManualClock())

    made = await core.backups.make("nightly")
    assert going_on.is_dir()
    assert (await core.backups.make("nightly")).path == made.path
    with pytest.raises(InvalidRequest, match="is a backup of run run"):
        await other.backups.make("nightly")
    assert (await other.backups.make("second")).path == str(tmp_path / "all" / "second")

    await core.close()
    await other.close()
    assert sorted(path.name for path in (tmp_path / "all").iterdir()) == ["nightly", "second"]


async def test_restored_run_goes_on_and_the_first_one_is_untouched(tmp_path):
    core, run = await begun(tmp_path)
    await run.publish(consumed=await run.push(1))
    made = await core.backups.make("one")
    await run.publish()
    await core.close()

    restored = await Coordinator.open(CoordinatorConfig(data_dir=made.path), ManualClock())
    again = Run(restored, tmp_path)
    again.arena, again.head, again.sequence, again.roots = run.arena, made.head_version, run.sequence, run.roots
    await again.begin(request_id="after")
    await again.register()
    assert len(await again.push(1)) == 1
    await restored.close()
    assert is_sound(tmp_path / "data")


async def test_deletion_goes_on_during_a_backup_and_spares_what_the_copy_names(tmp_path, monkeypatch):
    core, run = await begun(tmp_path, pull_lease_s=0.001, keep_versions=64)
    await run.publish(snapshot=True)
    spared = len(core.blobs.stored())
    real = backup.sync_file
    left = []

    async def collect():
        for _ in range(90):
            await run.publish(snapshot=True)
        core.clock.advance(10.0)
        await core.collector._verify_newest("")
        await core.collector.collect(missing_bytes=1)
        left.append(len(core.blobs.stored()))

    def slow(path):
        # Between the copy of the store and the first link.
        if not left:
            asyncio.run_coroutine_threadsafe(collect(), loop).result(120)
        return real(path)

    loop = asyncio.get_running_loop()
    monkeypatch.setattr(backup, "sync_file", slow)
    made = await asyncio.wait_for(core.backups.make("one"), 150)
    await run.publish()
    await core.collector.collect(missing_bytes=1)

    assert made.num_payloads == spared
    assert left[0] < 90
    assert len(core.blobs.stored()) <= left[0] + 1 - spared, "what only the backup needed goes after it"
    assert is_sound(tmp_path / "data" / "backups" / "one")
    await core.close()


async def test_another_disk_gets_copies(tmp_path, monkeypatch):
    core, _ = await begun(tmp_path, backup_dir=tmp_path / "elsewhere")

    def refuses(_path, _target):
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(backup.Path, "hardlink_to", refuses)
    made = await core.backups.make("one")
    await core.close()

    assert made.path == str(tmp_path / "elsewhere" / "one")
    assert is_sound(tmp_path / "elsewhere" / "one")


async def test_one_backup_at_a_time_and_what_a_crash_left_goes(tmp_path):
    core, _ = await begun(tmp_path)
    left = tmp_path / "data" / "backups" / ".run.partial"
    left.mkdir(parents=True)
    first = asyncio.create_task(core.backups.make("one"))
    same = asyncio.create_task(core.backups.make("one"))
    await asyncio.sleep(0)
    with pytest.raises(Busy):
        await core.backups.make("two")

    assert await first == await same
    assert sorted(path.name for path in left.parent.iterdir()) == ["one"]
    await core.close()


async def test_caller_that_went_away_leaves_no_half_backup(tmp_path):
    core, _ = await begun(tmp_path)
    task = asyncio.create_task(core.backups.make("one"))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

    assert (await core.backups.make("one")).head_version == 0
    assert is_sound(tmp_path / "data" / "backups" / "one")
    await core.close()


@pytest.mark.parametrize(("code", "error"), [(sqlite3.SQLITE_FULL, StoreFull), (sqlite3.SQLITE_CANTOPEN, Busy)])
async def test_copy_that_cannot_be_written_harms_nobody(tmp_path, monkeypatch, code, error):
    core, run = await begun(tmp_path)

    def fails(_connection, _path):
        raised = sqlite3.OperationalError("no")
        raised.sqlite_errorcode = code
        raise backup._of_copy(raised)

    with monkeypatch.context() as patch:
        patch.setattr(backup, "_copy", fails)
        with pytest.raises(error):
            await core.backups.make("one")
    assert list((tmp_path / "data" / "backups").iterdir()) == []
    await run.publish()
    assert (await core.backups.make("one")).head_version == 1
    await core.close()


async def test_directory_that_takes_no_backup_is_named(tmp_path):
    (tmp_path / "elsewhere").write_text("a file")
    core, run = await begun(tmp_path, backup_dir=tmp_path / "elsewhere")

    with pytest.raises(Busy, match=f"cannot be written: .*{tmp_path / 'elsewhere'}.*check that file"):
        await core.backups.make("one")
    await run.publish()
    await core.close()


async def test_payload_that_is_gone_is_no_part_of_the_next_attempt(tmp_path):
    core, run = await begun(tmp_path)
    await run.publish(snapshot=True)
    (payload,) = (await core.plan_pull(have_version=-1, have_root="", want_version=0)).payloads
    core.blobs.path(payload.digest).unlink()

    with pytest.raises(Busy, match="is missing"):
        await core.backups.make("one")
    assert (await core.backups.make("one")).num_payloads == 1
    await core.close()


async def test_backup_is_its_owners_alone(tmp_path):
    core, _ = await begun(tmp_path)
    await core.backups.make("one")
    await core.close()

    for path in (tmp_path / "data", tmp_path / "data" / "backups", tmp_path / "data" / "backups" / "one"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        if (path / "coordinator.sqlite").exists():
            assert stat.S_IMODE((path / "coordinator.sqlite").stat().st_mode) == 0o600


async def test_command_says_where_the_copy_lies_and_that_another_backup_runs(tmp_path, monkeypatch):
    is_begun, is_over, real = asyncio.Event(), threading.Event(), backup.sync_file
    loop = asyncio.get_running_loop()

    def slow(path):
        loop.call_soon_threadsafe(is_begun.set)
        assert is_over.wait(60)
        return real(path)

    async with SecureRun(tmp_path) as secure:
        await secure.run.begin()
        await secure.run.publish()
        options = ["--credentials", str(secure.certificates.node("operator", "eu-1")), "--name", "one"]
        command = ["backup", secure.address, *options]
        result, again = [await asyncio.to_thread(CliRunner().invoke, app, command) for _ in range(2)]
        monkeypatch.setattr(backup, "sync_file", slow)
        other = asyncio.create_task(secure.core.backups.make("two"))
        await is_begun.wait()
        refused = await asyncio.to_thread(CliRunner().invoke, app, ["backup", secure.address, *options[:-1], "three"])
        is_over.set()
        await other

    assert result.exit_code == 0, result.output
    assert re.search(r"data/backups/one on .*: version \d+, \d+ payloads", result.output)
    assert "nothing new" not in result.output
    assert re.match(r"backup one exists since \d{4}-.*; nothing new was written\n.*data/backups/one on ", again.output)
    assert isinstance(refused.exception, Busy), refused.exception
    assert "backup two is in progress" in str(refused.exception)
