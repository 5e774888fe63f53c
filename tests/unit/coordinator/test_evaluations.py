"""Evaluations at the coordinator: planned, handed out, counted once, summed up; over a real store."""

import asyncio
import dataclasses
import threading

import pytest

from heterorl.common.errors import InvalidRequest, NotRegistered
from heterorl.common.evaluation.summary import summarize
from heterorl.common.types.common import Digest
from heterorl.common.types.evaluation import EvaluationSet, EvaluationState, PromptResult, ScoredSample
from heterorl.common.types.run import Command, Heartbeat
from heterorl.common.types.sample import SampleFilter, SamplePage
from heterorl.coordinator.config import CoordinatorConfig
from heterorl.coordinator.core import Coordinator
from tests.support.clock import ManualClock
from tests.support.run import INCARNATION, SITE, Run

DIGEST, OTHER = Digest("d" * 64), Digest("e" * 64)
SETS = [{"name": "math", "num_prompts": 6, "samples_per_prompt": 32, "temperature": 0.6, "every_versions": 2}]
B = "us-1"


class World:
    def __init__(self, directory, **changes):
        self.clock = ManualClock()
        self.config = CoordinatorConfig(
            data_dir=directory / "data", **{"evaluation": SETS, "work_lease_s": 120.0, **changes}
        )

    async def open(self, directory):
        self.core = await Coordinator.open(self.config, self.clock)
        self.run = Run(self.core, directory)
        await self.run.begin()
        await self.run.publish()
        for site in (SITE, B):
            await self.run.register(site)
        return self

    async def again(self):
        await self.core.close()
        self.core = await Coordinator.open(self.config, self.clock)
        self.run.api = self.core

    async def ask(self, site=SITE, *, version=None, digest=DIGEST, num_prompts=50, names=("math",), **changes):
        values = {"can_pull": False, "max_parts": 1, "held": (), **changes}
        sets = [EvaluationSet(name=name, task_digest=digest, num_prompts=num_prompts) for name in names]
        version = self.run.head if version is None else version
        return await self.core.lease_evaluation(
            site=site, incarnation=INCARNATION, policy_version=version, sets=sets, **values
        )

    async def answer(self, part, site=SITE, *, reward=1.0, **changes):
        values = {"state_root": part.state_root, "results": results(part, reward=reward), **changes}
        return await self.core.push_evaluation(site=site, incarnation=INCARNATION, part=part.id, **values)

    async def of(self, version):
        found = await self.core.list_evaluations(after_version=version - 1)
        return next(each for each in found if each.version == version)


def results(part, *, reward=1.0):
    sample = ScoredSample(reward=reward, num_tokens=3, is_truncated=False, text="x")
    return tuple(
        PromptResult(prompt_index=index, samples=(sample,) * part.draws.num_samples)
        for index in range(part.first_prompt, part.first_prompt + part.num_prompts)
    )


@pytest.fixture
async def world(tmp_path):
    world = await World(tmp_path).open(tmp_path)
    yield world
    await world.core.close()


async def test_a_version_is_planned_handed_out_and_summed_up(world):
    grants = [await world.ask(), await world.ask(B), await world.ask(held=(1,))]
    parts = [grant.parts[0] for grant in grants]

    # 64 completions a part: two prompts of 32.
    assert [(part.first_prompt, part.num_prompts, part.version) for part in parts] == [(0, 2, 0), (2, 2, 0), (4, 2, 0)]
    assert parts[0].state_root == world.run.roots[0]
    assert parts[0].draws.temperature == 0.6
    assert not (await world.ask(held=(1, 3))).parts

    assert (await world.of(0)).state is EvaluationState.RUNNING
    assert await world.answer(parts[0]) == 2
    half = await world.of(0)
    assert (half.state, half.num_wanted, half.summary.num_prompts) == (EvaluationState.RUNNING, 6, 2)
    await world.answer(parts[1], B, reward=0.0)
    await world.answer(parts[2], reward=None)
    done = await world.of(0)

    assert done.state is EvaluationState.DONE
    assert done.sites == ((SITE, 4), (B, 2))
    assert (done.summary.num_prompts, done.summary.num_samples, done.summary.num_errors) == (6, 128, 64)
    # Two prompts of ones, two of noughts, two without a score.
    assert done.summary.average.mean == 0.5
    assert [entry.k for entry in done.summary.passes] == [1, 2, 4, 8, 16, 32]
    assert (done.task_digest, done.ended_time) == (DIGEST, world.clock.wall())


