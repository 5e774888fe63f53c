"""A sampler evaluates pinned versions beside its rollouts; a real coordinator in process, an engine that computes
nothing."""

import asyncio
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from heterorl.common.errors import (
    ConfigError,
    EngineDied,
    EnvironmentFailed,
    MessageTooLarge,
    PromptRefused,
    PromptTooLong,
    RewardError,
    Unreachable,
)
from heterorl.common.process.clock import Bell
from heterorl.common.tasks.task import Prompt
from heterorl.common.types.evaluation import HELD_OUT, MAX_HELD_OUT, EvaluationDraws, EvaluationState
from heterorl.common.types.rollout import RewardPart
from heterorl.sampler.outbox.outbox import Outbox
from heterorl.sampler.prompt_evaluator import PromptEvaluator, SiteSet
from heterorl.sampler.rollout.in_flight_groups import EvaluationRequests
from tests.support.games import Games
from tests.support.plain_task import PlainTask
from tests.support.run import SITE
from tests.support.sampler_world import World

DRAWS = EvaluationDraws(num_prompts=12, num_samples=16, temperature=0.5, max_new_tokens=1)
SETS = [{"name": "held", "num_prompts": 12, "samples_per_prompt": 16, "temperature": 0.5, "every_versions": 2}]


class Held(PlainTask):
    """A task of 12 held-out prompts; every second one is answered rightly, `fails` cannot be scored."""

    digest = "c" * 64
    num_prompts = 1
    num_evaluation_prompts = 12

    def __init__(self, fails=()):
        self.fails = fails

    def evaluation_prompt(self, index):
        return Prompt(index=index, text=f"{index}=", answer="")

    def score(self, prompt, completion):
        if prompt.index in self.fails:
            raise RewardError("it crashed")
        return (RewardPart(name="right", value=float(prompt.index % 2)),)


class Prompts:
    """Token ids that tell the prompts apart; the template refuses some."""

    def __init__(self, refused=()):
        self.refused = refused

    def encode_prompt(self, prompt):
        if prompt.text in self.refused:
            raise PromptRefused("use_chat_template", "roles must alternate")
        return np.array([prompt.index + 2, 3], np.int32)

    def decode(self, token_ids):
        return "text"

    def completion(self, token_ids, prompt=None):
        return self.decode(token_ids)


@pytest.fixture
async def world(tmp_path):
    world = await World.open(tmp_path, evaluation=SETS, max_work_ahead_s=3600.0)
    world.settings = {"swap": "in_flight", "work_ahead_s": 10.0, "evaluation_share": 0.5}
    world.sets = (SiteSet(name="held", draws=DRAWS, task=Held()),)
    yield world
    await world.close()


async def found(world, version=0):
    evaluations = await world.core.list_evaluations()
    return next((each for each in evaluations if each.version == version), None)


async def until_done(world, version=0):
    while (of := await found(world, version)) is None or of.state is not EvaluationState.DONE:
        await world._pass(0.5)
        if world.running.done():
            await world.running
    return of


def of_evaluation(engine):
    return [request for request in engine.submitted if request.sampling is not None]


async def test_a_version_is_evaluated_beside_rollouts_and_each_prompt_counts_once(world):
    await world.run.publish()
    world.start()
    done = await until_done(world)

    assert (done.summary.num_prompts, done.summary.num_samples, done.sites) == (12, 12 * 16, ((SITE, 12),))
    assert done.summary.average.mean == 0.5
    assert {request.sampling.temperature for request in of_evaluation(world.engine)} == {0.5}
    # Twelve prompts of two blocks, each drawn once.
    assert len(of_evaluation(world.engine)) == 24
    assert await world.ledger_acked() > 0


