"""A sampler that starts again goes on with the trajectories that an earlier process had under way."""

import asyncio
import dataclasses
import sqlite3
import threading
import time

import numpy as np
import pytest

from heterorl.common.errors import EnvironmentFailed, PromptTooLong
from heterorl.common.model.logprobs import turn_seed
from heterorl.common.process.clock import Bell
from heterorl.common.types.rollout import GIVEN, FinishReason, WorkAssignment
from heterorl.sampler.outbox import turn_store
from heterorl.sampler.outbox.turn_store import MAX_RESUMED, KeptGroup, TurnStore
from tests.support.games import SIZE, TURNS, Games, collected

LONG = dataclasses.replace(TURNS, max_turns=9, trajectory_s=600.0, max_trajectory_tokens=100)


def held(at, **settings):
    """Games of three turns whose answers wait from a turn on."""
    games = Games(length=3, max_turns=9, held_at=at, **settings)
    games.go.clear()
    games.max_live = 64
    return games


def free(**settings):
    """The same of a later process, which wait for nothing."""
    return held(9, **settings)


def kept(world):
    """Turns by assignment and member that are on the disk."""
    with sqlite3.connect(world.directory / "site" / "outbox.sqlite") as file:
        rows = file.execute("SELECT assignment, member, count(*) FROM turns GROUP BY 1, 2").fetchall()
    file.close()
    return {(assignment, member): count for assignment, member, count in rows}


async def killed_in(world, games, *, turns=2):
    """SIGKILL once all members of two groups have so many turns on the disk; the assignments of these."""
    await world.until(lambda: list(kept(world).values()) == [turns] * 2 * SIZE)
    found = {assignment for assignment, _ in kept(world)}
    await world.kill()
    games.go.set()
    return found


def draws_of(world, mine, members, turn):
    """Seeds and members of a turn's requests."""
    return {(turn_seed(world.seeds[assignment], turn), member) for assignment in mine for member in members}


