"""Coordinators over PostgreSQL that follow one another: real processes, a real server, and what each death costs."""

import asyncio
import os
import signal
import time
import urllib.request

import pytest

from heterorl.common.errors import ConfigError, StoreFull, StoreHeld, StoreLost
from heterorl.common.identity.tls import TlsConfig
from heterorl.common.rpc.calls import RetryPolicy
from heterorl.common.rpc.client import CoordinatorClient
from heterorl.common.types.rollout import PushStatus
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.coordinator.core import Coordinator
from heterorl.coordinator.store.database import Database, get_meta, set_meta
from heterorl.coordinator.store.disk_space import HEALED_S, POSTGRES_IS_FULL
from heterorl.coordinator.store.engine_choice import open_engine, standby_at
from heterorl.demo.processes import start, stop
from tests.support.clock import ManualClock
from tests.support.limits import WAIT_S
from tests.support.ports import free_port
from tests.support.run import Run

psycopg = pytest.importorskip("psycopg")

from heterorl.coordinator.store.postgres import postgres_engine as engines  # noqa: E402 - needs psycopg
from heterorl.coordinator.store.postgres.postgres_engine import connect, open_store, try_lock  # noqa: E402
from heterorl.coordinator.store.postgres.standby import Standby  # noqa: E402
from tests.support.postgres import PostgresServer, binaries  # noqa: E402
from tests.support.prometheus import metrics_port  # noqa: E402

pytestmark = [pytest.mark.skipif(binaries() is None, reason="PostgreSQL is not installed: make programs")]


@pytest.fixture(scope="module")
def server():
    server = PostgresServer()
    yield server
    server.stop()


@pytest.fixture
def url(server):
    yield server.make_schema("standby")
    server.drop_schemas()


async def open_at(url):
    return await Database.over(lambda: open_store(url), on_full=lambda: None)


async def changed(path, before):
    """Wait until a coordinator that serves has said where."""
    await shown(lambda: path.read_text().strip() != before)


async def shown(is_shown):
    """Wait for what another process writes."""
    while not is_shown():  # noqa: ASYNC110
        await asyncio.sleep(0.02)


def started(tmp_path, url, *options, name="alone"):
    own = {"data_dir": str(tmp_path / "data"), "listen": "127.0.0.1:0", "tls": {"insecure": True}}
    config = {**own, "store": {"url": url}, "metrics_port": 0}
    return start("coordinator", name=name, tables=config, directory=tmp_path, options=options)


async def test_second_coordinator_is_refused_and_one_that_was_passed_over_commits_nothing_more(url, monkeypatch):
    first = await open_at(url)
    await first.run(lambda c: set_meta(c, "key", "first"))
    with monkeypatch.context() as patched:
        patched.setattr(engines, "HELD_S", 0.0)
        with pytest.raises(StoreHeld, match="--standby"):
            await open_at(url)

    # As if the lock had been lost without the session: somebody else began an epoch.
    with psycopg.connect(url, autocommit=True) as other:
        other.execute("UPDATE store SET epoch = epoch + 1")
    with pytest.raises(StoreLost, match="another coordinator has taken the store"):
        await first.run(lambda c: set_meta(c, "key", "passed over"))

    assert first.on_fatal.done()
    await first.close()
    second = await open_at(url)
    assert await second.run(lambda c: get_meta(c, "key")) == "first"
    await second.close()


async def test_what_is_acknowledged_outlives_the_server_and_what_is_under_way_fails(server, url):
    database = await open_at(url)
    await asyncio.gather(*(database.run(lambda c, n=n: set_meta(c, f"key {n}", "1")) for n in range(50)))

    server.kill()
    for _ in range(2):
        with pytest.raises(StoreLost, match="restarts") as lost:
            await database.run(lambda c: set_meta(c, "late", "1"))
        assert "backup" not in str(lost.value)
        assert lost.value.exit_code == 1
    assert database.on_fatal.done()
    await database.close()
    with pytest.raises(StoreLost, match="cannot be reached"):
        await open_at(url)

    server.start()
    again = await open_at(url)
    assert await again.run(lambda c: [get_meta(c, f"key {n}") for n in range(50)]) == ["1"] * 50
    assert await again.run(lambda c: get_meta(c, "late")) is None
    await again.close()