async def test_a_prompt_counts_once_however_often_it_is_delivered(world):
    (part,) = (await world.ask()).parts

    assert await world.answer(part, results=results(part)[:1]) == 1
    assert await world.answer(part, reward=0.0) == 1
    assert await world.answer(part, reward=0.0) == 0
    # The first content stands: 32 right ones and 32 wrong ones.
    assert (await world.of(0)).summary.average.mean == 0.5


async def test_texts_that_come_with_scores_are_kept_once_as_samples(world):
    (part,) = (await world.ask()).parts
    told = tuple(dataclasses.replace(result, prompt="1+1=") for result in results(part))

    await world.answer(part, results=(told[0],))
    await world.answer(part, results=told)
    listed = await world.core.list_samples(wanted=SampleFilter(), page=SamplePage())

    assert [(each.kept_because, each.detail, each.site) for each in listed.samples] == [
        ("evaluation", "math", SITE)
    ] * 2
    sample = await world.core.get_sample(sample_id=listed.samples[0].id)
    assert (sample.prompt, [rollout.completion for rollout in sample.rollouts]) == ("1+1=", ["x"] * 32)


async def test_texts_that_are_not_told_are_not_kept(world):
    (part,) = (await world.ask()).parts

    await world.answer(part)

    assert not (await world.core.list_samples(wanted=SampleFilter(), page=SamplePage())).samples


async def test_the_part_of_a_silent_site_goes_to_another_and_a_late_answer_counts_no_prompt_twice(world):
    (part,) = (await world.ask()).parts
    world.clock.advance(121.0)
    (again,) = (await world.ask(B)).parts

    assert again.id == part.id
    assert await world.answer(part) == 2
    assert await world.answer(again, B, reward=0.0) == 0
    assert (await world.of(0)).sites == ((SITE, 2),)


async def test_a_site_that_lives_keeps_its_part_for_the_lease(world):
    (part,) = (await world.ask()).parts
    beat = Heartbeat(
        site=SITE, incarnation=INCARNATION, policy_version=0, state_root="", tokens_per_s=1.0, outbox_groups=0
    )
    for _ in range(17):
        world.clock.advance(100.0)
        await world.core.heartbeat(beat)
    assert (await world.ask(B)).parts[0].id != part.id
    world.clock.advance(101.0)
    await world.core.heartbeat(beat)

    assert (await world.ask(B, held=(2,))).parts[0].id == part.id


async def test_a_site_that_asks_after_a_silence_is_not_silent_before_its_answer_has_left(world):
    world.clock.advance(121.0)

    # Both wait for the store, where the second finds the part of the first.
    first, second = await asyncio.gather(world.ask(), world.ask(B))

    assert first.parts[0].id != second.parts[0].id


async def test_what_a_site_holds_and_does_not_know_of_is_given_again(world):
    first = await world.ask(max_parts=2)

    assert (await world.ask(max_parts=2)).parts == first.parts
    assert [part.id for part in (await world.ask(max_parts=2, held=(1,))).parts] == [2]
    assert [part.id for part in (await world.ask(max_parts=2, held=(1, 2))).parts] == [3]


async def test_parts_and_scores_outlive_a_restart(world):
    parts = (await world.ask(max_parts=2)).parts
    await world.answer(parts[0])
    await world.again()

    assert [part.id for part in (await world.ask(max_parts=3)).parts] == [2]
    assert await world.answer(parts[0]) == 0
    assert await world.answer(parts[1]) == 2
    assert (await world.of(0)).summary.num_prompts == 4


async def test_what_nobody_began_gives_way_to_a_newer_version_and_what_was_begun_does_not(world):
    await world.ask(version=0)
    for _ in range(4):
        await world.run.publish()

    # Every second version: 2 was open when 4 came; 0 goes on.
    assert [each.version for each in await world.core.list_evaluations()] == [0, 4]
    assert (await world.ask(B, version=0)).parts[0].version == 0
    assert (await world.ask(B, held=(2,))).parts[0].version == 4


async def test_what_nobody_goes_on_with_is_finished_by_a_site_that_fetches_its_version(world):
    (part,) = (await world.ask(version=0)).parts
    await world.run.publish()
    await world.core.abandon_evaluation(site=SITE, incarnation=INCARNATION, parts=[part.id])

    assert not (await world.ask(B, can_pull=True)).parts
    world.clock.advance(60.0)
    assert not (await world.ask(B)).parts
    assert (await world.ask(B, can_pull=True)).parts[0].id == part.id