async def test_newer_weights_wait_for_the_evaluation_and_rollouts_go_on(world):
    await world.run.publish()
    world.start()
    world.engine.is_paced = True
    await world.until(lambda: of_evaluation(world.engine))
    await world.run.publish()
    await world.until(lambda: world.sampler.policy.take(0) is not None)
    before = len(world.engine.submitted) - len(of_evaluation(world.engine))
    load, at_load = world.engine.load, []

    def noted(arena, version):
        at_load.append((version, len(of_evaluation(world.engine)), len(world.engine.submitted)))
        load(arena, version)

    world.engine.load = noted
    await until_done(world)
    await world.until(lambda: len(world.engine.loaded) == 2)

    # All 24 blocks were drawn before the newer weights came, and rollouts beside them.
    ((version, num_blocks, num_requests),) = at_load
    assert (version, num_blocks) == (1, 24)
    assert num_requests - num_blocks > before


@pytest.mark.slow
async def test_newer_weights_do_not_wait_for_results_that_a_broken_link_holds_back(world):
    async def push_evaluation(**results):
        raise Unreachable("the link is down")

    world.settings["evaluation_hold_s"] = 20.0
    await world.run.publish()
    world.link.replaced["push_evaluation"] = push_evaluation
    world.start()
    await world.until(lambda: world.link.calls["push_evaluation"])
    await world.run.publish()
    await world.passed(60.0, step_s=0.5)
    assert [version for version, _ in world.engine.loaded] == [0, 1]

    # The results are not lost.
    del world.link.replaced["push_evaluation"]
    await world.passed(30.0, step_s=0.5)
    assert (await found(world)).summary.num_prompts > 0


@pytest.mark.slow
async def test_a_dead_engine_is_loaded_again_while_results_wait_for_the_link(world):
    async def push_evaluation(**results):
        raise Unreachable("the link is down")

    await world.run.publish()
    world.link.replaced["push_evaluation"] = push_evaluation
    world.start()
    await world.until(lambda: world.link.calls["push_evaluation"])
    world.engine.batch_failures = [EngineDied("it is gone")]
    await world.passed(10.0, step_s=0.5)

    assert [version for version, _ in world.engine.loaded] == [0, 0]


@pytest.mark.slow
async def test_prompts_that_an_engine_lost_in_an_outage_return_with_the_link(world):
    await world.run.publish()
    world.start()
    await world.lose_engine_in_outage(lasts_s=40.0, takes=lambda request: request.sampling is not None)
    # The leases of two minutes still run.
    await world.passed(40.0, step_s=0.5)

    assert (await found(world)).state is EvaluationState.DONE


async def test_newer_weights_do_not_wait_for_ever(world):
    world.settings["evaluation_hold_s"] = 0.0
    await world.run.publish()
    world.start()
    world.engine.is_paced = True
    await world.until(lambda: of_evaluation(world.engine))
    await world.run.publish()
    await world.until(lambda: len(world.engine.loaded) > 1)
    # What was begun gives no result: it is handed back.
    while await leased(world, version=0):
        await world.passed(0.5)
    assert (await found(world)).state is EvaluationState.RUNNING


@pytest.mark.parametrize("is_draining", [False, True])
async def test_newer_weights_wait_no_longer_for_episodes_of_many_turns(world, is_draining, caplog):
    caplog.set_level("INFO")
    world.settings["evaluation_hold_s"] = 20.0
    world.settings["sampling"] = {"max_trajectory_tokens": 10**6}
    games = Games(length=10**6, max_turns=10**6)
    games.max_live = 16
    world.sets = (SiteSet(name="held", draws=DRAWS, task=Held(), conversations=games),)
    await world.run.publish()
    world.start()
    world.engine.is_paced = True
    await world.until(lambda: of_evaluation(world.engine))
    begun = world.clock.monotonic()
    await world.run.publish()
    if is_draining:
        await world.core.drain(reason="the end")
    await world.until(lambda: len(world.engine.loaded) > 1)

    # The world's own clock moves in steps of 0.1 s.
    assert world.clock.monotonic() - begun == pytest.approx(20.0, abs=0.5)
    while await leased(world, version=0):
        await world.passed(0.5)
    assert "held-out prompts of set held are handed back: newer weights waited" in caplog.text