async def test_a_full_disk_of_postgresql_is_named_and_nothing_is_deleted_for_it(url, tmp_path, caplog):
    clock = ManualClock()
    core = await Coordinator.open(CoordinatorConfig(data_dir=tmp_path / "data", store={"url": url}), clock)
    full = "DO $$ BEGIN RAISE 'could not extend file' USING ERRCODE = 'disk_full'; END $$"
    with pytest.raises(StoreFull, match="^PostgreSQL's disk is full"):
        await core.database.run(lambda c: c.execute(full))

    assert (await core.get_status()).store_problem == POSTGRES_IS_FULL
    assert caplog.messages.count(POSTGRES_IS_FULL) == 1
    assert not core.disk.look()
    assert core.disk.missing_bytes == 0
    clock.advance(HEALED_S)
    core.disk.look()
    assert (await core.get_status()).store_problem == ""
    await core.close()


def test_operations_that_only_read_share_a_savepoint_and_a_failure_undoes_its_own_operation_alone(url, monkeypatch):
    engine = open_store(url)
    connection = engine.connection
    trips = []

    def operation(*statements):
        engine.save()
        try:
            for statement in statements:
                connection.execute(statement)
        except psycopg.Error:
            engine.undo()

    raw_execute = engine._raw.execute
    monkeypatch.setattr(engine._raw, "execute", lambda text, *rest: trips.append(text) or raw_execute(text, *rest))
    put = "INSERT INTO meta VALUES ('{}', '')"
    read, fail = "SELECT key FROM meta", "SELECT 1 / 0"
    engine.begin()
    for _ in range(50):
        operation(read, read)
    assert len(trips) == 1

    operation(read, put.format("a"))
    operation(fail)
    operation(read)
    operation(fail)
    operation(read, put.format("b"), fail)
    operation(put.format("c"))
    operation(f"WITH one AS ({put.format('d')} RETURNING key) SELECT * FROM one")
    operation(read, fail)
    engine.commit()

    # Each operation behind one that wrote has a savepoint of its own; nothing else is sent but what undoes.
    assert [text.split()[0] for text in trips[1:]] == [
        "RELEASE",
        *["ROLLBACK"] * 3,
        "RELEASE",
        "RELEASE",
        "ROLLBACK",
        "COMMIT",
    ]
    assert sorted(key for (key,) in connection.execute("SELECT key FROM meta").fetchall()) == ["a", "c", "d"]
    engine.close()


@pytest.mark.parametrize("options", [[], ["--standby"]], ids=["alone", "standby"])
@pytest.mark.slow
async def test_server_that_is_away_at_the_start_is_waited_for_and_its_later_loss_ends_with_code_1(
    url, server, tmp_path, options
):
    server.kill()
    child = started(tmp_path, url, *options)
    try:
        await shown(lambda: "waits for the store: PostgreSQL cannot be reached" in child.log.read_text())
        server.start()
        await shown(lambda: "listens on port" in child.log.read_text())
        server.kill()
        assert await asyncio.to_thread(child.process.wait) == 1
        assert "backup" not in child.log.read_text()
    finally:
        stop([child])
        server.start()


async def test_wait_for_a_server_ends_by_a_signal(url, server, tmp_path):
    server.kill()
    child = started(tmp_path, url)
    try:
        await shown(lambda: "waits for the store" in child.log.read_text())
        child.process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(child.process.wait) == 0
    finally:
        stop([child])
        server.start()


