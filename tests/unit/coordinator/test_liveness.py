"""Nothing waits for what cannot come: callers that go away, leases that end, bounds that are reached."""

import asyncio
import contextlib
import dataclasses
import sqlite3
import threading

import pytest

from heterorl.common.errors import GroupNotAvailable, InvalidRequest, LeaseHeld, RunFinished, UnknownVersion
from heterorl.common.types.common import Digest
from heterorl.common.types.evaluation import EvaluationSet
from heterorl.common.types.policy import PayloadKind, PayloadRef, PlanKind
from heterorl.common.types.rollout import DropReason, GroupId, PushStatus, Span
from heterorl.common.types.run import Command, Heartbeat
from heterorl.common.wire.common_messages import bytes_digest
from heterorl.common.wire.policy_messages import manifest_from_bytes, manifest_to_bytes
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.coordinator.core import Coordinator
from heterorl.coordinator.groups import ledger
from heterorl.coordinator.rollout_column import LEASE_BATCH
from heterorl.coordinator.store import sqlite as sqlite_engine
from heterorl.coordinator.store.database import Database
from tests.support.clock import ManualClock
from tests.support.limits import WAIT_S
from tests.support.run import CONTRACT, INCARNATION, SITE, Run, credits_of, rollout


@pytest.fixture
async def begin(tmp_path, clock):
    """Open a coordinator with changed settings and bring it to its first version."""
    opened = []

    async def start(*, publish=True, **changes):
        values = {"data_dir": tmp_path / "data", "groups_per_version": 2, "max_staleness_versions": 3, **changes}
        core = await Coordinator.open(CoordinatorConfig(**values), clock)
        opened.append(core)
        run = Run(core, tmp_path)
        await run.begin()
        if publish:
            await run.publish()
            await run.register()
        return core, run

    yield start
    for core in opened:
        await core.close()


async def _open_credits(amount):
    yield amount
    await asyncio.Event().wait()


async def _settle(core):
    """Let the tasks under way run until they wait: each answer of the store lets them make one step."""
    for _ in range(5):
        await core.get_status()


@contextlib.asynccontextmanager
async def _stalled(core):
    """Keep the store's thread from the operations of these calls until all are waiting."""
    go_on = threading.Event()
    stall = core.database.submit(lambda _: go_on.wait(WAIT_S))
    yield
    await asyncio.sleep(0)
    go_on.set()
    await stall


async def _cancel_while_it_runs(awaitable):
    """Cancel a call whose operation is on the store's thread."""
    begun, submit = asyncio.Event(), Database.submit

    def noted(self, operation):
        begun.set()
        return submit(self, operation)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Database, "submit", noted)
        task = asyncio.ensure_future(awaitable)
        await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_work_of_a_caller_that_went_away_expires_like_any_other(begin, clock):
    core, run = await begin()
    await _cancel_while_it_runs(run.lease(8))
    await core.get_status()
    assert await run.lease(1) == ()

    clock.advance(121)
    assert [work.id for work in await run.lease(8)] == list(range(8))


async def test_groups_of_a_caller_that_went_away_wake_the_learner(begin):
    core, run = await begin()
    (work,) = await run.lease(1)
    stream = core.stream_groups(epoch=run.epoch, held=(), credits=_open_credits(1))
    waiting = asyncio.create_task(anext(stream))
    await _settle(core)
    await _cancel_while_it_runs(core.push_groups([run.group(work)]))

    queued = await waiting
    assert queued.group.assignment == work.id
    await stream.aclose()


async def test_version_of_a_caller_that_went_away_wakes_the_watchers(begin):
    core, run = await begin()
    watch = core.watch_head(after_version=0)
    waiting = asyncio.create_task(anext(watch))
    request = await run.prepare()
    await _settle(core)
    await _cancel_while_it_runs(core.publish_version(request))

    assert (await waiting).version == 1