def until(condition, *, seconds):
    """Whether a condition comes to hold while a thread waits."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        threading.Event().wait(0.01)
    return condition()


async def begun(play, games, *, contract=LONG, **settings):
    world = await play(games, contract=contract, **settings)
    world.seeds = {}
    real = world.core.lease_work

    async def lease_work(**asked):
        grant = await real(**asked)
        world.seeds |= {work.id: work.seed for work in grant.assignments}
        return grant

    world.link.replaced["lease_work"] = lease_work
    return world


async def test_killed_sampler_draws_only_the_turn_that_was_under_way(play, monkeypatch):
    games = held(2)
    world = await begun(play, games)
    mine = await killed_in(world, games)
    world.conversations = free()
    world.start()
    groups = (await collected(world, monkeypatch, 2))[:2]

    assert {group.assignment for group in groups} == mine
    for group in groups:
        for rollout in group.rollouts:
            assert rollout.token_ids.tolist() == [5, 6, 1, 7, 8, 5, 6, 1, 7, 8, 5, 6, 1]
            assert (rollout.reward, rollout.finish_reason) == (3.0, FinishReason.EOS)
    # One request for each member, of its third turn, with the seed that it had before.
    drawn = world.engine.submitted[: 2 * SIZE]
    assert {(each.seed, each.first_member) for each in drawn} == draws_of(world, mine, range(SIZE), 2)
    assert all(request.prompt.tolist() == [2, 3, 5, 6, 1, 7, 8, 5, 6, 1, 7, 8] for request in drawn)
    assert not mine & {assignment for assignment, _ in kept(world)}
    # Nothing was handed back, so no prompt waits behind others.
    assert not world.link.calls["abandon_work"]


def of_version(group, version):
    def moved(kept):
        (rollout,) = kept.turn.rollouts
        spans = tuple(dataclasses.replace(s, version=version) if s.is_drawn else s for s in rollout.spans)
        rollouts = (dataclasses.replace(rollout, spans=spans),)
        return dataclasses.replace(kept, turn=dataclasses.replace(kept.turn, rollouts=rollouts, oldest_version=version))

    return KeptGroup(members={member: [moved(kept) for kept in turns] for member, turns in group.members.items()})


async def test_turns_of_versions_that_an_operator_gave_up_are_handed_back(play, monkeypatch):
    games = held(2)
    world = await begun(play, games)
    await killed_in(world, games)
    # As after `heterorl accept-rewind`: the run goes on from a version below theirs.
    real = TurnStore.take
    monkeypatch.setattr(TurnStore, "take", lambda *turns, **since: [of_version(g, 4) for g in real(*turns, **since)])
    world.conversations = free()
    world.start()
    groups = (await collected(world, monkeypatch, 2))[:2]

    assert {span.version for group in groups for rollout in group.rollouts for span in rollout.spans} == {GIVEN, 0}
    assert world.link.calls["abandon_work"]


async def test_member_whose_first_turn_was_under_way_is_drawn_alone(play, monkeypatch):
    games = held(1)
    world = await begun(play, games)
    mine = await killed_in(world, games, turns=1)
    with sqlite3.connect(world.directory / "site" / "outbox.sqlite") as file:
        file.execute("DELETE FROM turns WHERE member = 1")
    file.close()
    world.conversations = free()
    world.start()
    groups = (await collected(world, monkeypatch, 2))[:2]

    assert {group.assignment for group in groups} == mine
    assert all(rollout.reward == 3.0 for group in groups for rollout in group.rollouts)
    first = [request for request in world.engine.submitted[: 2 * SIZE] if request.prompt.tolist() == [2, 3]]
    assert {(each.seed, each.first_member) for each in first} == draws_of(world, mine, [1], 0)


@pytest.mark.parametrize(("before", "after"), [(True, True), (False, True), (True, False)])
async def test_group_that_goes_on_is_seeded_if_all_its_turns_are(play, monkeypatch, before, after):
    games = held(2)
    world = await begun(play, games, seeded_sampling=before)
    mine = await killed_in(world, games)
    world.settings = {"seeded_sampling": after}
    world.conversations = free()
    world.start()
    groups = (await collected(world, monkeypatch, 2))[:2]

    assert {group.assignment for group in groups} == mine
    assert {group.is_seeded for group in groups} == {before and after}


async def test_member_that_is_answered_otherwise_is_lost_alone(play, monkeypatch, caplog):
    games = held(2)
    world = await begun(play, games)
    await killed_in(world, games)
    world.conversations = again = free()
    again.otherwise = 1
    world.start()
    groups = (await collected(world, monkeypatch, 2))[:2]

    lost = [one for group in groups for one in group.rollouts if not one.is_trainable]
    assert [one.finish_reason for one in lost] == [FinishReason.ENVIRONMENT_FAILED]
    assert lost[0].token_ids.tolist() == [5, 6, 1]
    assert "turn 1 is answered otherwise than before this process started" in caplog.text


async def test_groups_of_an_environment_that_leaves_things_to_chance_begin_from_new(play, monkeypatch):
    games = held(2, is_deterministic=False)
    world = await begun(play, games)
    await world.until(lambda: sum(len(episode.turns) for episode in games.opened) >= 2 * SIZE)
    assert not kept(world)
    await world.kill()
    games.go.set()
    world.conversations = free(is_deterministic=False)
    world.start()
    groups = (await collected(world, monkeypatch, 2))[:2]

    assert all(rollout.is_trainable for group in groups for rollout in group.rollouts)
    assert world.engine.submitted[0].num_completions == SIZE


async def test_stop_leaves_trajectories_to_the_next_start(play, monkeypatch):
    games = held(2)
    world = await begun(play, games)
    await world.until(lambda: list(kept(world).values()) == [2] * 2 * SIZE)
    mine = {assignment for assignment, _ in kept(world)}
    world.stop.set()
    await world.end()
    games.go.set()
    assert not world.link.calls["abandon_work"]
    world.conversations = free()
    world.start()
    groups = (await collected(world, monkeypatch, 2))[:2]

    assert {group.assignment for group in groups} == mine
    assert all(request.num_completions == 1 for request in world.engine.submitted[: 2 * SIZE])


async def test_stop_hands_trajectories_back_whose_turns_found_no_room(play, monkeypatch):
    monkeypatch.setattr(turn_store, "MAX_BYTES", 0)
    games = held(2)
    world = await begun(play, games)
    await world.until(lambda: sum(len(each.turns) for each in games.opened) == 2 * SIZE and world.outbox.turns._is_full)
    mine = {draft.assignment.id for draft in world.sampler.generation.collector.drafts}
    handed_back = []

    async def abandon_work(*, assignments, **_given):
        handed_back.extend(assignments)

    world.link.replaced["abandon_work"] = abandon_work
    world.stop.set()
    await world.end()
    games.go.set()

    assert mine <= set(handed_back)


async def test_turns_that_a_stop_writes_do_not_outlive_their_group(play, monkeypatch):
    games = held(3)
    world = await begun(play, games)
    await world.until(lambda: list(kept(world).values()) == [3] * 2 * SIZE)
    collector = world.sampler.generation.collector
    real_keep, real_put, go, put = world.outbox.turns.keep, world.outbox.put, threading.Event(), []
    monkeypatch.setattr(world.outbox.turns, "keep", lambda turns: (go.wait(), real_keep(turns)))
    monkeypatch.setattr(world.outbox, "put", lambda groups, **how: (real_put(groups, **how), put.append(len(groups))))
    (draft, *_) = collector.drafts
    (member, *_) = [each for (key, _), each in collector._runner._members.items() if key == draft.key]
    async with collector.journal.lock:
        pass  # The loop's own write has returned, not only its transaction.
    # A stop writes it before the loop that writes turns wakes.
    monkeypatch.setattr(collector.journal, "news", Bell())
    collector.journal.note(draft, 0, 2, member.given[-1], member.turns[-1])
    writing = asyncio.create_task(collector.journal.write(collector.drafts))
    await asyncio.sleep(0)
    games.go.set()
    for _ in range(50):
        await asyncio.sleep(0.01)
        if put or writing.done():
            break
    assert not writing.done()
    go.set()
    await writing
    await world.until(lambda: sum(put) >= 2)

    assert draft.assignment.id not in {assignment for assignment, _ in kept(world)}


async def test_turns_of_a_group_are_gone_before_it_is_handed_back(play):
    games = held(2)
    world = await begun(play, games)
    await world.until(lambda: list(kept(world).values()) == [2] * 2 * SIZE)
    handed_back, left = [], []

    async def abandon_work(*, assignments, **_given):
        handed_back.extend(assignments)
        left.extend(number for number, _ in kept(world) if number in assignments)

    world.link.replaced["abandon_work"] = abandon_work
    games.failures = {("step", number, 2): EnvironmentFailed("it raised") for number in range(2 * SIZE)}
    games.go.set()
    await world.until(lambda: bool(handed_back))

    assert not left


@pytest.mark.parametrize("seconds", [590.0, 610.0])
@pytest.mark.parametrize("turns", [1, 2])
async def test_trajectory_that_took_too_long_goes_back(play, monkeypatch, turns, seconds):
    # A contract of one turn states no time.
    contract = dataclasses.replace(LONG, max_turns=1, trajectory_s=0.0, max_trajectory_tokens=0) if turns == 1 else LONG
    games = held(turns)
    world = await begun(play, games, contract=contract, task={"environment": "games:Games"})
    mine = await killed_in(world, games, turns=turns)
    world.clock.advance(seconds)
    world.conversations = again = free()
    again.limits = dataclasses.replace(again.limits, max_turns=contract.max_turns)
    returned = []

    async def abandon_work(*, assignments, **named):
        # One that is granted again while its group waits in the outbox is handed back behind the push.
        if not world.link.calls["push_groups"]:
            returned.extend(assignments)
        await world.core.abandon_work(assignments=assignments, **named)

    world.link.replaced["abandon_work"] = abandon_work
    world.start()
    groups = await collected(world, monkeypatch, 2)

    is_resumed = not returned
    assert is_resumed == (seconds < 600.0)
    assert mine == {group.assignment for group in groups[:2]} or not is_resumed


async def test_assignment_that_ran_out_and_is_given_again_is_the_one_under_way(play):
    games = held(2)
    world = await begun(play, games)
    mine = await killed_in(world, games)
    real = world.core.lease_work

    async def lease_work(**asked):
        grant = await real(**asked)
        again = [WorkAssignment(id=number, prompt_index=0, seed=1, lease_s=9.0) for number in mine]
        return dataclasses.replace(grant, assignments=(*again, *grant.assignments)[: asked["max_groups"]])

    world.link.replaced["lease_work"] = lease_work
    world.settings = {"work_ahead_s": 10.0}
    world.conversations = again = held(3)
    world.start()
    await world.until(lambda: len(again.opened) >= 4 * SIZE)

    numbers = [draft.assignment.id for draft in world.sampler.generation.collector.drafts]
    assert mine < set(numbers)
    assert len(set(numbers)) == len(numbers)
    again.go.set()


async def test_group_that_no_start_gets_on_with_goes_back(play):
    games = held(2)
    world = await begun(play, games)
    mine = await killed_in(world, games)
    for _ in range(MAX_RESUMED):
        world.conversations = again = held(1)
        world.start()
        await world.until(lambda games=again: len(games.opened) == 2 * SIZE)
        assert world.outbox.assignments() == tuple(sorted(mine))
        await world.kill()
        again.go.set()
    world.conversations = free()
    world.start()
    assert world.outbox.assignments() == ()
    await world.until_acknowledged(2)


async def test_group_whose_prompt_changed_goes_back(play, monkeypatch, caplog):
    games = held(2)
    world = await begun(play, games)
    mine = await killed_in(world, games)
    world.conversations = again = free()
    again.encode = lambda _: np.array([4, 4], np.int32)
    world.start()
    await collected(world, monkeypatch, 2)

    assert caplog.text.count("its prompt has changed") == len(mine)
    assert not mine & {assignment for assignment, _ in kept(world)}


async def test_groups_that_go_on_hold_no_process_that_a_prompt_needs(play, monkeypatch):
    games = held(2)
    world = await begun(play, games)
    mine = await killed_in(world, games)
    world.conversations = again = free()
    # Fewer processes than before; a prompt's own episode waits until one is free, as real environments do.
    again.max_live = SIZE
    real, waits = world.task.prompt, []

    def prompt(index):
        if waits:
            until(lambda: len(again.opened) - again.closed == SIZE, seconds=0.3)
        waits.append(until(lambda: len(again.opened) - again.closed < SIZE, seconds=3.0))
        return real(index)

    monkeypatch.setattr(world.task, "prompt", prompt)
    world.start()
    groups = (await collected(world, monkeypatch, 2))[:2]

    assert {group.assignment for group in groups} == mine
    assert all(waits[:2])


async def test_member_whose_first_turn_finds_no_room_any_more_is_lost_alone(play, monkeypatch):
    games = held(1)
    world = await begun(play, games)
    mine = await killed_in(world, games, turns=1)
    with sqlite3.connect(world.directory / "site" / "outbox.sqlite") as file:
        file.execute("DELETE FROM turns WHERE member = 1")
    file.close()
    world.conversations = free()
    world.start()
    real = world.engine.submit

    def submit(request):
        if request.num_completions == 1 and request.prompt.tolist() == [2, 3]:
            raise PromptTooLong("engine.max_model_len", "8 tokens")
        real(request)

    world.engine.submit = submit
    groups = (await collected(world, monkeypatch, 2))[:2]

    assert {group.assignment for group in groups} == mine
    assert {tuple(one.is_trainable for one in group.rollouts) for group in groups} == {(True, False)}
    assert {group.rollouts[1].finish_reason for group in groups} == {FinishReason.ENGINE_FAILED}