@pytest.mark.parametrize("options", [[], ["--standby"]], ids=["alone", "standby"])
def test_what_a_server_refuses_is_for_a_person(url, tmp_path, options):
    child = started(tmp_path, url.replace("user=test", "user=nobody"), *options)
    try:
        assert child.process.wait() == 2
        assert 'role "nobody" does not exist (check store.url' in child.log.read_text()
    finally:
        stop([child])


@pytest.fixture
def operator(url):
    with psycopg.connect(url, autocommit=True) as session:
        yield session


def abandoned(url, operator, statement, waits_for):
    """Leave a session that has the lock by a statement that waits, as a coordinator does that is killed meanwhile."""
    raw = connect(url)
    assert try_lock(raw)
    raw.pgconn.send_query(statement.encode())
    pid, seen = raw.info.backend_pid, "SELECT wait_event FROM pg_stat_activity WHERE pid = %s"
    while operator.execute(seen, (pid,)).fetchone() != (waits_for,):
        pass
    raw.close()
    return pid


@pytest.mark.slow
def test_start_behind_a_dead_coordinator_whose_commit_waits_for_a_replica_is_worth_another(url, operator, tmp_path):
    children = []
    try:
        operator.execute("ALTER SYSTEM SET synchronous_standby_names = 'gone'")
        operator.execute("SELECT pg_reload_conf()")
        pid = abandoned(url, operator, "CREATE TABLE written ()", "SyncRep")
        children.append(started(tmp_path, url, name="first"))
        # Code 2 would be the end of the run: the unit starts nothing again after it.
        assert children[0].process.wait() == 1
        said = " ".join(children[0].log.read_text().split())
        assert (
            f"another coordinator has the store: session {pid} of PostgreSQL, from its own host, waits for Syn" in said
        )
        assert f"pg_terminate_backend({pid})" in said
        assert "--standby" in said
    finally:
        operator.execute("ALTER SYSTEM RESET synchronous_standby_names")
        operator.execute("SELECT pg_reload_conf()")
        stop(children)
    open_store(url).close()


def test_session_of_a_dead_coordinator_ends_although_its_statement_waits(url, operator, monkeypatch):
    monkeypatch.setattr(engines, "HELD_S", 20.0)
    operator.execute("SELECT pg_advisory_lock(1)")
    abandoned(url, operator, "SELECT pg_advisory_lock(1)", "advisory")

    open_store(url).close()


def test_server_that_cannot_look_for_its_client_serves(url, monkeypatch):
    monkeypatch.setattr(engines, "_CHECK", "SET client_connection_check_interval = -1")
    open_store(url).close()


@pytest.mark.parametrize(("user", "place"), [("test", "its own host"), ("other", "a host that this user may not see")])
def test_holder_is_named_as_far_as_the_user_may_see_it(url, operator, monkeypatch, user, place):
    monkeypatch.setattr(engines, "HELD_S", 0.0)
    first = open_store(url)
    try:
        operator.execute("CREATE ROLE other LOGIN")
        operator.execute(
            "GRANT USAGE ON SCHEMA " + operator.execute("SELECT current_schema()").fetchone()[0] + " TO other"
        )
        with pytest.raises(StoreHeld, match=f"session [0-9]+ of PostgreSQL, from {place}; if no process"):
            open_store(url.replace("user=test", f"user={user}"))
    finally:
        operator.execute("DROP OWNED BY other; DROP ROLE other")
        first.close()


def test_signal_while_a_held_store_is_asked_for_is_an_orderly_end(url, monkeypatch):
    first = open_store(url)
    alone = Standby(url, lambda _: None, is_patient=False)
    monkeypatch.setattr(engines, "lock_soon", lambda _: alone.give_up())
    assert alone.wait() is None
    first.close()


def test_holder_that_cannot_be_seen_is_said_to_be_so(url):
    raw = connect(url)
    assert engines._holder(raw) == "its session cannot be seen"
    raw.close()


