"""Members in their environments: turns go on, end, and are lost alone; groups that lost members are pushed."""

import asyncio
import dataclasses
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from heterorl.common.errors import EnvironmentFailed, PromptTooLong, ToolLost
from heterorl.common.generation.inference_engine import Completion
from heterorl.common.model.logprobs import turn_seed
from heterorl.common.process import metrics
from heterorl.common.tasks.task import Prompt
from heterorl.common.types.rollout import GIVEN, FinishReason, Span, WorkAssignment
from heterorl.sampler.rollout.episode_runner import EpisodeRunner
from heterorl.sampler.rollout.in_flight_groups import GroupDraft
from tests.support.clock import ManualClock
from tests.support.games import SIZE, TURNS, Games, collected
from tests.support.limits import WAIT_S
from tests.support.run import CONTRACT

ONE_TURN = dataclasses.replace(CONTRACT, min_members=SIZE // 2, end_token_ids=(1,))


async def test_members_take_turns_until_their_environments_are_done(play, monkeypatch):
    games = Games(length=2)
    world = await play(games)

    group = (await collected(world, monkeypatch))[0]

    assert [rollout.token_ids.tolist() for rollout in group.rollouts] == [[5, 6, 1, 7, 8, 5, 6, 1]] * SIZE
    for rollout in group.rollouts:
        assert rollout.num_drawn == 6
        assert [(s.version == GIVEN, s.start, s.end) for s in rollout.spans] == [
            (False, 0, 3), (True, 3, 5), (False, 5, 8)
        ]  # fmt: skip
        assert (rollout.reward, rollout.finish_reason) == (2.0, FinishReason.EOS)
    later = [request for request in world.engine.submitted if request.num_completions == 1]
    assert later[0].prompt.tolist() == [2, 3, 5, 6, 1, 7, 8]
    assert {request.seed for request in later[:SIZE]} == {turn_seed(world.engine.submitted[0].seed, 1)}
    assert {request.first_member for request in later[:SIZE]} == set(range(SIZE))
    assert len({request.key for request in world.engine.submitted}) == len(world.engine.submitted)


@pytest.mark.parametrize(
    ("games", "contract", "reason", "num_turns"),
    [
        (Games(length=9, max_turns=2), TURNS, FinishReason.TURNS, 2),
        (Games(length=9, max_turns=1), ONE_TURN, FinishReason.TURNS, 1),
        (Games(length=9, trajectory_s=0.0), TURNS, FinishReason.SECONDS, 1),
        (
            Games(length=9),
            dataclasses.replace(TURNS, max_trajectory_tokens=CONTRACT.sampling.max_new_tokens + 5 + 4),
            FinishReason.CONTEXT,
            2,
        ),
    ],
    ids=["turns", "one turn", "seconds", "context"],
)
async def test_limits_end_a_member_which_is_scored(play, monkeypatch, games, contract, reason, num_turns):
    world = await play(games, contract=contract)

    group = (await collected(world, monkeypatch))[0]

    for rollout in group.rollouts:
        assert rollout.finish_reason is reason
        assert rollout.reward == num_turns
        # It ends with what was drawn.
        assert rollout.token_ids.tolist() == [5, 6, 1, 7, 8, 5, 6, 1][: 5 * num_turns - 2]


async def test_turn_that_the_engine_finds_too_long_ends_its_member(play, monkeypatch):
    games = Games(length=2)
    world = await play(games)
    real = world.engine.submit

    def submit(request):
        if request.num_completions == 1 and not refused:
            refused.append(request.key)
            raise PromptTooLong("engine.max_model_len", "9 tokens")
        real(request)

    refused = []
    world.engine.submit = submit
    groups = await collected(world, monkeypatch)

    def reasons():
        # The first group to ask for a second turn may not be the first to end.
        found = [[rollout.finish_reason for rollout in group.rollouts] for group in groups]
        return next((each for each in found if FinishReason.CONTEXT in each), [])

    await world.until(reasons)
    assert reasons().count(FinishReason.CONTEXT) == 1
    assert reasons().count(FinishReason.EOS) == SIZE - 1


@pytest.mark.parametrize(
    ("failure", "error", "reason", "tokens"),
    [
        (("step", 1, 1), EnvironmentFailed("it raised"), FinishReason.ENVIRONMENT_FAILED, 3),
        (("step", 1, 2), ToolLost("5 s"), FinishReason.TOOL_LOST, 8),
        (("score", 1), EnvironmentFailed("no number"), FinishReason.ENVIRONMENT_FAILED, 8),
    ],
)
async def test_failure_is_the_end_of_one_member(play, monkeypatch, failure, error, reason, tokens):
    games = Games(length=2)
    games.failures = {failure: error}
    world = await play(games)

    group = (await collected(world, monkeypatch))[0]

    lost = [rollout for rollout in group.rollouts if not rollout.is_trainable]
    assert [(one.finish_reason, one.reward, one.token_ids.size) for one in lost] == [(reason, 0.0, tokens)]
    assert all(one.reward == 2.0 for one in group.trainable)
    await world.until(lambda: games.closed >= SIZE)


@pytest.mark.parametrize(
    ("error", "reason"), [(EnvironmentFailed("it raised"), "environment_failed"), (ToolLost("5 s"), "tool_lost")]
)
async def test_group_with_too_few_members_left_goes_back(play, caplog, error, reason):
    games = Games(length=2)
    games.failures = {("step", number, 1): error for number in range(SIZE // 2 + 1)}
    world = await play(games)
    returned = []

    async def abandon_work(*, assignments, reason=None, **given):
        returned.append((assignments, reason))

    world.link.replaced["abandon_work"] = abandon_work
    await world.until(lambda: bool(returned))

    assert returned[0][1].value == reason
    assert f"its members are lost, the last one by {reason}: {error}" in caplog.text
    assert caplog.text.count("lost member") == 1, "once a minute"
    await world.until_acknowledged(1)


async def test_metrics_count_turns_endings_tokens_and_the_time_of_engine_and_environments(play, monkeypatch):
    def counted():
        found = {
            (sample.name.removeprefix("heterorl_sampler_"), *sample.labels.values()): sample.value
            for metric in (metrics.TURNS, metrics.TRAJECTORIES, metrics.TRAJECTORY_TOKENS, metrics.TRAJECTORY_SECONDS)
            for family in metric.collect()
            for sample in family.samples
        }
        return {name: found.get(name, 0.0) - before.get(name, 0.0) for name in found}

    before = {}
    before = counted()
    games = Games(length=2)
    games.failures = {("step", 0, 1): EnvironmentFailed("it raised")}
    games.go.clear()
    world = await play(games, contract=dataclasses.replace(TURNS, min_members=1))
    world.task.source_of = lambda index: "games"
    await world.until(lambda: len(games.opened) >= 2 * SIZE)
    await world.passed(50.0)
    in_engine = counted()["trajectory_seconds_total", "games", "model"]
    games.go.set()
    await collected(world, monkeypatch, 2)
    world.stop.set()
    await world.end()

    found = counted()
    assert found["trajectories_total", "games", "environment_failed"] == 1
    assert found["trajectories_total", "games", "eos"] >= 2 * SIZE - 1
    num_lost, num_whole = 1, found["trajectories_total", "games", "eos"]
    assert found["trajectory_tokens_total", "games", "drawn"] == 6 * num_whole + 3 * num_lost
    assert found["trajectory_tokens_total", "games", "given"] == 2 * num_whole
    assert found["turns_total", "games"] >= 2 * num_whole + num_lost
    # All of them waited for the environment as long as it was held, and not for the engine.
    assert found["trajectory_seconds_total", "games", "tools"] >= 2 * SIZE * 50.0
    assert in_engine < 2 * SIZE * 50.0


async def test_no_more_episodes_live_than_there_is_room_for(play, monkeypatch):
    games = Games(length=2)
    world = await play(games, max_live=2)
    most = []
    real = games.open

    def opened():
        most.append(len(games.opened) + 1 - games.closed)
        return real()

    games.open = opened
    await collected(world, monkeypatch, 2)

    assert max(most) <= 2


@pytest.mark.parametrize("others", [0, 64], ids=["alone", "mixture"])
async def test_wait_for_a_place_is_no_time_of_an_episode(play, monkeypatch, others):
    games = Games(length=2, trajectory_s=100.0)
    games.go.clear()
    world = await play(SimpleNamespace(of=games.of, at=games.at, go=games.go), max_live=1 + others)
    games.max_live = 1
    await world.until(lambda: games.opened)
    await world.passed(150.0)
    games.go.set()

    group = (await collected(world, monkeypatch))[0]

    # Only the member that had the place was held so long.
    found = sorted((rollout.finish_reason.value, rollout.reward) for rollout in group.rollouts)
    assert found == [*[("eos", 2.0)] * (SIZE - 1), ("seconds", 1.0)]


async def test_no_more_groups_begin_than_can_play(play):
    games = Games(length=2)
    games.go.clear()
    world = await play(games, max_live=2 * SIZE, work_ahead_s=10.0)
    world.engine.max_running = 64 * SIZE
    await world.until(lambda: len(games.opened) == 2 * SIZE)
    await world.passed(5.0)

    assert world.sampler.generation.num_in_flight == 2
    games.go.set()
    await world.until_acknowledged(6)


async def test_members_go_on_while_the_prompts_of_new_groups_begin(play, monkeypatch):
    games = Games(length=2)
    games.go.clear()
    world = await play(games, work_ahead_s=10.0)
    submit, prompt, submitted, went_on = world.engine.submit, world.task.prompt, threading.Event(), []

    def submitting(request):
        submit(request)
        if request.num_completions == 1:
            submitted.set()

    def slow(index):
        if world.engine.num_batches:
            games.go.set()
            went_on.append(submitted.wait(WAIT_S))
        return prompt(index)

    world.engine.submit = submitting
    monkeypatch.setattr(world.task, "prompt", slow)
    await world.until(lambda: bool(went_on))

    assert all(went_on)
    await world.until_acknowledged(1)


async def test_time_of_a_group_begins_behind_its_prompt(play, monkeypatch):
    world = await play(Games(length=1))
    prompt, loop = world.task.prompt, asyncio.get_running_loop()

    async def pass_time():
        world.clock.advance(40.0)

    def slow(index):
        asyncio.run_coroutine_threadsafe(pass_time(), loop).result()
        return prompt(index)

    monkeypatch.setattr(world.task, "prompt", slow)
    (group, *_) = await collected(world, monkeypatch)

    assert 0.0 <= group.generation_s < 40.0


async def test_group_begins_when_the_members_that_go_on_leave_room(play):
    games = Games(length=2, held_at=9)
    real = games.step

    def step(episode, turn):
        if episode.number == 0:
            games.go.wait()
        return real(episode, turn)

    games.step = step
    games.go.clear()
    world = await play(games, max_live=SIZE + 1, work_ahead_s=10.0)
    # The first group still waits for its last member.
    await world.until_acknowledged(3)

    assert world.sampler.generation.num_in_flight >= 1
    assert len(games.opened) - games.closed <= SIZE + 1
    games.go.set()
    await world.until_acknowledged(6)


async def test_group_waits_for_room_in_its_own_environment(play):
    narrow, wide = Games(length=2), Games(length=2)
    narrow.max_live, wide.max_live = SIZE, 64
    both = SimpleNamespace(at=lambda index: (narrow, wide)[index % 2], go=narrow.go)
    both.of = lambda prompt: both.at(prompt.index)
    narrow.go.clear()
    wide.go = narrow.go
    world = await play(both, max_live=SIZE + 64, work_ahead_s=10.0)
    world.engine.max_running = 64 * SIZE
    await world.until(lambda: len(narrow.opened) >= SIZE)
    await world.passed(5.0)
    numbers = [draft.prompt.index % 2 for draft in world.sampler.generation.collector.drafts]

    # The prompt of a second one could begin an episode, and no process is free.
    assert numbers.count(0) == 1
    narrow.go.set()
    await world.until_acknowledged(6)


async def test_swap_waits_for_turns_and_not_for_environments(play, monkeypatch):
    games = Games(length=2)
    games.go.clear()
    world = await play(games, swap="drain")
    await world.until(lambda: len(games.opened) >= SIZE and not world.engine.is_held)
    await world.run.publish()
    await world.until(lambda: world.engine.version == world.run.head)
    games.go.set()

    group = (await collected(world, monkeypatch))[0]

    for rollout in group.rollouts:
        assert [span.version for span in rollout.spans] == [0, GIVEN, 1]
    assert group.oldest_version == 0


async def test_stop_gives_up_what_is_played(play):
    games = Games(length=2, is_deterministic=False)
    games.go.clear()
    world = await play(games)
    await world.until(lambda: len(games.opened) >= SIZE)
    world.stop.set()
    games.go.set()
    await world.end()

    assert world.is_ended
    assert world.link.calls["abandon_work"]


async def test_reward_that_fails_costs_one_member_of_a_group(play, monkeypatch):
    world = await play(contract=dataclasses.replace(CONTRACT, min_members=1))
    world.task.num_failing = 1

    group = (await collected(world, monkeypatch))[0]

    lost = [rollout for rollout in group.rollouts if not rollout.is_trainable]
    assert [(one.finish_reason, one.token_ids.size) for one in lost] == [(FinishReason.REWARD_FAILED, 3)]
    assert not lost[0].reward_parts


async def test_episode_whose_end_waits_for_a_thread_gives_its_place_back_after_the_last_turn():
    games = Games(length=9)
    is_begun, real = threading.Event(), games.step

    def step(episode, turn):
        is_begun.set()
        return real(episode, turn)

    games.step = step
    games.go.clear()
    games.max_live = 1
    runner = EpisodeRunner(max_live=1, max_new_tokens=4, max_trajectory_tokens=60, clock=ManualClock())
    prompt = np.array([2, 3], np.int32)
    draft = GroupDraft(
        key=1, assignment=WorkAssignment(id=0, prompt_index=0, seed=1, lease_s=1.0), prompt=Prompt(index=0, text="", answer=""),
        prompt_token_ids=prompt, seed=1, version=0, begun_at=0.0, conversation=games,
    )  # fmt: skip
    turn = Completion(
        token_ids=prompt, logprobs=np.zeros(2, np.float32), finish_reason=FinishReason.EOS,
        spans=(Span(version=0, start=0, end=2),),
    )  # fmt: skip
    playing = asyncio.ensure_future(runner.play(draft, 0, turn))
    assert await asyncio.to_thread(is_begun.wait, WAIT_S)
    playing.cancel()
    await asyncio.wait([playing])

    # The only thread steps: the episode's close waits.
    runner.drop(draft.key)
    runner.close()
    games.go.set()
    await asyncio.to_thread(runner._threads.shutdown)
    assert games.closed == 1


async def test_episode_that_a_cancelled_member_opened_is_closed_beside_the_event_loop():
    closed_by, is_closed = [], threading.Event()

    class Opened:
        def close(self):
            closed_by.append(threading.current_thread())
            is_closed.set()

    runner = EpisodeRunner(max_live=1, max_new_tokens=4, max_trajectory_tokens=60, clock=ManualClock())
    spec = SimpleNamespace(open=Opened, episodes=Games())
    spec.episodes.max_live = 1
    opening = asyncio.ensure_future(runner._open(SimpleNamespace(), SimpleNamespace(spec=spec)))
    await asyncio.sleep(0)
    # The pool's only thread has opened it; this loop has not heard of it.
    runner._threads.submit(int).result()
    opening.cancel()
    await asyncio.wait([opening])

    assert await asyncio.to_thread(is_closed.wait, WAIT_S)
    assert closed_by[0] is not threading.main_thread()
    await runner._rooms[spec.episodes].acquire()
    runner.close()