async def test_second_learner_in_the_same_commit_is_refused(begin, clock):
    core, _ = await begin(publish=False)
    clock.advance(100)
    results = await asyncio.gather(
        *(core.acquire_lease(holder=name, contract=CONTRACT, request_id=name) for name in "ab"), return_exceptions=True
    )
    assert results[0].epoch == 2
    assert isinstance(results[1], LeaseHeld)


@pytest.mark.parametrize("is_renewal", [True, False])
async def test_live_learner_keeps_its_lease_while_the_store_stalls(begin, clock, is_renewal):
    core, run = await begin(publish=False)
    async with _stalled(core):
        kept = asyncio.ensure_future(core.renew_lease(epoch=run.epoch) if is_renewal else run.begin())
        await asyncio.sleep(0)
        clock.advance(11)
        other = asyncio.ensure_future(core.acquire_lease(holder="other", contract=CONTRACT, request_id="r2"))

    await kept
    with pytest.raises(LeaseHeld):
        await other
    clock.advance(9)
    with pytest.raises(LeaseHeld):
        await core.acquire_lease(holder="other", contract=CONTRACT, request_id="r2")


@pytest.mark.parametrize("sets", [[], [EvaluationSet(name="held", task_digest="d" * 64, num_prompts=1)]])
async def test_site_is_seen_at_the_end_of_a_stall_of_the_store(begin, clock, sets):
    core, _ = await begin()
    asked = {"site": SITE, "incarnation": INCARNATION, "max_groups": 1, "policy_version": 0, "sets": sets}
    async with _stalled(core):
        lease = asyncio.ensure_future(core.lease_work(**asked))
        await asyncio.sleep(0)
        clock.advance(core.context.config.work_lease_s + 1)

    await lease
    assert (await core.get_status()).sites[0].last_seen_s == 0


async def test_broken_credits_end_the_stream_with_their_error(begin):
    core, run = await begin()

    async def broken():
        yield 1
        raise ConnectionError("the learner is gone")

    with pytest.raises(ConnectionError):
        await anext(core.stream_groups(epoch=run.epoch, held=(), credits=broken()))


async def test_many_credits_are_served_in_bounded_batches(begin):
    core, run = await begin(max_outstanding_groups=4 * LEASE_BATCH, groups_per_version=4 * LEASE_BATCH)
    ids = await run.push(2 * LEASE_BATCH + 3)
    stream = core.stream_groups(epoch=run.epoch, held=(), credits=credits_of(10**6))
    first = await anext(stream)
    counts = await core.database.run(ledger.counts)
    assert counts.leased == LEASE_BATCH
    assert [first.group.id, *[queued.group.id async for queued in stream]] == ids


async def test_sites_at_the_staleness_bound_go_on_after_a_pull(begin):
    # Every group of the bound is queued, all sites wait: the learner's next version and a pull set them free.
    core, run = await begin(max_outstanding_groups=100, max_staleness_versions=1)
    ids = await run.push(4)
    grant = await core.lease_work(site=SITE, incarnation=INCARNATION, max_groups=1, policy_version=0)
    assert grant.assignments == ()
    assert "staleness bound" in grant.reason

    await run.publish(consumed=ids[:2])
    # Still version 0: two versions' worth from it are consumed or queued.
    assert await run.lease(1, version=0) == ()
    assert len(await run.lease(9, version=1)) == 2


async def test_abandoned_policy_gets_no_work_and_is_told_what_to_pull(begin):
    core, run = await begin()
    await run.publish()
    await run.publish(lineage_version=0, snapshot=True)
    grant = await core.lease_work(site=SITE, incarnation=INCARNATION, max_groups=1, policy_version=1)
    assert grant.assignments == ()
    assert "pull version 2" in grant.reason
    assert len(await run.lease(1, version=0)) == 1
    plan = await core.plan_pull(have_version=-1, have_root="", want_version=-1)
    assert (plan.kind, plan.target_version) == (PlanKind.SNAPSHOT, 2)