async def test_server_that_dies_while_the_store_is_taken_is_waited_for(url, server, monkeypatch):
    begin, deaths = engines._begin_epoch, []

    def dying(raw):
        if not deaths:
            deaths.append(server.kill())
        return begin(raw)

    monkeypatch.setattr(engines, "_begin_epoch", dying)
    standby = Standby(url, lambda _: None)
    waiting = asyncio.create_task(asyncio.to_thread(standby.wait))
    try:
        await shown(lambda: deaths)
    finally:
        server.start()
    engine = await waiting
    assert engine.epoch == 1
    engine.close()


def test_session_has_no_time_limit_of_its_server(url):
    with psycopg.connect(url) as operator:
        # All that this version has.
        found = operator.execute("SELECT name FROM pg_settings WHERE name ~ '_timeout$' AND category ~ '^Client'")
        limits = [name for (name,) in found]
    assert {"statement_timeout", "lock_timeout", "idle_session_timeout"} < {*limits}
    with connect(url + "".join(f"%20-c{name}%3D1h" for name in limits)) as raw:
        assert {raw.execute(f"SHOW {name}").fetchone() for name in limits} == {("0",)}


async def test_server_that_is_read_only_for_a_while_is_waited_for_and_has_lost_nothing(url, caplog):
    async def write_until_refused():
        # The server's sessions hear of a setting a moment after it was made.
        while True:
            await active.run(lambda c: set_meta(c, "late", "1"))

    active = await open_at(url)
    await active.run(lambda c: set_meta(c, "key", "kept"))
    standby = Standby(url, lambda _: None)
    waiting = asyncio.create_task(asyncio.to_thread(standby.wait))
    with psycopg.connect(url, autocommit=True) as operator:
        # Its session is there before: the next one would not begin.
        asking = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'SELECT pg_try_advisory_lock%'"
        await shown(lambda: operator.execute(asking).fetchone() == (1,))
        try:
            operator.execute("ALTER SYSTEM SET default_transaction_read_only = on")
            operator.execute("SELECT pg_reload_conf()")
            with pytest.raises(StoreLost, match="restarts") as lost:
                await write_until_refused()
            assert "read-only" in str(lost.value)
            await active.close()
            with pytest.raises(StoreLost, match="session is read-only"):
                await open_at(url)
            await shown(lambda: "waits for the store: PostgreSQL gave the store up" in caplog.text)
            await shown(lambda: "waits for the store: PostgreSQL cannot be reached" in caplog.text)
            assert not waiting.done()
        finally:
            operator.execute("ALTER SYSTEM RESET default_transaction_read_only")
            operator.execute("SELECT pg_reload_conf()")
            await active.close()
            try:
                await asyncio.wait((waiting,))
            finally:
                standby.give_up()
    engine = await waiting
    assert engine is not None
    assert engine.epoch == 2
    assert get_meta(engine.connection, "key") == "kept"
    engine.close()


def shown_by(port, path="/metrics"):
    return urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=WAIT_S).read().decode()


@pytest.mark.slow
async def test_standby_shows_that_it_stands_by_and_all_else_once_it_serves(url, tmp_path):
    children = [started(tmp_path, url, "--standby", name="a")]
    try:
        await shown(lambda: "listens on port" in children[0].log.read_text())
        children.append(started(tmp_path, url, "--standby", name="b"))
        await shown(lambda: metrics_port(children[1].log) is not None)
        port = metrics_port(children[1].log)
        page = shown_by(port)
        assert "heterorl_coordinator_standing_by 1.0" in page
        assert "process_start_time_seconds" in page
        # What reads 0 before the store is known would be an alert.
        assert {line.split()[0] for line in page.splitlines() if line.startswith("heterorl_")} == {
            "heterorl_coordinator_standing_by",
            "heterorl_certificate_expiry_seconds",
        }
        assert shown_by(port, "/nodes") == ""
        assert "heterorl_coordinator_standing_by 0.0" in shown_by(metrics_port(children[0].log))

        os.kill(children[0].process.pid, signal.SIGKILL)
        await shown(lambda: "heterorl_coordinator_standing_by 0.0" in shown_by(port))
        assert "heterorl_coordinator_ledger_balanced 1.0" in shown_by(port)
    finally:
        stop(children)