async def leased(world, *, version):
    """Leased held-out prompts of a version."""
    return await world.core.database.run(
        lambda connection: connection.execute(
            "SELECT assignment FROM work JOIN evaluation_jobs ON (assignment - ?) / ? = job"
            " WHERE is_leased = 1 AND version = ?",
            (HELD_OUT, MAX_HELD_OUT, version),
        ).fetchall()
    )


async def test_an_engine_that_dies_costs_no_prompt(world):
    await world.run.publish()
    world.start()
    world.engine.is_paced = True
    await world.until(lambda: of_evaluation(world.engine))
    world.engine.batch_failures = [EngineDied("it is gone")]
    done = await until_done(world)

    assert (done.summary.num_prompts, done.summary.num_samples) == (12, 12 * 16)


async def test_a_prompt_that_ends_the_engine_every_time_stays_without_a_score(world, caplog):
    world.prompter = Prompts()
    world.start()
    # Four prompts at once, of which one is at fault.
    world.sampler.evaluation._evaluator.num_rows = 4 * 16
    submit = world.engine.submit

    def fatal(request):
        submit(request)
        if request.sampling is not None and request.prompt[0] == 1 + 2:
            world.engine.batch_failures = [EngineDied("it ran out of memory")]

    world.engine.submit = fatal
    await world.run.publish()
    of = await until_done(world)

    assert (of.summary.num_prompts, of.summary.num_errors, of.summary.average.num_prompts) == (12, 16, 11)
    assert "held-out prompt 1 cannot be drawn" in caplog.text


async def test_a_prompt_that_kills_the_process_every_time_stays_without_a_score(world, caplog):
    world.prompter = Prompts()
    await world.run.publish()
    num_kills, is_hit = 0, threading.Event()
    while (of := await found(world)) is None or of.state is not EvaluationState.DONE:
        if world.running is None:
            assert num_kills <= 3, "it is drawn again and again"
            is_hit.clear()
            world.start()
            submit = world.engine.submit
            world.sampler.evaluation._evaluator.num_rows = 4 * 16

            def fatal(request, submit=submit):
                is_fatal = request.sampling is not None and request.prompt[0] == 1 + 2
                is_hit.set() if is_fatal else submit(request)

            world.engine.submit = fatal
        await world._pass(0.5)
        if is_hit.is_set():
            await world.kill()
            num_kills += 1

    assert num_kills == 3
    assert (of.summary.num_prompts, of.summary.num_errors, of.summary.average.num_prompts) == (12, 16, 11)
    assert "held-out prompt 1 cannot be drawn" in caplog.text
    world.stop.set()
    await world.end()
    # An end in order is no failure.
    assert not (world.directory / "site" / "held_out.json").exists()


async def test_a_killed_sampler_goes_on_with_what_it_held(world):
    await world.run.publish()
    world.start()
    world.engine.is_paced = True
    await world.until(lambda: of_evaluation(world.engine))
    await world.kill()
    world.start()
    done = await until_done(world)

    assert (done.summary.num_prompts, done.sites) == (12, ((SITE, 12),))


async def test_a_stopped_sampler_hands_its_parts_back(world):
    await world.run.publish()
    world.start()
    world.engine.is_paced = True
    await world.until(lambda: of_evaluation(world.engine))
    world.stop.set()
    await world.end()

    assert not await left(world)


async def left(world):
    """Leased assignments of an ended sampler without a group in its outbox."""
    outbox = Outbox(world.directory / "site")
    waiting = outbox.assignments()
    outbox.close()
    leased = await world.core.database.run(
        lambda connection: connection.execute("SELECT assignment FROM work WHERE is_leased = 1").fetchall()
    )
    return {number for (number,) in leased} - set(waiting)


