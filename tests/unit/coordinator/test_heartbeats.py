"""Heartbeats that wait together cost the store one operation, and each gets its own answer."""

import asyncio
import sqlite3

import pytest

from heterorl.common.errors import StoreFull
from heterorl.common.types.common import SiteId
from heterorl.common.types.rollout import PushStatus
from heterorl.common.types.run import Command, Heartbeat
from heterorl.coordinator import run_column as column
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.coordinator.core import Coordinator
from heterorl.coordinator.sites import incarnations, quarantine
from heterorl.coordinator.store.sqlite import SqliteEngine
from tests.support.clock import ManualClock
from tests.support.run import INCARNATION, SITE, Run

NUM_SITES = 20


@pytest.fixture
async def core(tmp_path):
    core = await Coordinator.open(CoordinatorConfig(data_dir=tmp_path / "data"), ManualClock())
    run = Run(core, tmp_path)
    await run.begin()
    await run.publish()
    for number in range(NUM_SITES):
        await core.register(run.registration(site=SiteId(f"site-{number}")))
    core.incarnation = run.registration().incarnation
    yield core
    await core.close()


def beat(core, site, incarnation=""):
    return core.heartbeat(
        Heartbeat(
            site=SiteId(site), incarnation=incarnation or core.incarnation, policy_version=0, state_root="",
            tokens_per_s=1.0,
        )
    )  # fmt: skip


async def test_those_who_wait_together_share_an_operation_and_each_gets_its_own_answer(core, monkeypatch):
    asked = []
    commands_of = column.commands_of

    def counting(connection, holders, *others):
        asked.append(len(holders))
        return commands_of(connection, holders, *others)

    def widen(connection):
        connection.execute(
            "INSERT INTO beyond_watermark (site, incarnation, sequence) VALUES ('site-3', ?, ?)",
            (core.incarnation, incarnations.MAX_GAP),
        )

    monkeypatch.setattr(column, "commands_of", counting)
    await core.database.run(widen)
    held = asyncio.Event()
    loop = asyncio.get_running_loop()
    # The store's thread has something else to do until all wait for it.
    before = core.database.submit(lambda _: asyncio.run_coroutine_threadsafe(held.wait(), loop).result(20))
    calls = [asyncio.create_task(beat(core, f"site-{number}")) for number in range(NUM_SITES)]
    strangers = [
        asyncio.create_task(beat(core, *holder)) for holder in (("other",), ("site-1", "other"), ("site-1\0", "x"))
    ]
    await asyncio.sleep(0)
    calls[0].cancel()
    held.set()
    await before

    answers = await asyncio.gather(*calls[1:])
    assert asked == [NUM_SITES + len(strangers)]
    assert [answer for answer in answers if answer] == [answers[2]] == [(Command.REGISTER,)]
    assert await asyncio.gather(*strangers) == [(Command.REGISTER,)] * 3

    # Whoever comes later is not told what was true before.
    await core.drain(reason="maintenance")
    assert await beat(core, "site-1") == (Command.DRAIN,)
    assert await beat(core, "site-3") == (Command.DRAIN, Command.REGISTER)
    assert asked[1:] == [1, 1]


@pytest.mark.sqlite
async def test_heartbeats_are_answered_again_after_a_store_that_could_not_begin(tmp_path):
    """They joined the round that had failed, for the rest of the process."""
    is_full = False

    class Full(SqliteEngine):
        def begin(self):
            nonlocal is_full
            if is_full:
                is_full = False
                error = sqlite3.OperationalError("database or disk is full")
                error.sqlite_errorcode = sqlite3.SQLITE_FULL
                raise error
            super().begin()

    config = CoordinatorConfig(data_dir=tmp_path / "data")
    engine = Full.open(config.data_dir / "coordinator.sqlite")
    core = await Coordinator.open(config, ManualClock(), engine=engine)
    try:
        run = Run(core, tmp_path)
        await run.begin()
        await run.publish()
        await run.register()
        is_full = True
        with pytest.raises(StoreFull):
            await beat(core, SITE, INCARNATION)
        assert await beat(core, SITE, INCARNATION) == ()
    finally:
        await core.close()


async def test_site_whose_outbox_finds_no_room_ends_with_the_run(tmp_path):
    """No learner takes groups out of the queue any more: the sampler's drain would never end."""
    core = await Coordinator.open(CoordinatorConfig(data_dir=tmp_path / "data", groups_per_version=9), ManualClock())
    core.context.queue.quotas._pending_limit = 400
    run = Run(core, tmp_path)
    await run.begin()
    await run.publish()
    await run.register()
    groups = [run.group(work) for work in await run.lease(9)]
    await core.drain(reason="step 1 of 1 is reached", epoch=run.epoch)
    outcomes = await core.push_groups(groups)
    assert {outcome.status for outcome in outcomes} == {PushStatus.ACCEPTED, PushStatus.RETRY}
    assert await beat(core, SITE, INCARNATION) == (Command.DRAIN,), "the learner still takes groups"

    await core.release_lease(epoch=run.epoch)

    assert await beat(core, SITE, INCARNATION) == (Command.STOP,)
    await core.close()


@pytest.mark.sqlite
async def test_heartbeats_and_leases_cost_the_same_whatever_other_sites_do(core, tmp_path):
    """Each pair of a site and an incarnation was looked up for each heartbeat, and each quarantine for each lease."""
    steps = []

    def count(connection, holders):
        steps.clear()
        connection.set_progress_handler(lambda: steps.append(1), 1)
        found = incarnations.wide_gaps(connection, holders)
        connection.set_progress_handler(None, 0)
        assert found == dict.fromkeys(holders, False)
        return len(steps)

    def lease_steps(connection):
        steps.clear()
        connection.set_progress_handler(lambda: steps.append(1), 1)
        quarantine.check_site(connection, SiteId("site-1"))
        connection.set_progress_handler(None, 0)
        return len(steps)

    def others(connection):
        connection.executemany(
            "INSERT INTO quarantines VALUES (?, 0, 'off')", [(f"other-{number}",) for number in range(500)]
        )
        connection.executemany(
            "INSERT INTO sites (site, incarnation, engine, dtype) VALUES (?, ?, 'e', 'd')",
            [(f"many-{number}", f"own-{number}") for number in range(400)],
        )

    before = await core.database.run(lease_steps)
    await core.database.run(others)
    few = await core.database.run(lambda c: count(c, [(f"many-{number}", f"own-{number}") for number in range(40)]))
    many = await core.database.run(lambda c: count(c, [(f"many-{number}", f"own-{number}") for number in range(400)]))

    assert await core.database.run(lease_steps) == before
    assert many < 11 * few
