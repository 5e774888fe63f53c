"""Turns of groups under way in the spool: durable, bounded, and damaged one by one."""

import contextlib
import dataclasses
import sqlite3

import numpy as np
import pytest

from heterorl.common.errors import DiskFull
from heterorl.common.process import metrics
from heterorl.common.process.clock import Bell
from heterorl.common.types.rollout import GIVEN, Span
from heterorl.sampler.outbox import turn_store as kept_turns
from heterorl.sampler.outbox.outbox import Outbox
from heterorl.sampler.outbox.turn_store import KeptTurn
from heterorl.sampler.rollout.in_flight_groups import TurnJournal
from tests.support.clock import ManualClock
from tests.support.outboxes import spooled_groups

BEGUN = 100.0


@pytest.fixture
def outbox(tmp_path):
    made = Outbox(tmp_path / "spool", site="s")
    yield made
    made.close()


def turns_of(outbox, tmp_path, *, assignment=0, member=0, count=3, begun=BEGUN):
    """Turns of one member: two given ids, then three drawn ones."""
    (group,) = spooled_groups(outbox, 1, tmp_path)
    rollout = dataclasses.replace(
        group.rollouts[0],
        token_ids=np.array([7, 8, 5, 6, 1], np.int32),
        sampler_logprobs=np.array([-0.5, -0.25, -1.0], np.float32),
        spans=(Span(version=GIVEN, start=0, end=2), Span(version=3, start=2, end=5)),
        reward=0.0,
        reward_parts=(),
    )
    turn = dataclasses.replace(group, assignment=assignment, rollouts=(rollout,))
    return [KeptTurn(member=member, number=number, seed=1 << 100, begun=begun, turn=turn) for number in range(count)]


def places(groups):
    return {
        (group.first.assignment, member): [turn.number for turn in turns]
        for group in groups
        for member, turns in group.members.items()
    }


def again(outbox, directory):
    outbox.close()
    return Outbox(directory / "spool", site="s")


def test_turns_come_back_as_they_were_kept(outbox, tmp_path):
    outbox.turns.keep([*turns_of(outbox, tmp_path, member=1), *turns_of(outbox, tmp_path, assignment=7, count=1)])
    outbox = again(outbox, tmp_path)

    assert outbox.assignments() == (0, 7)
    groups = outbox.turns.take(since=0.0)
    assert places(groups) == {(0, 1): [0, 1, 2], (7, 0): [0]}
    (turn,) = groups[1].turns
    assert (turn.seed, turn.begun, turn.turn.oldest_version) == (1 << 100, BEGUN, 0)
    (rollout,) = turn.turn.rollouts
    assert rollout.token_ids.tolist() == [7, 8, 5, 6, 1]
    assert rollout.sampler_logprobs.tolist() == [-0.5, -0.25, -1.0]
    assert [(span.version, span.start, span.end) for span in rollout.spans] == [(GIVEN, 0, 2), (3, 2, 5)]
    outbox.close()


def test_turns_leave_with_their_group(outbox, tmp_path, monkeypatch):
    outbox.turns.keep([*turns_of(outbox, tmp_path), *turns_of(outbox, tmp_path, assignment=7)])
    (group,) = spooled_groups(outbox, 1, tmp_path)
    monkeypatch.setattr(outbox.turns, "drop", _full)
    with pytest.raises(DiskFull):
        outbox.put([group], release=[0.0])
    assert (outbox.level().num_groups, outbox.assignments()) == (0, (0, 7))
    monkeypatch.undo()

    outbox.put([group], release=[0.0])

    assert outbox.assignments() == (group.assignment, 7)
    assert places(outbox.turns.take(since=0.0)) == {(7, 0): [0, 1, 2]}


def _full(*_args):
    raise DiskFull("here")


def test_turns_of_a_group_that_was_given_up_are_gone(outbox, tmp_path):
    outbox.turns.keep([*turns_of(outbox, tmp_path), *turns_of(outbox, tmp_path, assignment=7)])
    outbox.turns.forget([0])

    assert outbox.assignments() == (7,)


@pytest.mark.parametrize(("others", "left"), [((), (7,)), ((7,), ())])
async def test_turns_that_a_full_disk_kept_go_with_the_next_change(outbox, tmp_path, monkeypatch, others, left):
    outbox.turns.keep([*turns_of(outbox, tmp_path), *turns_of(outbox, tmp_path, assignment=7)])
    journal = TurnJournal(
        turns=outbox.turns, left=(), state_roots=dict, clock=ManualClock(), now=lambda: BEGUN, news=Bell()
    )
    with monkeypatch.context() as patch:
        patch.setattr(outbox.turns, "_transaction", _full)
        await journal.forget([0])
    assert outbox.assignments() == (0, 7)

    # This process may be handed the same assignment again.
    await (journal.forget(others) if others else journal.write(()))

    assert outbox.assignments() == left


