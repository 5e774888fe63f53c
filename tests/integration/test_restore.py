"""A run that goes back to a backup: in either store, with what the backup had and nothing else, where all agree to it."""

import asyncio
import contextlib
import shutil
import sqlite3

import pytest
import tomli_w
from rich.console import Console
from typer.testing import CliRunner

from heterorl.cli.main import app
from heterorl.cli.verify_data_dir import SOUND, verify_directory, verify_log
from heterorl.common.errors import ConfigError, OperatorError, StaleEpoch
from heterorl.common.identity.signing import new_key
from heterorl.common.types.rollout import PushStatus
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.coordinator.core import Coordinator
from heterorl.coordinator.groups import ledger
from heterorl.coordinator.offline.restore_backup import EPOCHS_BEYOND, restore
from heterorl.sampler.trust_record import RunReplaced
from tests.support.clock import ManualClock
from tests.support.debian import postgres_binaries
from tests.support.policy_site import sampling, serving
from tests.support.run import Run

pytestmark = [pytest.mark.skipif(postgres_binaries() is None, reason="PostgreSQL is not installed: make programs")]
STORES = ["sqlite", "postgres"]
NOW = 1_700_000_000.0


@pytest.fixture
def url_of(postgres):
    """The store.url of a name, in one of the stores."""
    yield lambda store, name: postgres.make_schema(name) if store == "postgres" else ""
    postgres.drop_schemas()


async def opened(data_dir, url):
    return await Coordinator.open(CoordinatorConfig(data_dir=data_dir, store={"url": url}), ManualClock())


async def begun(core, tmp_path):
    run = Run(core, tmp_path)
    await run.begin()
    await run.publish()
    await run.register()
    return run