async def test_a_stopped_sampler_hands_back_what_an_open_question_gets(world):
    is_granted = asyncio.Event()

    async def lease_work(**given):
        grant = await world.core.lease_work(**given)
        if given["sets"]:
            is_granted.set()
            await world.clock.sleep(1.0)
        return grant

    world.link.replaced["lease_work"] = lease_work
    await world.run.publish()
    world.start()
    await world.until(is_granted.is_set)
    world.stop.set()
    await world.end()

    assert not await left(world)
    assert not of_evaluation(world.engine)


async def test_a_drained_run_evaluates_its_last_version_before_the_sampler_ends(world):
    await world.run.publish()
    world.start()
    await until_done(world)
    await world.run.publish()
    await world.until(lambda: world.engine.version == 1)
    await world.core.drain(reason="the end")
    await world.end()

    assert (await found(world, 1)).state is EvaluationState.DONE


@pytest.mark.slow
async def test_a_drained_sampler_waits_for_the_last_version_before_it_evaluates_it(world):
    await world.run.publish()
    world.start()
    await until_done(world)
    failures = [Unreachable("the link is down")] * 3

    async def late(**values):
        if failures:
            raise failures.pop()
        return await world.core.plan_pull(**values)

    world.link.replaced["plan_pull"] = late
    await world.run.publish()
    await world.core.drain(reason="the end")
    await world.end()

    assert (await found(world, 1)).state is EvaluationState.DONE


async def test_a_drained_sampler_whose_swaps_fail_evaluates_the_last_version(world):
    await world.run.publish()
    world.start()
    await until_done(world)
    world.engine.load_failures = [EngineDied("its process ended")] * 3
    await world.run.publish()
    await world.until(lambda: world.sampler.generation.swap.version < 0)
    await world.core.drain(reason="the end")
    await world.end()

    assert (await found(world, 1)).state is EvaluationState.DONE


@pytest.mark.slow
@pytest.mark.parametrize("num_failed", [0, 1])
async def test_a_drained_sampler_does_not_wait_for_ever_for_the_last_version(world, caplog, num_failed):
    world.settings["evaluation_hold_s"] = 20.0
    failures = [Unreachable("the coordinator restarts")] * num_failed

    async def nothing(**_):
        raise Unreachable("the link is down")

    async def shaky(**values):
        if values["sets"] and failures:
            raise failures.pop()
        return await world.core.lease_work(**values)

    await world.run.publish()
    world.start()
    await until_done(world)
    world.link.replaced |= {"plan_pull": nothing, "lease_work": shaky}
    await world.run.publish()
    await world.core.drain(reason="the end")
    drained_at = world.clock.monotonic()
    await world.end()

    assert world.clock.monotonic() - drained_at >= 20.0
    assert (await found(world, 1)).state is EvaluationState.OPEN
    assert "the sampler drains without the last evaluation: its weights did not come" in caplog.text


@pytest.mark.slow
async def test_a_drain_waits_for_the_last_evaluation_though_the_coordinator_is_away_for_a_moment(world):
    await world.run.publish()
    world.start()
    await until_done(world)
    await world.run.publish()
    failures = [Unreachable("the link is down")] * 3

    async def shaky(**values):
        if values["sets"] and failures:
            raise failures.pop()
        return await world.core.lease_work(**values)

    world.link.replaced["lease_work"] = shaky
    await world.core.drain(reason="the end")
    await world.end()

    assert (await found(world, 1)).state is EvaluationState.DONE


async def test_results_beyond_the_limit_of_messages_are_delivered_as_numbers(world):
    sizes = []

    async def small(**values):
        sizes.append(sum(len(sample.text) for result in values["results"] for sample in result.samples))
        if sizes[-1] or any(result.prompt for result in values["results"]):
            raise MessageTooLarge("17 MB, 16 MB are taken")
        return await world.core.push_evaluation(**values)

    world.link.replaced["push_evaluation"] = small
    await world.run.publish()
    world.start()
    done = await until_done(world)

    assert (done.summary.num_prompts, done.summary.num_samples) == (12, 12 * 16)
    assert sizes.count(0) == len(sizes) / 2


