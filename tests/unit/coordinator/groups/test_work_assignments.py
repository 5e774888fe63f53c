"""Assignments: the same prompt and seed for ever, one answer to one request, and few who may answer."""

import dataclasses
import json
import sqlite3

import pytest

from heterorl.common.errors import InvalidRequest
from heterorl.common.types.evaluation import HELD_OUT
from heterorl.common.types.rollout import DropReason, GroupId, PushStatus, Span
from heterorl.coordinator import evaluation_jobs
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.coordinator.core import Coordinator
from heterorl.coordinator.groups.schedule import prompt_of, seed_of
from heterorl.coordinator.groups.work_assignments import MAX_HOLDERS, expire, give_back, hand_out, reopen
from heterorl.coordinator.rollout_column import LEASE_BATCH
from heterorl.coordinator.store.schema import SCHEMA
from heterorl.sampler.outbox.outbox import empty_group
from tests.support.run import CONTRACT, INCARNATION, SITE, credits_of, rollout


@pytest.fixture
def config(tmp_path):
    return CoordinatorConfig(data_dir=tmp_path / "data", groups_per_version=8, seed=7)


async def ask(core, *, site=SITE, count=2, request_id="", version=0):
    grant = await core.lease_work(
        site=site, incarnation=INCARNATION, max_groups=count, policy_version=version, request_id=request_id
    )
    return [work.id for work in grant.assignments]


def numbered(run, work, sequence, *, site=SITE):
    group = run.group(work)
    return dataclasses.replace(group, id=GroupId(site=site, incarnation=INCARNATION, sequence=sequence))


async def test_a_damaged_group_of_an_outbox_gives_no_assignment_back(core, run):
    work, *_ = await run.lease(2)
    assert work.id == 0
    empty = empty_group(GroupId(site=SITE, incarnation=INCARNATION, sequence=1))

    (outcome,) = await core.push_groups([empty])
    assert (outcome.status, outcome.reason) == (PushStatus.DROPPED, DropReason.INVALID)
    (outcome,) = await core.push_groups([numbered(run, work, 2)])
    assert outcome.status is PushStatus.ACCEPTED, outcome.message


# ---- a request said again


async def test_request_said_again_is_given_what_it_was_given(core, run):
    first = await ask(core, request_id="a")
    assert await ask(core, request_id="a") == first
    assert await ask(core, request_id="a", count=100) == first, "whatever it asks for the second time"
    assert await ask(core, request_id="b") != first
    # Without an id, each request is another one.
    assert len({*await ask(core), *await ask(core)}) == 4


async def test_request_said_again_after_a_restart_is_given_what_it_was_given(config, core, run, clock):
    first = await ask(core, request_id="a")
    await core.close()
    again = await Coordinator.open(config, clock)
    assert await ask(again, request_id="a") == first
    await again.close()


async def test_request_said_again_extends_no_lease(core, run, clock):
    first = await ask(core, request_id="a")
    clock.advance(100)
    grant = await core.lease_work(site=SITE, incarnation=INCARNATION, max_groups=2, policy_version=0, request_id="a")
    assert [work.lease_s for work in grant.assignments] == [pytest.approx(20.0)] * 2
    clock.advance(21)
    # It ran out: another site gets it, and the request finds nothing of its own any more.
    await core.register(run.registration(site="us-1"))
    assert await ask(core, site="us-1") == first
    assert not set(await ask(core, request_id="a")) & set(first)


async def test_request_of_another_site_is_another_request(core, run):
    await core.register(run.registration(site="us-1"))
    first = await ask(core, request_id="a")
    assert not set(await ask(core, site="us-1", request_id="a")) & set(first)


async def test_answered_part_of_a_request_is_not_given_again(core, run):
    grant = await core.lease_work(site=SITE, incarnation=INCARNATION, max_groups=2, policy_version=0, request_id="a")
    await core.push_groups([run.group(grant.assignments[0])])
    assert await ask(core, request_id="a") == [grant.assignments[1].id]