async def test_run_ends_at_its_last_version(begin):
    core, run = await begin(max_versions=1)
    beat = Heartbeat(site=SITE, incarnation=INCARNATION, policy_version=0, state_root="", tokens_per_s=0)
    (work,) = await run.lease(1)
    assert await core.heartbeat(beat) == ()
    request = await run.prepare()
    run.head = await core.publish_version(request)

    assert await core.heartbeat(beat) == (Command.STOP,)
    with pytest.raises(RunFinished):
        await run.lease(1)
    assert await core.publish_version(request) == 1, "the same step again has the same answer"
    with pytest.raises(RunFinished):
        await core.publish_version(await run.prepare())
    (outcome,) = await core.push_groups([run.group(work, version=0)])
    assert outcome.status is PushStatus.ACCEPTED, "what was asked for is taken"


def _payload(kind, start, end, digest="0" * 64):
    return PayloadRef(kind=kind, from_version=start, to_version=end, digest=Digest(digest), num_bytes=4)


@pytest.mark.parametrize(
    ("payloads", "message"),
    [
        ((), "at least one"),
        ("twice", "one of each kind"),
        ((_payload(PayloadKind.DELTA, 0, 1, "../../../../../../../../../etc/passwd"),), "hex"),
        ("from nothing", "does not lead"),
    ],
)
async def test_publication_whose_payloads_lead_nowhere_is_refused_and_the_store_lives_on(begin, payloads, message):
    core, run = await begin()
    changes = {"lineage_version": -1} if payloads == "from nothing" else {}
    request = await run.prepare(**changes)
    manifest = manifest_from_bytes(request.manifest)
    if payloads == "twice":
        payloads = manifest.payloads * 2
    elif payloads == "from nothing":
        # A snapshot, and a delta of the same bytes that begins at no version.
        (snapshot,) = manifest.payloads
        payloads = (snapshot, dataclasses.replace(snapshot, kind=PayloadKind.DELTA))
    manifest = dataclasses.replace(manifest, payloads=payloads)
    with pytest.raises(InvalidRequest, match=message):
        await core.publish_version(dataclasses.replace(request, manifest=manifest_to_bytes(manifest)))
    assert not core.on_fatal.done()
    assert (await core.get_status()).head_version == 0


async def test_publication_needs_a_step_id(begin):
    core, run = await begin()
    with pytest.raises(InvalidRequest, match="step_id"):
        await core.publish_version(dataclasses.replace(await run.prepare(), step_id=""))


@pytest.mark.sqlite
async def test_opening_a_store_looks_at_no_group_that_was_trained_on(begin, monkeypatch, clock):
    """A step is an instruction of SQLite's virtual machine: one look at each group would be some hundred thousand."""
    steps = []

    class Counted(sqlite3.Connection):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            self.set_progress_handler(lambda: steps.append(1), 100)

    async def steps_to_open():
        steps.clear()
        with monkeypatch.context() as patch:
            patch.setattr(sqlite3, "connect", lambda *args, **options: real(*args, factory=Counted, **options))
            opened = await Coordinator.open(core.config, clock)
        taken = 100 * len(steps)
        return opened, taken

    real = sqlite3.connect
    # SQLite checks small files as a whole at every start.
    monkeypatch.setattr(sqlite_engine, "CHECKED_BYTES", 0)
    core, run = await begin()
    await run.push(1)
    await core.close()
    core, few = await steps_to_open()

    def multiply(connection):
        connection.execute(
            "WITH RECURSIVE n(i) AS (SELECT 2 UNION ALL SELECT i + 1 FROM n WHERE i < 100000)"
            " INSERT INTO groups (site, incarnation, sequence, digest, state, assignment, oldest_version, num_bytes,"
            " arrived, version) SELECT site, incarnation, i, digest, 'consumed', i, 0, num_bytes, arrived, 0"
            " FROM groups, n WHERE sequence = 1"
        )

    await core.database.run(multiply)
    await core.close()
    core, many = await steps_to_open()
    await core.close()
    assert 0 < few <= many < few + 10_000