@pytest.mark.slow
async def test_results_that_are_refused_for_good_are_not_drawn_for_ever(world):
    async def never(**_):
        raise MessageTooLarge("17 MB, 16 MB are taken")

    world.link.replaced["push_evaluation"] = never
    await world.run.publish()
    world.start()
    await world.until(lambda: not world.sampler.evaluation._sets)
    await world.passed(1.0)
    drawn = len(of_evaluation(world.engine))
    await world.passed(60.0, step_s=1.0)

    assert len(of_evaluation(world.engine)) == drawn


@pytest.mark.slow
async def test_a_set_that_this_engine_cannot_draw_is_refused_once_and_rollouts_go_on(world):
    await world.run.publish()
    world.start()
    submit = world.engine.submit

    def narrow(request):
        if request.sampling is not None:
            raise ConfigError("engine.max_model_len", "8 holds no prompt of 2 and 512 new tokens")
        submit(request)

    world.engine.submit = narrow
    await world.until_acknowledged(4)
    await world.passed(10.0, step_s=1.0)

    assert (await found(world)).summary.num_prompts == 0
    assert "held" not in world.sampler.evaluation._sets


async def test_prompts_that_are_refused_cost_the_set_nothing_but_themselves(world, caplog):
    world.prompter = Prompts(refused=["0="])
    world.start()
    submit = world.engine.submit

    def narrow(request):
        if request.sampling is not None and request.prompt[0] == 1 + 2:
            raise PromptTooLong("engine.max_model_len", "8 tokens hold no prompt of 2 and 7 new ones")
        submit(request)

    world.engine.submit = narrow
    await world.run.publish()
    of = await until_done(world)

    assert of.summary.num_prompts == 12
    assert of.summary.num_errors == 2 * 16
    assert of.summary.average.num_prompts == 10
    assert "held-out prompt 0 cannot be drawn" in caplog.text
    assert "held-out prompt 1 cannot be drawn" in caplog.text


async def test_a_refused_request_wakes_those_that_wait_for_its_rows():
    requests, news = EvaluationRequests(), Bell()
    requests.add(5, 16, lambda _: None)
    ticket, refused = news.ticket(), asyncio.get_running_loop().create_future()
    refused.set_exception(PromptTooLong("engine.max_model_len", "8 tokens hold no prompt of 2 and 7 new ones"))

    PromptEvaluator._note_submitted(
        SimpleNamespace(evaluation_requests=requests, news=news), SimpleNamespace(key=5), refused
    )

    assert requests.num_running == 0
    assert ticket.is_set()


async def test_rewards_that_fail_are_counted_and_left_out(world):
    world.sets = (SiteSet(name="held", draws=DRAWS, task=Held(fails=(1, 3))),)
    await world.run.publish()
    world.start()
    done = await until_done(world)

    # Of ten prompts that are left four are right.
    assert (done.summary.num_errors, done.summary.average.mean) == (32, 0.4)


async def test_evaluation_takes_no_more_than_its_share_of_the_rows(world):
    most = 0
    await world.run.publish()
    world.start()
    evaluation_requests = world.sampler.generation.evaluation_requests
    add = evaluation_requests.add

    def counted(key, count, on_end):
        nonlocal most
        add(key, count, on_end)
        most = max(most, evaluation_requests.num_running)

    evaluation_requests.add = counted
    await until_done(world)

    # Half of four rows is less than a block of eight, which goes alone.
    assert most == 8


@pytest.fixture
def played(world):
    """A set whose prompts are answered by an environment, in two turns each."""
    games = Games(length=2)
    games.max_live = 16
    world.sets = (SiteSet(name="held", draws=DRAWS, task=Held(), conversations=games),)
    return games