async def test_request_id_has_a_bound(core, run):
    with pytest.raises(InvalidRequest, match="request_id"):
        await ask(core, request_id="x" * 65)


async def test_more_assignments_than_a_call_can_lease_are_not_given_back(core, run):
    await run.lease(2)
    with pytest.raises(InvalidRequest, match="assignments: 4097"):
        await core.abandon_work(site=SITE, incarnation=INCARNATION, assignments=[0] * 4097)


class Counted:
    """A connection that counts the calls of it."""

    def __init__(self, connection):
        self.connection = connection
        self.num_calls = 0

    def execute(self, *arguments):
        self.num_calls += 1
        return self.connection.execute(*arguments)

    def executemany(self, *arguments):
        self.num_calls += 1
        return self.connection.executemany(*arguments)


@pytest.mark.parametrize("count", [1, 200])
async def test_however_much_is_opened_at_once_takes_three_statements(config, core, run, count):
    given = await core.database.run(lambda connection: _handed(connection, config, 2 * count))

    def given_back(connection):
        counted = Counted(connection)
        give_back(counted, (SITE, INCARNATION), [*given[:count], 2**64 - 1])
        expire(counted, given[count:])
        return counted.num_calls, connection.execute("SELECT count(*), sum(is_leased) FROM work").fetchone()

    assert await core.database.run(given_back) == (3, (2 * count, 0))


@pytest.mark.sqlite
async def test_prompts_of_many_dropped_groups_are_opened_by_few_statements(core, run):
    numbers = [*range(5000, 5600), 5000]
    statements = []

    def reopened(connection):
        # A statement that runs once a row is told with the values of each.
        connection.set_trace_callback(statements.append)
        reopen(connection, numbers)
        reopen(connection, numbers[:2])
        connection.set_trace_callback(None)
        return connection.execute("SELECT assignment, prompt_index, seed FROM work WHERE is_leased = 0").fetchall()

    rows = await core.database.run(reopened)

    assert sorted(map(tuple, rows)) == [
        (number, prompt_of(number, num_prompts=CONTRACT.num_prompts, seed=7), seed_of(number, seed=7))
        for number in range(5000, 5600)
    ]
    # A trigger names the statement that fired it once more for each row.
    assert len({text for text in statements if "INSERT INTO work" in text}) == 4


def _handed(connection, config, count):
    holder = SITE, INCARNATION
    handed = hand_out(connection, holder, count=count, num_prompts=4096, config=config, request_id="")
    return [each.id for each in handed]


# ---- who may answer


async def test_site_that_let_an_assignment_go_long_ago_may_not_answer_it(core, run, clock):
    (work,) = await run.lease(1)
    others = [f"us-{number}" for number in range(MAX_HOLDERS)]
    for site in others:
        clock.advance(121)
        await core.register(run.registration(site=site))
        assert await ask(core, site=site, count=1) == [work.id]
    (outcome,) = await core.push_groups([numbered(run, work, 1)])
    assert outcome.reason is DropReason.INVALID
    assert "was not given to this site, or was given back" in outcome.message

    # The one before the holder may: its answer was on its way.
    (outcome,) = await core.push_groups([numbered(run, work, 1, site=others[-2])])
    assert outcome.status is PushStatus.ACCEPTED
    (outcome,) = await core.push_groups([numbered(run, work, 1, site=others[-1])])
    assert outcome.reason is DropReason.SURPLUS