async def test_publication_may_name_only_groups_and_versions_of_the_run(begin):
    core, run = await begin()
    unknown = GroupId(site=SITE, incarnation=INCARNATION, sequence=99)
    request = await run.prepare(consumed=[unknown])
    with pytest.raises(GroupNotAvailable, match="1 groups are not available"):
        await core.publish_version(request)
    (known,) = await run.push(1)
    run.head = await core.publish_version(await run.prepare(consumed=[known], step_id="first"))
    with pytest.raises(GroupNotAvailable):
        await core.publish_version(await run.prepare(consumed=[known], step_id="again"))
    await core.abandon_groups(epoch=run.epoch, ids=[known, unknown], reason="neither is leased")
    await run.publish(lineage_version=0, snapshot=True)
    with pytest.raises(UnknownVersion):
        await run.publish(lineage_version=1, snapshot=True)

    counts = await core.database.run(ledger.counts)
    assert counts == await core.database.run(ledger.recount)
    assert counts.dropped == {DropReason.LINEAGE_ABANDONED: 1}


async def test_group_whose_bytes_are_no_group_is_not_trained_on(begin):
    core, run = await begin()
    await run.push(2)
    digest = bytes_digest(b"\xff")
    sql = "UPDATE groups SET payload = ?, digest = ? WHERE sequence = 1"
    await core.database.run(lambda c: c.execute(sql, (b"\xff", digest)).rowcount)
    stream = core.stream_groups(epoch=run.epoch, held=(), credits=credits_of(5))
    assert [queued.group.id.sequence async for queued in stream] == [2]


@pytest.mark.sqlite
async def test_push_wakes_no_watcher_of_the_head_and_a_publication_wakes_all_in_turn(tmp_path):
    clock = ManualClock()
    core = await Coordinator.open(CoordinatorConfig(data_dir=tmp_path / "data", groups_per_version=100), clock)
    run = Run(core, tmp_path)
    await run.begin()
    await run.publish()
    await run.register()
    seen = []

    async def watch():
        async for update in core.watch_head(after_version=0):
            note(update.version)

    note = seen.append
    watchers = [asyncio.create_task(watch()) for _ in range(50)]
    await core.database.run(lambda _: None)
    statements = []
    await core.database.run(lambda connection: connection.set_trace_callback(statements.append))
    for _ in range(10):
        await run.push(1)
    for _ in range(5):
        await core.database.run(lambda _: None)
    # The pushes read it themselves, once each or twice; fifty watchers would have read it 500 times more.
    assert sum("FROM versions ORDER BY version DESC LIMIT 1" in text for text in statements) < 100
    await core.database.run(lambda connection: connection.set_trace_callback(None))

    await run.publish()
    for told in (20, 40, 50):
        while len(seen) < told:
            await core.database.run(lambda _: None)
        for _ in range(5):
            await core.database.run(lambda _: None)
        assert len(seen) == told
        clock.advance(0.02)
    assert seen == [1] * 50
    await core.close()
    await asyncio.gather(*watchers, return_exceptions=True)
    assert all(watcher.done() for watcher in watchers)


async def test_a_group_whose_youngest_tokens_are_fresh_is_taken_and_trained_where_stale_ones_are_masked(begin):
    core, run = await begin(max_staleness_versions=1, mask_stale=True)
    grant = await core.renew_lease(epoch=run.epoch)
    work = await run.lease(2)
    for _ in range(3):
        await run.publish()
    spans = (Span(version=0, start=0, end=1), Span(version=2, start=1, end=3))
    mixed = run.group(work[0], version=0, rollouts=(rollout(0, spans=spans), rollout(0, reward=0.0)))
    taken, refused = await core.push_groups([mixed, run.group(work[1], version=0)])
    await run.publish(consumed=[taken.id])

    assert grant.masks_stale
    assert taken.status is PushStatus.ACCEPTED
    assert refused.reason is DropReason.STALE_AT_INGEST
    assert (await core.get_status()).ledger.consumed == 1
