"""Whose payloads a prefix of a bucket has: chosen when a run begins, or copied there before a start; one store a prefix."""

import contextlib
from pathlib import Path

import pytest
from rich.console import Console

from heterorl.cli.verify_data_dir import SOUND, verify_directory
from heterorl.common.errors import ConfigError, CorruptStore, OperatorError
from heterorl.common.process.clock import SystemClock
from heterorl.common.pull.puller import Puller
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.coordinator.core import Coordinator
from heterorl.coordinator.offline.restore_backup import restore
from heterorl.coordinator.store.bucket_storage import Objects
from tests.support.bucket import BucketServer
from tests.support.bucketed import payloads_of
from tests.support.relayed import LargeRun

NOW = 1_700_000_000.0


@pytest.fixture
def config(bucket, prefix, tmp_path):
    def make(name, *, where=prefix, url="", **payloads):
        return CoordinatorConfig(
            data_dir=tmp_path / name,
            payloads=bucket.config(tmp_path, prefix=where, **payloads) if where else {},
            store={"url": url},
            max_staleness_versions=1,
            keep_versions=1,
        )

    return make


async def begun(core, directory, *, versions):
    directory.mkdir()
    run = LargeRun(core, directory)
    await run.begin()
    for _ in range(versions):
        await run.publish(snapshot=True)
    return run


async def pulled(core, run, spool):
    puller = Puller(api=core, spool=spool, layout=run.layout, clock=SystemClock())
    return (await puller.pull(held=None, want_version=-1)).manifest


def copy_payloads(bucket, data_dir, prefix):
    """What a cloud's own command does: the tree of files becomes objects."""
    for path in (data_dir / "blobs").rglob("*"):
        if path.is_file():
            bucket.replace(prefix, str(path.relative_to(data_dir)), path.read_bytes())


def forget_copies(data_dir):
    for path in (data_dir / "blobs").rglob("*"):
        if path.is_file():
            path.unlink()


async def test_restored_copy_takes_nothing_from_the_live_run_and_goes_on_in_a_prefix_of_its_own(
    bucket, config, prefix, tmp_path
):
    live = await Coordinator.open(config("live"), SystemClock())
    run = await begun(live, tmp_path / "run", versions=3)
    # The backup has what is in the bucket alone.
    forget_copies(tmp_path / "live")
    backup = await live.backups.make("one")
    await run.publish(snapshot=True)
    before = bucket.names(prefix)
    assert len(payloads_of(before)) == 4

    found = restore(tmp_path / "live/backups/one", run_id="run", data_dir=tmp_path / "drill", url="", now=NOW)
    assert (found.num_payloads, found.missing) == (backup.num_payloads, ())
    with pytest.raises(ConfigError, match="has the payloads of another store.*name another prefix"):
        await Coordinator.open(config("drill"), SystemClock())
    assert bucket.names(prefix) == before

    other = f"{prefix}-drill"
    with pytest.raises(ConfigError, match="lacks 3 of the 3 payloads of this run.*begin a new run"):
        await Coordinator.open(config("drill", where=other), SystemClock())
    assert bucket.names(other) == []
    copy_payloads(bucket, tmp_path / "drill", other)
    drill = await Coordinator.open(config("drill", where=other), SystemClock())
    assert {name.rpartition("/")[2] for name in payloads_of(bucket.names(other))} == drill.context.storage.digests()
    again = await begun(drill, tmp_path / "again", versions=0)
    again.head, again.arena = found.head_version, run.arena
    for _ in range(3):
        await again.publish(snapshot=True)
        await drill.collector.collect(missing_bytes=1)
    forget_copies(tmp_path / "drill")
    assert (await pulled(drill, run, tmp_path / "spool-drill")).state_root == again.roots[5]
    await drill.close()

    assert bucket.names(prefix) == before
    forget_copies(tmp_path / "live")
    assert (await pulled(live, run, tmp_path / "spool")).state_root == run.roots[3]
    await live.close()


async def test_restored_copy_without_a_bucket_has_its_payloads_in_files(config, tmp_path):
    live = await Coordinator.open(config("live"), SystemClock())
    run = await begun(live, tmp_path / "run", versions=2)
    await live.backups.make("one")
    await live.close()
    # Files of its own directory are copies of some payloads.
    with pytest.raises(OperatorError, match=f"the payloads of {tmp_path / 'live'} are in a bucket.*make a backup"):
        restore(tmp_path / "live", run_id="run", data_dir=tmp_path / "new", url="", now=NOW)
    found = restore(tmp_path / "live/backups/one", run_id="run", data_dir=tmp_path / "new", url="", now=NOW)
    assert (found.num_payloads, found.missing) == (2, ())
    core = await Coordinator.open(config("new", where=""), SystemClock())
    assert (await pulled(core, run, tmp_path / "spool")).state_root == run.roots[1]
    await core.close()