def rows(path):
    """Everything in a file of SQLite's."""
    with contextlib.closing(sqlite3.connect(path)) as file:
        names = [name for (name,) in file.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        return {name: sorted(file.execute(f"SELECT * FROM {name}"), key=repr) for name in names if "stat" not in name}


@pytest.mark.parametrize("after", STORES)
@pytest.mark.parametrize("before", STORES)
async def test_backup_goes_on_in_either_store_and_knows_nothing_that_came_after(url_of, tmp_path, before, after):
    core = await opened(tmp_path / "data", url_of(before, "before"))
    run = await begun(core, tmp_path)
    kept = [run.group(work) for work in await run.lease(5)]
    await core.push_groups(kept)
    await run.publish(consumed=[group.id for group in kept[:2]])
    made = await core.backups.make("one")
    arena, sequence = run.arena, run.sequence
    lost = [run.group(work) for work in await run.lease(3)]
    assert {outcome.status for outcome in await core.push_groups(lost)} == {PushStatus.ACCEPTED}
    await run.publish()
    await run.publish()
    await core.close()

    source = tmp_path / "copy"
    shutil.copytree(made.path, source)
    found = restore(source, run_id="run", data_dir=tmp_path / "new", url=url_of(after, "after"), now=NOW)
    assert (found.head_version, found.num_groups, found.missing) == (1, 3, ())
    assert found.num_payloads == made.num_payloads
    assert verify_directory(source, keys=(), is_replaying=True, console=Console(quiet=True)) == SOUND
    assert verify_log(source, expected=made.audit_digest) == SOUND

    again = await opened(tmp_path / "new", url_of(after, "after"))
    counts = await again.database.run(ledger.counts)
    assert counts == await again.database.run(ledger.recount)
    assert (counts.acked, counts.consumed, (await again.get_status()).head_version) == (5, 2, 1)
    with pytest.raises(StaleEpoch):
        # Whoever held a lease when the backup was made, or after it, holds none here.
        await again.renew_lease(epoch=run.epoch)

    other = Run(again, tmp_path)
    other.arena, other.head, other.roots, other.sequence = arena, 1, run.roots, sequence
    await other.begin(request_id="after")
    assert other.epoch > EPOCHS_BEYOND
    await other.register()
    assert {outcome.status for outcome in await again.push_groups(kept)} == {PushStatus.DUPLICATE}
    assert PushStatus.DUPLICATE not in {outcome.status for outcome in await again.push_groups(lost)}
    plan = await again.plan_pull(have_version=-1, have_root="", want_version=-1)
    for payload in plan.payloads:
        assert sum([len(frame) async for frame in again.read_payload(digest=payload.digest, offset=0)])
    assert await other.publish(consumed=[kept[2].id]) == 2
    await again.close()


async def test_no_row_changes_between_the_stores_and_no_number_is_given_out_twice(url_of, tmp_path):
    from heterorl.coordinator.store.postgres.postgres_engine import connect
    from heterorl.coordinator.store.postgres.postgres_tables import read_into

    core = await opened(tmp_path / "data", "")
    run = await begun(core, tmp_path)
    await run.push(6)
    await run.publish(consumed=(await run.push(1)), snapshot=True)
    # The newest numbers are of rows that are gone.
    await core.database.run(lambda c: c.execute("DELETE FROM groups WHERE arrival > 5").rowcount)
    made = await core.backups.make("one")
    await core.close()

    url = url_of("postgres", "rows")
    for name, target in (("in", url), ("file", "")):
        restore(tmp_path / "data/backups/one", run_id="run", data_dir=tmp_path / name, url=target, now=NOW)
    with connect(url) as raw:
        read_into(raw, tmp_path / "out.sqlite")

    expected = rows(tmp_path / "file" / "coordinator.sqlite")
    assert len(expected["groups"]) == 5
    assert ("groups", 7) in expected["sqlite_sequence"]
    assert made.num_payloads == len({row[3] for row in expected["payloads"]})
    assert rows(tmp_path / "out.sqlite") == expected


async def test_backup_of_postgres_under_traffic_is_one_moment(url_of, tmp_path):
    core = await opened(tmp_path / "data", url_of("postgres", "traffic"))
    run = await begun(core, tmp_path)
    is_over = False

    async def push():
        while not is_over:
            await run.push(2)

    async def publish():
        while not is_over:
            await run.publish()

    traffic = [asyncio.create_task(push()), asyncio.create_task(publish())]
    made = []
    for number in range(3):
        before = run.head
        made.append(await core.backups.make(f"b{number}"))
        assert run.head >= made[-1].head_version >= before
        while run.head == before:  # noqa: ASYNC110 - `publish` is on its way
            await asyncio.sleep(0)
    is_over = True
    await asyncio.gather(*traffic)
    await core.close()

    assert made[-1].head_version > made[0].head_version
    for number, copy in enumerate(made):
        assert verify_directory(tmp_path / f"data/backups/b{number}", keys=(), is_replaying=True,
                                console=Console(quiet=True)) == SOUND  # fmt: skip
        directory = tmp_path / f"new-{number}"
        restore(tmp_path / f"data/backups/b{number}", run_id="run", data_dir=directory, url="", now=NOW)
        restored = await opened(directory, "")
        counts = await restored.database.run(ledger.counts)
        assert counts == await restored.database.run(ledger.recount)
        assert (await restored.get_status()).head_version == copy.head_version
        await restored.close()


async def test_what_is_committed_between_two_tables_is_in_neither(url_of, tmp_path, monkeypatch):
    from heterorl.coordinator.store.postgres import postgres_tables

    core = await opened(tmp_path / "data", url_of("postgres", "moment"))
    run = await begun(core, tmp_path)
    await run.push(2)
    loop, real = asyncio.get_running_loop(), postgres_tables._read_table

    def slow(*words):
        real(*words)
        asyncio.run_coroutine_threadsafe(run.push(1), loop).result(30)

    monkeypatch.setattr(postgres_tables, "_read_table", slow)
    await core.backups.make("one")
    pushed = run.sequence
    await core.close()

    restore(tmp_path / "data/backups/one", run_id="run", data_dir=tmp_path / "new", url="", now=NOW)
    restored = await opened(tmp_path / "new", "")
    counts = await restored.database.run(ledger.counts)
    assert counts == await restored.database.run(ledger.recount)
    assert (counts.acked, pushed > 10) == (2, True)
    await restored.close()


async def test_place_that_is_taken_is_left_alone(url_of, tmp_path):
    core = await opened(tmp_path / "data", "")
    await begun(core, tmp_path)
    await core.backups.make("one")
    source, url = tmp_path / "data" / "backups" / "one", url_of("postgres", "taken")

    def put(**changes):
        values = {"run_id": "run", "data_dir": tmp_path / "new", "url": "", "now": NOW} | changes
        return restore(changes.pop("source", source), **{k: v for k, v in values.items() if k != "source"})

    await core.close()
    with pytest.raises(ConfigError, match="is not empty"):
        put(data_dir=tmp_path / "data")
    with pytest.raises(ConfigError, match="is of run run, this coordinator serves other"):
        put(run_id="other")
    with pytest.raises(OperatorError, match="has no coordinator.sqlite"):
        put(source=tmp_path)

    blob = next((source / "blobs").glob("*/*"))
    blob.write_bytes(blob.read_bytes()[:-1] + b"x")
    assert len(put(url=url).missing) == 1
    with pytest.raises(ConfigError, match="there is a store already"):
        put(url=url, data_dir=tmp_path / "second")
    held = await opened(tmp_path / "new", url)
    with pytest.raises(OperatorError, match="a coordinator has the store"):
        put(url=url, data_dir=tmp_path / "second")
    await held.close()
    assert list((tmp_path / "second").iterdir()) == []
    blob.unlink()
    blob.mkdir()
    with pytest.raises(OperatorError, match=f"^{blob} cannot be read: .*a user that can read the backup"):
        put(data_dir=tmp_path / "second")
    with pytest.raises(OperatorError, match="is in PostgreSQL.*heterorl backup"):
        verify_directory(tmp_path / "new", keys=(), is_replaying=False, console=Console(quiet=True))


def command(*words):
    result = CliRunner().invoke(app, list(map(str, words)))
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("store", STORES)
async def test_site_that_saw_newer_versions_refuses_until_its_operator_agrees(url_of, tmp_path, store):
    key, site, trusted = new_key(tmp_path / "learner.key"), tmp_path / "site", []
    trusted.append(key.public_key)
    core = await opened(tmp_path / "data", url_of(store, "old"))
    run = Run(core, tmp_path)
    run.signer = key
    await run.begin()
    for _ in range(2):
        await run.publish()
    made = await core.backups.make("one")
    arena = run.arena
    await core.close()
    async with serving(tmp_path / "data", store={"url": url_of(store, "old")}) as client:
        run.api = client
        async with sampling(client, site, trusted) as sampler:
            await sampler.reach(1)
            await run.publish()
            await run.publish()
            await sampler.reach(3)

    config = {"run_id": "run", "data_dir": str(tmp_path / "new"), "store": {"url": url_of(store, "new")}}
    (tmp_path / "coordinator.toml").write_text(tomli_w.dumps(config))
    (tmp_path / "sampler.toml").write_text(tomli_w.dumps({"site": "eu-1", "state_dir": str(site)}))
    said = command("restore", made.path, "--config", tmp_path / "coordinator.toml")
    assert "version 1, 0 groups that wait" in said
    assert "accept-rewind run:1" in said

    async with serving(tmp_path / "new", store=config["store"]) as client:
        async with sampling(client, site, trusted) as sampler:
            error = await sampler.end()
            assert isinstance(error, RunReplaced)
            assert "the head is version 1, but version 3 was seen before" in str(error)
            assert "heterorl accept-rewind RUN:V" in str(error)
        other = Run(client, tmp_path)
        other.signer, other.arena, other.head, other.roots = key, arena, 1, dict(run.roots)
        await other.begin(request_id="after")
        # Another second version than the one that was lost.
        other.step()
        await other.publish(snapshot=True)
        assert other.roots[2] != run.roots[2]
        said = await asyncio.to_thread(
            command, "accept-rewind", "run:1", "--config", tmp_path / "sampler.toml", "--yes"
        )
        assert "version 3, state" in said
        assert "must descend from version 1" in said
        async with sampling(client, site, trusted) as sampler:
            assert (await sampler.reach(2)).manifest.state_root == other.roots[2]

    # Agreed once: going back again, here to the history that was given up, is refused again.
    async with serving(tmp_path / "data", store={"url": url_of(store, "old")}) as client:
        async with sampling(client, site, trusted) as sampler:
            error = await sampler.end()
            assert isinstance(error, RunReplaced)
            assert "does not descend from the version 2" in str(error)