async def test_a_set_with_an_environment_is_played_to_its_end_and_scored_by_it(world, played):
    delivered = []

    async def noted(**values):
        delivered.extend(values["results"])
        return await world.core.push_evaluation(**values)

    world.link.replaced["push_evaluation"] = noted
    played.failures = {("step", 5, 2): EnvironmentFailed("it raised"), ("score", 7): EnvironmentFailed("no number")}
    await world.run.publish()
    world.start()
    done = await until_done(world)

    # What the environment lost has no reward; the others have one for each turn.
    assert (done.summary.num_samples, done.summary.num_errors) == (12 * 16 - 2, 2)
    assert done.summary.average.mean == 2.0
    samples = [sample for result in delivered for sample in result.samples]
    assert {sample.text for sample in samples if sample.reward is not None} == {"x|x"}
    # Drawn tokens alone.
    assert {sample.num_tokens for sample in samples} == {6}
    later = [request for request in of_evaluation(world.engine) if request.num_completions == 1]
    assert {tuple(request.prompt.tolist()) for request in later} == {(2, 3, 5, 6, 1, 7, 8)}
    # Each completion of a prompt has its own draws.
    assert len({(request.seed, request.first_member) for request in later}) == len(later) == 12 * 16


@pytest.mark.slow
async def test_turns_that_an_engine_loses_are_drawn_again_and_no_episode_stays_open(world, played):
    await world.run.publish()
    world.start()
    world.engine.is_paced = True
    await world.until(lambda: [request for request in of_evaluation(world.engine) if request.num_completions == 1])
    world.engine.batch_failures = [EngineDied("it is gone")]
    world.engine.is_paced = False
    world.engine.pace.release()
    done = await until_done(world)

    assert (done.summary.num_prompts, done.summary.num_samples, done.summary.average.mean) == (12, 12 * 16, 2.0)
    assert len(played.opened) > 12 * 16
    await world.until(lambda: played.closed == len(played.opened))


async def test_a_turn_that_the_engine_has_no_room_for_ends_its_completion_with_the_score_so_far(world, played):
    await world.run.publish()
    world.start()
    submit = world.engine.submit

    def narrow(request):
        if request.sampling is not None and request.prompt.size > 2:
            raise PromptTooLong("engine.max_model_len", "6 tokens hold no prompt of 7")
        submit(request)

    world.engine.submit = narrow
    done = await until_done(world)

    assert (done.summary.average.mean, done.summary.num_truncated) == (1.0, 12 * 16)


async def test_prompt_that_takes_long_to_begin_does_not_hold_the_event_loop(world):
    class Slow(Held):
        """Each prompt begins an episode for its first messages."""

        def evaluation_prompt(self, index):
            readers.add(threading.current_thread())
            return super().evaluation_prompt(index)

    readers = set()
    world.sets = (SiteSet(name="held", draws=DRAWS, task=Slow()),)
    await world.run.publish()
    world.start()
    await until_done(world)

    assert len(readers) == 1
    assert threading.main_thread() not in readers


async def test_time_of_an_episode_counts_from_its_own_request(world, played, monkeypatch):
    monkeypatch.setattr(Held, "num_evaluation_prompts", 1)
    counted = set()

    def reached(*, seconds, **_):
        counted.add(round(world.clock.monotonic() - seconds, 3))

    played.limits = SimpleNamespace(reached=reached)
    await world.run.publish()
    world.start()
    requests, begun = world.sampler.generation.evaluation_requests, set()
    real = requests.add

    def add(key, count, on_end):
        if count > 1:
            begun.add(round(world.clock.monotonic(), 3))
        real(key, count, on_end)

    requests.add = add
    world.engine.is_paced = True
    await until_done(world)

    # The two blocks of a prompt are drawn one after another.
    assert len(begun) == 2
    assert counted == begun