@pytest.mark.parametrize("engine", ["sqlite", "postgres"])
async def test_coordinator_on_the_directory_of_a_backup_has_no_right_to_the_prefix(
    request, bucket, config, prefix, tmp_path, engine
):
    url = request.getfixturevalue("url") if engine == "postgres" else ""
    live = await Coordinator.open(config("live", url=url), SystemClock())
    run = await begun(live, tmp_path / "run", versions=2)
    backup = await live.backups.make("one")
    await run.publish(snapshot=True)
    before = bucket.names(prefix)
    with pytest.raises(ConfigError, match="has the payloads of another store"):
        await Coordinator.open(config(backup.path), SystemClock())
    assert bucket.names(prefix) == before
    forget_copies(tmp_path / "live")
    assert (await pulled(live, run, tmp_path / "spool")).state_root == run.roots[2]
    await live.close()
    # Files of the directory are copies of some payloads.
    for directory, expected in ((tmp_path / "live", pytest.raises(OperatorError, match="make a backup")),
                                (Path(backup.path), contextlib.nullcontext())):  # fmt: skip
        with expected:
            assert verify_directory(directory, keys=(), is_replaying=True, console=Console(quiet=True)) == SOUND
    # It starts where nothing is another's: in files.
    core = await Coordinator.open(config(backup.path, where=""), SystemClock())
    assert (await pulled(core, run, tmp_path / "spool-copy")).state_root == run.roots[1]
    await core.close()


async def test_prefix_whose_mark_was_deleted_is_claimed_and_who_had_it_deletes_nothing_and_ends(
    bucket, config, prefix, tmp_path
):
    live = await Coordinator.open(config("live"), SystemClock())
    run = await begun(live, tmp_path / "run", versions=3)
    await live.backups.make("one")
    restore(tmp_path / "live/backups/one", run_id="run", data_dir=tmp_path / "new", url="", now=NOW)
    with pytest.raises(ConfigError, match=f"{bucket.read(prefix, 'run')}.*delete the object run"):
        await Coordinator.open(config("new"), SystemClock())
    bucket.remove(prefix, "run")
    core = await Coordinator.open(config("new"), SystemClock())
    before = bucket.names(prefix)

    digest = next(iter(live.context.storage.digests()))
    with pytest.raises(CorruptStore, match="another store has taken the prefix"):
        await live.context.storage.erase(digest)
    with pytest.raises(CorruptStore):
        await live.context.storage.set_aside(digest)
    assert live.on_fatal.done(), "the process ends"
    assert bucket.names(prefix) == before
    await live.close()
    with pytest.raises(ConfigError, match="has the payloads of another store"):
        await Coordinator.open(config("live"), SystemClock())

    assert (await pulled(core, run, tmp_path / "spool")).state_root == run.roots[2]
    await core.close()


async def test_two_that_claim_a_prefix_at_once_do_not_both_get_it(bucket, config, prefix, monkeypatch):
    create = Objects._create

    async def overtaken(self, key, data, **options):
        # Between the look and the put somebody else was faster.
        bucket.replace(prefix, "run", b"somebody else")
        return await create(self, key, data, **options)

    monkeypatch.setattr(Objects, "_create", overtaken)
    with pytest.raises(ConfigError, match="somebody else"):
        await Coordinator.open(config("new"), SystemClock())
    assert bucket.read(prefix, "run") == "somebody else"


async def test_bucket_is_chosen_when_a_run_begins_or_has_a_copy_of_all_payloads(bucket, config, prefix, tmp_path):
    core = await Coordinator.open(config("data", where=""), SystemClock())
    run = await begun(core, tmp_path / "run", versions=3)
    await core.close()
    with pytest.raises(ConfigError, match=r"payloads\.bucket: lacks 3 of the 3 payloads of this run"):
        await Coordinator.open(config("data"), SystemClock())
    assert bucket.names(prefix) == []
    # Nothing has changed: it goes on in files.
    core = await Coordinator.open(config("data", where=""), SystemClock())
    await core.close()

    copy_payloads(bucket, tmp_path / "data", prefix)
    core = await Coordinator.open(config("data"), SystemClock())
    forget_copies(tmp_path / "data")
    assert (await pulled(core, run, tmp_path / "spool")).state_root == run.roots[2]
    await core.close()
    with pytest.raises(ConfigError, match="payloads of this run are in a bucket"):
        await Coordinator.open(config("data", where=""), SystemClock())
    with pytest.raises(ConfigError, match="lacks 3 of the 3 payloads"):
        await Coordinator.open(config("data", where=f"{prefix}-other"), SystemClock())


async def test_coordinator_without_the_files_has_no_right_to_the_prefix(bucket, config, prefix, url, tmp_path):
    core = await Coordinator.open(config("a", where="", url=url), SystemClock())
    run = await begun(core, tmp_path / "run", versions=2)
    await core.close()
    copy_payloads(bucket, tmp_path / "a", prefix)
    with pytest.raises(ConfigError, match="does not have the payloads of this store"):
        await Coordinator.open(config("b", url=url), SystemClock())
    for name in ("a", "b"):
        core = await Coordinator.open(config(name, url=url), SystemClock())
        assert (await pulled(core, run, tmp_path / f"spool-{name}")).state_root == run.roots[1]
        await core.close()


async def test_moment_without_the_bucket_is_waited_for(config, tmp_path):
    server = BucketServer(tmp_path / "disk")

    class Clock(SystemClock):
        waited = 0

        async def sleep(self, seconds):
            self.waited += 1
            server.start()

    try:
        made = config("data").model_copy(update={"payloads": server.config(tmp_path, prefix="p")})
        server.kill()
        clock = Clock()
        core = await Coordinator.open(made, clock)
        await core.close()
        assert clock.waited == 1
    finally:
        server.stop()