async def test_site_that_gave_an_assignment_back_may_not_answer_it(core, run):
    (work,) = await run.lease(1)
    await core.abandon_work(site=SITE, incarnation=INCARNATION, assignments=[work.id, 2**64 - 1])
    await core.register(run.registration(site="us-1"))
    assert await ask(core, site="us-1", count=1) == [work.id]

    (outcome,) = await core.push_groups([numbered(run, work, 1)])
    assert outcome.reason is DropReason.INVALID
    # Nor does it open what the other one holds, by this or by giving it back once more.
    await core.abandon_work(site=SITE, incarnation=INCARNATION, assignments=[work.id])
    assert work.id not in await ask(core, count=8)
    (outcome,) = await core.push_groups([numbered(run, work, 1, site="us-1")])
    assert outcome.status is PushStatus.ACCEPTED


# ---- the same prompt, the same seed


@pytest.mark.parametrize("state", ["pending", "leased", "consumed"])
async def test_reopened_assignment_has_its_prompt_and_its_seed(core, run, state):
    """A group that was taken and is given up: its row of work is gone, and is made again as it was."""
    (work,) = await run.lease(1)
    await core.push_groups([run.group(work)])
    ids = [GroupId(site=SITE, incarnation=INCARNATION, sequence=run.sequence)]
    if state == "leased":
        assert [queued.seed async for queued in _streamed(core, run, 1)] == [work.seed]
    if state == "consumed":
        await run.publish(consumed=ids)
        await run.publish(lineage_version=0, snapshot=True)
    else:
        for _ in range(core.config.max_staleness_versions + 1):
            await run.publish()
        if state == "pending":
            assert [queued async for queued in _streamed(core, run, 1)] == []
        else:
            with pytest.raises(Exception, match="1 became too stale"):
                await run.publish(consumed=ids)
            run.head = (await core.get_status()).head_version

    (again,) = await run.lease(1)
    assert (again.id, again.prompt_index, again.seed) == (work.id, work.prompt_index, work.seed)
    assert again.seed == seed_of(work.id, seed=7)
    assert again.prompt_index == prompt_of(work.id, num_prompts=CONTRACT.num_prompts, seed=7)


def _streamed(core, run, count):
    return core.stream_groups(epoch=run.epoch, held=(), credits=credits_of(count))


# ---- terms are the monotonic clock's


async def test_step_of_the_wall_clock_ends_no_lease_and_extends_none(core, run, clock):
    mine = [work.id for work in await run.lease(2)]
    clock.wall_offset += 1e6
    await core.register(run.registration(site="us-1"))
    assert not set(await ask(core, site="us-1")) & set(mine)
    clock.wall_offset -= 2e6
    clock.advance(119)
    assert not set(await ask(core, site="us-1")) & set(mine)
    clock.advance(2)
    assert await ask(core, site="us-1") == mine


# ---- what a group was when it came


async def test_group_whose_bytes_became_another_groups_is_not_trained_on(core, run):
    """Bytes that parse are no proof: the digest of the push is."""
    await run.push(3)
    swap = "UPDATE groups SET payload = (SELECT payload FROM groups WHERE sequence = 2) WHERE sequence = 1"
    await core.database.run(lambda c: c.execute(swap).rowcount)

    assert [queued.group.id.sequence async for queued in _streamed(core, run, LEASE_BATCH)] == [2, 3]
    counts = (await core.get_status()).ledger
    assert (counts.dropped, counts.is_balanced) == ({DropReason.INVALID: 1}, True)
    assert await ask(core, count=1) == [0], "its prompt is handed out again"


# ---- abandoned versions


async def test_what_waits_of_an_abandoned_version_goes_with_it(core, run):
    before = await run.lease(4)
    old = [run.group(work) for work in before[:1]]
    await run.publish()
    new = [run.group(work) for work in before[1:]]
    await core.push_groups([*old, *new[:2]])
    assert [queued.group.oldest_version async for queued in _streamed(core, run, 2)] == [0, 1]
    # One of version 1 is leased, one pending, one not pushed yet.
    await run.publish(lineage_version=0, snapshot=True)

    counts = (await core.get_status()).ledger
    assert (counts.leased, counts.pending, counts.is_balanced) == (1, 0, True)
    assert counts.dropped == {DropReason.UNKNOWN_VERSION: 2}
    (late,) = await core.push_groups(new[2:])
    assert late.reason is DropReason.UNKNOWN_VERSION
    # All three prompts are generated again, as they were.
    again = await run.lease(3)
    assert [(work.id, work.seed) for work in again] == [(work.id, work.seed) for work in before[1:]]