async def test_an_older_one_that_was_just_left_is_gone_on_with_though_a_newer_one_is_done(world):
    (first,) = (await world.ask(version=0)).parts
    for _ in range(2):
        await world.run.publish()
    newer = (await world.ask(B, max_parts=3)).parts
    await world.core.abandon_evaluation(site=SITE, incarnation=INCARNATION, parts=[first.id])
    for part in newer:
        await world.answer(part, B)

    assert [(await world.of(version)).state for version in (0, 2)] == [EvaluationState.RUNNING, EvaluationState.DONE]
    world.clock.advance(60.0)
    for part in (await world.ask(B, can_pull=True, max_parts=3)).parts:
        await world.answer(part, B)
    assert (await world.of(0)).state is EvaluationState.DONE


@pytest.mark.parametrize("is_silent", [True, False])
async def test_an_older_one_that_stands_still_ends_incomplete_when_a_newer_one_is_done(world, is_silent):
    (part,) = (await world.ask(version=0)).parts
    await world.answer(part)
    for _ in range(2):
        await world.run.publish()
    newer = (await world.ask(B, max_parts=3)).parts
    # For as long as a site may take, or the run is ending.
    world.clock.advance(1790.0)
    await world.answer(newer[0], B)
    if is_silent:
        world.clock.advance(20.0)
    else:
        await world.core.drain(reason="tests")
    for part in newer[1:]:
        await world.answer(part, B)

    old, new = await world.of(0), await world.of(2)
    assert (old.state, old.summary.num_prompts, old.num_wanted) == (EvaluationState.INCOMPLETE, 2, 6)
    assert new.state is EvaluationState.DONE
    assert not (await world.ask(version=0)).parts


async def test_evaluations_that_take_longer_than_versions_end_all_the_same(world):
    # A site has time for one part of three, then its weights are newer by two versions.
    for turn in range(12):
        grant = await world.ask(can_pull=turn % 2 == 1)
        if grant.parts:
            await world.answer(grant.parts[0])
        world.clock.advance(100.0)
        for _ in range(2):
            await world.run.publish()

    listed = await world.core.list_evaluations()
    assert [each.version for each in listed if each.state is EvaluationState.DONE] == [0, 8, 16]
    assert len([each for each in listed if each.state is EvaluationState.RUNNING]) <= 1


async def test_an_evaluation_that_nothing_comes_back_of_holds_up_newer_ones_for_a_while_alone(world):
    await world.ask(version=0)
    for _ in range(2):
        await world.run.publish()
    world.clock.advance(1000.0)
    assert not (await world.ask(B)).parts
    world.clock.advance(900.0)

    assert (await world.ask(B)).parts[0].version == 2
    # It is with nobody: a site that comes back to it finds nothing to do.
    assert (await world.of(0)).state is EvaluationState.INCOMPLETE


async def test_statistics_keep_nobody_from_the_store(world, monkeypatch):
    threads, store = [], await world.core.database.run(lambda _: threading.get_ident())

    def noted(*arguments, **options):
        threads.append(threading.get_ident())
        return summarize(*arguments, **options)

    monkeypatch.setattr("heterorl.coordinator.evaluations.results.summarize", noted)
    for part in (await world.ask(max_parts=3)).parts:
        await world.answer(part)
        await world.of(0)

    assert len(threads) == 3
    assert store not in threads


async def test_a_process_that_died_before_it_summed_up_does_so_when_it_is_asked(world):
    parts = (await world.ask(max_parts=3)).parts
    end = world.core.evaluation._end

    async def nothing(job, state):
        return None

    world.core.evaluation._end = nothing
    for part in parts:
        await world.answer(part)
    assert (await world.of(0)).state is EvaluationState.RUNNING
    world.core.evaluation._end = end
    await world.ask()

    assert (await world.of(0)).state is EvaluationState.DONE


async def test_nothing_of_an_evaluation_stays_in_memory_when_it_has_ended(world):
    (part,) = (await world.ask()).parts
    await world.core.abandon_evaluation(site=SITE, incarnation=INCARNATION, parts=[part.id], reason="no room")
    for part in (await world.ask(B, max_parts=3)).parts:
        await world.answer(part, B)
    assert (await world.of(0)).state is EvaluationState.DONE
    assert not (await world.ask(B)).parts

    evaluation = world.core.evaluation
    assert (evaluation._terms.out, evaluation._terms.moved, evaluation._terms.answered) == ({}, {}, {})
    assert evaluation._refused == set()


