"""A history of large manifests: what the store's thread does for each publication does not read through them."""

import asyncio

import pytest

from heterorl.common.types.rollout import DropReason, Span
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.coordinator.core import Coordinator
from heterorl.coordinator.payloads import payload_index
from heterorl.coordinator.store.blobs import Locks
from heterorl.coordinator.versions.chain import Chain
from tests.support.clock import ManualClock
from tests.support.run import SITE, Run, rollout

# Plans, blobs of zeroes and counted steps are SQLite's.
pytestmark = pytest.mark.sqlite
NUM_VERSIONS = 300
MANIFEST_BYTES = 200_000


@pytest.fixture
async def core(tmp_path):
    core = await Coordinator.open(CoordinatorConfig(data_dir=tmp_path / "data"), ManualClock())
    run = Run(core, tmp_path)
    await run.begin()
    await run.publish()

    def prolong(connection):
        connection.execute("UPDATE versions SET manifest = zeroblob(?)", (MANIFEST_BYTES,))
        connection.executemany(
            "INSERT INTO versions VALUES (?, ?, 'c', 1, zeroblob(?), 'd', ?, 0, 1, 1, 0, ?)",
            [
                (version, f"s{version}", MANIFEST_BYTES, f"root-{version}", version in (7, 8, 9))
                for version in range(1, NUM_VERSIONS)
            ],
        )
        connection.executemany(
            "INSERT INTO variant_versions VALUES ('int8', ?, zeroblob(?), 'd', ?, 1, 0)",
            [(version, MANIFEST_BYTES, f"small-{version}") for version in range(5, 20)],
        )

    await core.database.run(prolong)
    yield core
    await core.close()


async def opened(directory, **options):
    """A coordinator, and a run with one version and a registered site."""
    core = await Coordinator.open(CoordinatorConfig(data_dir=directory / "data", **options), ManualClock())
    run = Run(core, directory)
    await run.begin()
    await run.publish()
    await run.register()
    return core, run


def plan_of(connection, sql, *values):
    return [row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {sql}", values)]


async def test_graph_is_read_from_indexes_and_leaves_abandoned_versions_out(core):
    graph = await core.database.run(lambda connection: payload_index.graph(Chain(connection)))

    assert graph.lineage == [version for version in range(NUM_VERSIONS) if version not in (7, 8, 9)]
    small = await core.database.run(
        lambda connection: payload_index._lineage(Chain(connection, "int8"), 6, NUM_VERSIONS - 1)
    )
    assert small == [6, *range(10, 20)]
    statements = []
    await core.database.run(lambda connection: connection.set_trace_callback(statements.append))
    await core.database.run(lambda connection: payload_index.graph(Chain(connection)))
    await core.database.run(lambda connection: connection.set_trace_callback(None))
    about_versions = [text for text in statements if "FROM versions" in text and "LIMIT 1" not in text]
    assert about_versions
    for text in about_versions:
        (how,) = await core.database.run(lambda connection, text=text: plan_of(connection, text))
        assert "COVERING INDEX versions_abandoned" in how


async def test_lock_of_a_name_is_forgotten_with_its_last_user():
    locks, order = Locks(), []

    async def hold(number):
        async with locks["a"]:
            order.append(number)
            await asyncio.sleep(0)

    await asyncio.gather(*(hold(number) for number in range(5)), return_exceptions=True)
    async with locks["b"]:
        assert locks.is_held("b")
        assert not locks.is_held("a")
        assert len(locks._locks) == 1
    assert order == [0, 1, 2, 3, 4]
    assert len(locks._locks) == 0


async def _steps_of_a_push(run):
    """What SQLite executes for one group, counted in its own instructions."""
    steps = []
    await run.api.database.run(lambda connection: connection.set_progress_handler(lambda: steps.append(1), 10))
    await run.push()
    await run.api.database.run(lambda connection: connection.set_progress_handler(None, 0))
    return 10 * len(steps)


async def test_push_costs_the_same_whatever_its_site_pushed_before(tmp_path):
    core, run = await opened(tmp_path)

    def settle(connection):
        connection.executemany(
            "INSERT INTO groups (site, incarnation, sequence, digest, state, assignment, oldest_version, num_bytes,"
            " arrived) VALUES (?, 'before', ?, 'd', 'consumed', 0, 0, 100, 0.0)",
            [(SITE, sequence) for sequence in range(20_000)],
        )

    await run.push()
    before = await _steps_of_a_push(run)
    await core.database.run(settle)
    after = await _steps_of_a_push(run)
    await core.close()

    # One more pending group is summed up; a row of the history would be several instructions.
    assert after < before + 500


async def _statements_of(core, call):
    """The statements that a call has the store execute, and its answer."""
    statements = []
    await core.database.run(lambda connection: connection.set_trace_callback(statements.append))
    answer = await call
    await core.database.run(lambda connection: connection.set_trace_callback(None))
    return statements, answer


async def test_versions_that_do_not_exist_are_not_looked_up(tmp_path):
    """A hostile site may state as many as its group has tokens: 400,000 took the store's thread a quarter of a second."""
    core, run = await opened(tmp_path)
    (work,) = await run.lease()
    spans = (Span(version=0, start=0, end=1), Span(version=7001, start=1, end=2), Span(version=7002, start=2, end=3))
    group = run.group(work, rollouts=(rollout(0), rollout(0, spans=spans)))

    statements, (outcome,) = await _statements_of(core, core.push_groups([group]))
    await core.close()

    assert outcome.reason is DropReason.UNKNOWN_VERSION
    assert not [text for text in statements if "7001" in text]


async def test_steps_are_listed_without_a_read_through_manifests(tmp_path):
    core = await Coordinator.open(CoordinatorConfig(data_dir=tmp_path / "data"), ManualClock())
    run = Run(core, tmp_path)
    await run.begin()
    for _ in range(3):
        await run.publish()
        core.clock.advance(5.0)

    statements, reports = await _statements_of(core, core.list_steps(after_step=0, limit=10))
    assert [report.published_time for report in reports] == [core.clock.wall() - 10, core.clock.wall() - 5]
    assert not [text for text in statements if "versions" in text]
    await core.close()


@pytest.mark.parametrize("order", [{"lease_order": "newest"}, {"site_batch_share": 0.5}], ids=str)
async def test_lease_by_turns_reads_what_waits_once(tmp_path, order):
    """2048 waiting groups, read for each of 128 leased ones, took the store's thread a quarter of a second."""
    core, run = await opened(tmp_path, **order)
    pushed = await run.push(12)

    def wait(connection):
        connection.executemany(
            "INSERT INTO groups (site, incarnation, sequence, digest, state, assignment, oldest_version, num_bytes,"
            " arrived, payload) SELECT site, incarnation, ?, digest, state, assignment, oldest_version, num_bytes,"
            " arrived, payload FROM groups WHERE arrival = 12",
            [(sequence,) for sequence in range(100, 2100)],
        )

    async def lease():
        steps = []
        await core.database.run(lambda connection: connection.set_progress_handler(lambda: steps.append(1), 10))
        leased = await core.database.run(
            lambda connection: core.context.queue.lease(connection, count=5, head=run.head, now=core.clock.wall())
        )
        await core.database.run(lambda connection: connection.set_progress_handler(None, 0))
        return 10 * len(steps), [each.sealed.id for each in leased]

    before, first = await lease()
    await core.database.run(wait)
    after, then = await lease()
    await core.close()

    assert first + then == pushed[:10]
    # A waiting group that is read is about eight of SQLite's instructions: once for all five that are leased.
    assert after < before + 12 * 2000