async def test_group_with_tokens_of_an_abandoned_version_is_not_trained_on(core, run):
    """Swapped in flight: its oldest token is of the lineage, a later one is not."""
    mixed = (Span(version=0, start=0, end=1), Span(version=1, start=1, end=3))
    work = await run.lease(2)
    await run.publish()
    groups = [run.group(entry, version=0, rollouts=(rollout(0), rollout(0, spans=mixed))) for entry in work]
    (taken,) = await core.push_groups(groups[:1])
    assert taken.status is PushStatus.ACCEPTED
    await run.publish(lineage_version=0, snapshot=True)

    (late,) = await core.push_groups(groups[1:])
    assert late.reason is DropReason.UNKNOWN_VERSION
    assert "version 1 was abandoned" in late.message
    assert [queued async for queued in _streamed(core, run, 2)] == []
    counts = (await core.get_status()).ledger
    assert (counts.dropped, counts.is_balanced) == ({DropReason.UNKNOWN_VERSION: 2}, True)


# ---- held-out prompts that others hold


HELD = range(HELD_OUT, HELD_OUT + 2**20)


def _outstanding(count, *, few=()):
    """A store whose unanswered held-out prompts have all holders they may have, except `few`."""
    connection = sqlite3.connect(":memory:")
    connection.executescript(SCHEMA)
    evaluation_jobs.open_held_out(connection, HELD[:count], seed=1)
    full = json.dumps([f"eu-{number}/1" for number in range(MAX_HOLDERS)])
    connection.execute("UPDATE work SET is_leased = 1, holders = ?", (full,))
    connection.executemany(
        "UPDATE work SET holders = '[\"eu-0/1\"]' WHERE prompt_index = ?", [(index,) for index in few]
    )
    return connection


def _question(connection, request_id, *, count=4):
    handed = evaluation_jobs.hand_out_held_out(
        connection, HELD, holder=("us-0", "1"), count=count, request_id=request_id, from_others=True
    )
    return [each.prompt_index for each in handed]


def test_question_for_held_out_prompts_costs_the_same_with_any_number_outstanding():
    steps = []
    for count in (1000, 8000):
        connection, taken = _outstanding(count), []
        connection.set_progress_handler(lambda taken=taken: taken.append(1) and None, 1)
        assert _question(connection, "a") == []
        steps.append(len(taken))

    assert steps[1] < 1.1 * steps[0]


def test_lowest_prompts_with_room_come_first():
    few = [evaluation_jobs.MAX_SEEN - 1, 3, 5]
    connection = _outstanding(8000, few=few)

    assert _question(connection, "a", count=2) == [3, 5]
    assert _question(connection, "b", count=2)[:1] == [evaluation_jobs.MAX_SEEN - 1]
    assert not {3, 5} & set(_question(connection, "c")), "a prompt is given to a site once"


@pytest.mark.parametrize(
    "count", [1, evaluation_jobs.MAX_SEEN, evaluation_jobs.MAX_SEEN + 1, 2 * evaluation_jobs.MAX_SEEN + 1, 1000]
)
def test_repeated_questions_find_every_prompt_with_room(count):
    connection = _outstanding(count, few=[count - 1])

    assert any(_question(connection, str(number)) == [count - 1] for number in range(100))


@pytest.mark.parametrize("number", range(20))
def test_questions_of_one_evaluation_take_nothing_of_the_next(number):
    connection = _outstanding(200)
    following = range(HELD.stop, HELD.stop + 200)
    evaluation_jobs.open_held_out(connection, following, seed=1)

    assert _question(connection, str(number)) == []