async def test_versions_that_the_lineage_lost_are_forgotten(world):
    await world.run.publish()
    await world.run.publish()
    await world.ask()
    request = await world.run.prepare(lineage_version=1, snapshot=True)
    world.run.head = await world.core.publish_version(request)

    # 0 had given way to 2.
    assert await world.core.list_evaluations() == ()
    assert not (await world.ask(version=2)).parts


async def test_the_last_version_is_evaluated_whatever_its_number_and_before_anybody_stops(world):
    await world.run.publish()
    assert [each.version for each in await world.core.list_evaluations()] == [0]
    await world.core.drain(reason="the end")

    # 0 was begun by nobody.
    assert [each.version for each in await world.core.list_evaluations()] == [1]
    assert (await world.ask(version=0, can_pull=True)).parts[0].version == 1


async def test_a_finished_run_drains_while_something_is_to_be_evaluated_then_stops(tmp_path):
    world = await World(tmp_path, max_versions=1).open(tmp_path)
    await world.run.publish()
    beat = Heartbeat(
        site=SITE, incarnation=INCARNATION, policy_version=1, state_root="", tokens_per_s=1.0, outbox_groups=0
    )
    try:
        assert await world.core.heartbeat(beat) == (Command.DRAIN,)
        for part in (await world.ask(max_parts=3)).parts:
            await world.answer(part)
        assert await world.core.heartbeat(beat) == (Command.STOP,)
    finally:
        await world.core.close()


async def test_a_task_with_fewer_prompts_is_evaluated_whole(world):
    (part,) = (await world.ask(num_prompts=1)).parts

    assert part.num_prompts == 1
    await world.answer(part)
    assert (await world.of(0)).num_wanted == 1


async def test_the_first_sites_task_is_the_sets_and_another_one_is_given_nothing(world):
    await world.ask()
    assert "another one at this site" in (await world.ask(B, digest=OTHER)).reason
    assert "no set" in (await world.ask(B, names=("code",))).reason


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"evaluation": [{**SETS[0], "task_digest": OTHER}]}, "another one at this site"),
        ({"evaluation_sites": [B]}, "evaluation_sites does not name"),
    ],
)
async def test_the_operator_says_which_task_and_which_sites(tmp_path, changes, words):
    world = await World(tmp_path, **changes).open(tmp_path)
    try:
        assert words in (await world.ask()).reason
        assert (await world.ask(B, digest=OTHER)).parts
    finally:
        await world.core.close()


async def test_what_is_not_a_sites_or_not_the_parts_is_refused_and_counts_nothing(world):
    (part,) = (await world.ask()).parts
    wrong = [
        (B, {}, "never given"),
        (SITE, {"state_root": OTHER}, "has another one"),
        (SITE, {"results": results(dataclasses.replace(part, first_prompt=2))}, "prompt 2 is none"),
        (SITE, {"results": (PromptResult(prompt_index=0, samples=()),)}, "0 completions, 32 are wanted"),
    ]
    for site, changes, words in wrong:
        with pytest.raises(InvalidRequest, match=words):
            await world.answer(part, site, **changes)
    with pytest.raises(NotRegistered):
        await world.answer(part, "nobody")

    assert (await world.of(0)).summary.num_prompts == 0


async def test_a_site_that_cannot_do_an_evaluation_is_not_asked_again(world):
    (part,) = (await world.ask()).parts
    await world.core.abandon_evaluation(
        site=SITE, incarnation=INCARNATION, parts=[part.id], reason="no room for a prompt"
    )

    assert not (await world.ask()).parts
    assert (await world.ask(B)).parts[0].id == part.id


async def test_a_list_goes_on_behind_whole_versions(tmp_path):
    sets = [{"name": name, "num_prompts": 1} for name in ("a", "b")]
    world = await World(tmp_path, evaluation=sets).open(tmp_path)
    try:
        for version in range(3):
            for _ in sets:
                (part,) = (await world.ask(names=("a", "b"))).parts
                await world.answer(part)
            if version < 2:
                await world.run.publish()
        first = await world.core.list_evaluations(limit=5)
        rest = await world.core.list_evaluations(limit=5, after_version=first[-1].version)
        of_b = await world.core.list_evaluations(task_set="b")
    finally:
        await world.core.close()

    assert [(each.version, each.task_set) for each in first] == [(0, "a"), (0, "b"), (1, "a"), (1, "b")]
    assert [(each.version, each.task_set) for each in rest] == [(2, "a"), (2, "b")]
    assert [each.version for each in of_b] == [0, 1, 2]