@pytest.mark.parametrize("column", ["payload", "begun", "seed", "checksum"])
def test_damaged_turn_costs_itself_and_those_behind_it(outbox, tmp_path, caplog, column):
    outbox.turns.keep([*turns_of(outbox, tmp_path), *turns_of(outbox, tmp_path, member=1)])
    values = {"payload": b"x", "begun": 5.0, "seed": "12", "checksum": b""}
    with sqlite3.connect(tmp_path / "spool" / "outbox.sqlite") as file:
        file.execute(f"UPDATE turns SET {column} = ? WHERE member = 1 AND number = 1", (values[column],))
    file.close()
    before = metrics.OUTBOX_SET_ASIDE.labels("turn")._value.get()

    assert places(outbox.turns.take(since=0.0)) == {(0, 0): [0, 1, 2], (0, 1): [0]}
    assert metrics.OUTBOX_SET_ASIDE.labels("turn")._value.get() == before + 1
    assert "TURN 1 OF ASSIGNMENT 0, MEMBER 1 IS DAMAGED" in caplog.text
    # What stood behind it must not follow the turn that is drawn in its place.
    (first, second, _) = turns_of(outbox, tmp_path, member=1)
    outbox.turns.keep([second])
    assert places(outbox.turns.take(since=0.0)) == {(0, 0): [0, 1, 2], (0, 1): [0, 1]}
    assert first.number == 0


def test_group_that_took_too_long_is_dropped(outbox, tmp_path):
    outbox.turns.keep(
        [*turns_of(outbox, tmp_path, begun=99.0), *turns_of(outbox, tmp_path, assignment=7, begun=101.0)]
    )  # fmt: skip

    assert places(outbox.turns.take(since=100.0)) == {(7, 0): [0, 1, 2]}
    assert outbox.assignments() == (7,)


def test_group_is_taken_up_again_as_long_as_it_gets_on(outbox, tmp_path, caplog):
    first, second, _ = turns_of(outbox, tmp_path)
    outbox.turns.keep([first])
    for _ in range(kept_turns.MAX_RESUMED - 1):
        assert len(outbox.turns.take(since=0.0)) == 1
        outbox.turns.note_resumed([0])
    outbox.turns.keep([second])
    for _ in range(kept_turns.MAX_RESUMED):
        # A start that ends before it goes on with the group does not count.
        assert len(outbox.turns.take(since=0.0)) == len(outbox.turns.take(since=0.0)) == 1
        outbox.turns.note_resumed([0])

    assert outbox.turns.take(since=0.0) == []
    assert outbox.assignments() == ()
    assert "assignment 0 is returned: 3 starts continued it without a new turn" in caplog.text


def test_turns_beyond_the_bound_are_not_kept(outbox, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(kept_turns, "MAX_BYTES", 400)
    for turn in turns_of(outbox, tmp_path, count=8):
        outbox.turns.keep([turn])

    with sqlite3.connect(tmp_path / "spool" / "outbox.sqlite") as file:
        ((count, size),) = file.execute("SELECT count(*), sum(length(payload)) FROM turns").fetchall()
    file.close()
    assert 0 < count < 8
    assert size <= 400
    assert caplog.text.count("turns in flight are not kept") == 1


def test_start_on_a_full_disk_leaves_all_turns_to_a_later_one(outbox, tmp_path, monkeypatch, caplog):
    outbox.turns.keep([*turns_of(outbox, tmp_path), *turns_of(outbox, tmp_path, assignment=7)])
    before, transaction = rows(tmp_path), outbox.turns._transaction

    @contextlib.contextmanager
    def full():
        with transaction() as connection:
            yield connection
            raise DiskFull("here")

    with monkeypatch.context() as patch:
        patch.setattr(outbox.turns, "_transaction", full)
        assert outbox.turns.take(since=0.0) == []

    assert rows(tmp_path) == before
    # A registration states them, so that this process begins none of them anew.
    assert outbox.assignments() == (0, 7)
    assert "KEPT TURNS ARE LEFT TO A LATER START" in caplog.text
    assert places(outbox.turns.take(since=0.0)) == {(0, 0): [0, 1, 2], (7, 0): [0, 1, 2]}


def rows(tmp_path):
    with sqlite3.connect(tmp_path / "spool" / "outbox.sqlite") as file:
        found = file.execute("SELECT * FROM turns ORDER BY assignment, member, number").fetchall()
    file.close()
    return found


def test_full_disk_keeps_no_turn_and_ends_nothing(outbox, tmp_path, monkeypatch, caplog):
    def transaction():
        raise DiskFull("here")

    with monkeypatch.context() as patch:
        patch.setattr(outbox.turns, "_transaction", transaction)
        outbox.turns.keep(turns_of(outbox, tmp_path))
    assert caplog.text.count("turns in flight are not kept") == 1

    outbox.turns.keep(turns_of(outbox, tmp_path))
    assert places(outbox.turns.take(since=0.0)) == {(0, 0): [0, 1, 2]}