async def test_payloads_of_another_store_are_refused(url, tmp_path):
    config = CoordinatorConfig(data_dir=tmp_path / "data", store={"url": url})
    core = await Coordinator.open(config, ManualClock())
    run = Run(core, tmp_path)
    await run.begin()
    await run.publish()
    await core.close()

    with pytest.raises(ConfigError, match="does not have the payloads of this store"):
        open_engine(tmp_path / "elsewhere", url)
    with pytest.raises(ConfigError, match="payloads of a store in PostgreSQL"):
        open_engine(tmp_path / "data", "")
    (tmp_path / "data" / "coordinator.sqlite").touch()
    with pytest.raises(ConfigError, match="its own coordinator.sqlite"):
        open_engine(tmp_path / "data", url)


async def test_standby_that_does_not_share_the_payloads_ends_with_the_first_of_them(url, tmp_path):
    core = await Coordinator.open(CoordinatorConfig(data_dir=tmp_path / "data", store={"url": url}), ManualClock())
    shared, apart = (standby_at(tmp_path / name, url) for name in ("data", "elsewhere"))
    waiting = [asyncio.create_task(asyncio.to_thread(one.wait)) for one in (shared, apart)]
    run = Run(core, tmp_path)
    try:
        await run.begin()
        await run.publish()
        with pytest.raises(ConfigError, match="does not have the payloads of this store"):
            await waiting[1]
        assert not waiting[0].done()
    finally:
        shared.give_up()
        apart.give_up()
    assert await waiting[0] is None
    await core.close()


async def test_standby_serves_after_the_other_was_killed_and_nothing_acknowledged_is_lost(
    url, server, tmp_path, record_property
):
    addresses = {name: f"127.0.0.1:{free_port()}" for name in ("a", "b")}
    children = {}

    def begin(name):
        own = {"data_dir": str(tmp_path / "data"), "listen": addresses[name], "tls": {"insecure": True}}
        config = {**own, "store": {"url": url}, "metrics_port": 0, "learner_lease_s": 600.0}
        # Both ask for the lock at the same time.
        children[name] = start("coordinator", name=name, tables=config, directory=tmp_path, options=["--standby"])

    for name in addresses:
        begin(name)
    patient = RetryPolicy(base_s=0.05, cap_s=0.2, budget_s=60.0)
    announced = tmp_path / "data" / "address"
    try:
        await shown(announced.exists)
        async with CoordinatorClient(
            ",".join(addresses.values()), tls=TlsConfig(insecure=True), policy=patient
        ) as client:
            run = Run(client, tmp_path)
            await run.begin()
            await run.publish()
            await run.register()
            acknowledged, took = [], []
            for _ in range(2):
                acknowledged += await run.push(5)
                active = announced.read_text().strip()
                name = next(name for name, address in addresses.items() if address == active)
                os.kill(children[name].process.pid, signal.SIGKILL)
                started = time.monotonic()
                await changed(announced, active)
                took.append(time.monotonic() - started)
                status = await client.get_status()
                assert status.ledger.acked == status.ledger.pending == len(acknowledged)
                children[name].process.wait()
                children[name].file.close()
                begin(name)
            again = [run.group(work) for work in await run.lease(1)]
            assert (await client.push_groups(again))[0].status is PushStatus.ACCEPTED
            assert (await client.push_groups(again))[0].status is PushStatus.DUPLICATE
            await run.publish(consumed=acknowledged[:4])
        record_property("takeover_s", took)
        with psycopg.connect(url) as connection:
            assert connection.execute("SELECT epoch FROM store").fetchone() == (3,)
    finally:
        stop(list(children.values()))
