"""Evaluations at the coordinator: planned, handed out, counted once, summed up; over a real store."""

import dataclasses
import threading

import pytest

from heterorl.common.errors import InvalidRequest, NotRegistered, Quarantined
from heterorl.common.evaluation.summary import summarize
from heterorl.common.types.common import Digest
from heterorl.common.types.evaluation import EvaluationSet, EvaluationState, PromptResult, ScoredSample
from heterorl.common.types.rollout import DropReason, PushStatus, ReturnReason, WorkAssignment, WorkGrant
from heterorl.common.types.run import CanaryReport, Command, Heartbeat
from heterorl.common.types.sample import SampleFilter, SamplePage
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.coordinator.core import Coordinator
from heterorl.coordinator.store import tallies
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

    async def ask(self, count=2, site=SITE, *, version=None, digest=DIGEST, num_prompts=50, names=("math",), **changes):
        sets = [EvaluationSet(name=name, task_digest=digest, num_prompts=num_prompts) for name in names]
        version = self.run.head if version is None else version
        return await self.core.lease_work(
            site=site, incarnation=INCARNATION, max_groups=count, policy_version=version, sets=sets, **changes
        )

    async def answer(self, grant, site=SITE, *, reward=1.0, **changes):
        values = {"state_root": grant.evaluation.state_root, "results": results(grant, reward=reward), **changes}
        return await self.core.push_evaluation(site=site, incarnation=INCARNATION, **values)

    async def abandon(self, grant, site=SITE, **changes):
        numbers = [each.id for each in grant.assignments]
        await self.core.abandon_work(site=site, incarnation=INCARNATION, assignments=numbers, **changes)

    async def beat(self, site=SITE, *, version=0):
        return await self.core.heartbeat(
            Heartbeat(site=site, incarnation=INCARNATION, policy_version=version, state_root="", tokens_per_s=1.0)
        )  # fmt: skip

    async def of(self, version):
        found = await self.core.list_evaluations(after_version=version - 1)
        return next(each for each in found if each.version == version)


def results(grant, *, reward=1.0):
    sample = ScoredSample(reward=reward, num_tokens=3, is_truncated=False, text="x")
    return tuple(
        PromptResult(
            assignment=each.id, prompt_index=each.prompt_index, samples=(sample,) * grant.evaluation.draws.num_samples
        )
        for each in grant.assignments
    )


def prompts(grant):
    return [each.prompt_index for each in grant.assignments]


@pytest.fixture
async def world(tmp_path):
    world = await World(tmp_path).open(tmp_path)
    yield world
    await world.core.close()


async def test_prompts_that_a_site_holds_are_not_shown_as_groups(world):
    await world.ask(count=2)
    await world.run.lease(3)
    first, _ = (await world.core.get_status()).sites
    assert (first.work_leased, first.work_away) == (3, 0)


async def test_a_version_is_planned_handed_out_and_summed_up(world):
    grants = [await world.ask(), await world.ask(site=B), await world.ask()]

    assert [prompts(grant) for grant in grants] == [[0, 1], [2, 3], [4, 5]]
    spec = grants[0].evaluation
    assert (spec.task_set, spec.version, spec.state_root) == ("math", 0, world.run.roots[0])
    assert spec.draws.temperature == 0.6
    assert not (await world.ask(site=SITE, names=("other",))).assignments

    assert (await world.of(0)).state is EvaluationState.RUNNING
    assert await world.answer(grants[0]) == 2
    half = await world.of(0)
    assert (half.state, half.num_wanted, half.summary.num_prompts) == (EvaluationState.RUNNING, 6, 2)
    await world.answer(grants[1], B, reward=0.0)
    await world.answer(grants[2], reward=None)
    done = await world.of(0)

    assert done.state is EvaluationState.DONE
    assert done.sites == ((SITE, 4), (B, 2))
    assert (done.summary.num_prompts, done.summary.num_samples, done.summary.num_errors) == (6, 128, 64)
    # Two prompts of ones, two of noughts, two without a score.
    assert done.summary.average.mean == 0.5
    assert [entry.k for entry in done.summary.passes] == [1, 2, 4, 8, 16, 32]
    assert (done.task_digest, done.ended_time) == (DIGEST, world.clock.wall())


async def test_held_out_prompts_take_nothing_of_the_share_of_training(world):
    await world.ask(6)
    before = await world.core.database.run(tallies.outstanding)
    granted = await world.core.lease_work(site=SITE, incarnation=INCARNATION, max_groups=3, policy_version=0)

    assert before == 0
    assert [each.id for each in granted.assignments] == [0, 1, 2]
    assert await world.core.database.run(lambda connection: tallies.held(connection, SITE)) == 3
    # What runs out unanswered is no debt of the site either.
    world.clock.advance(1e6)
    await world.ask(site=B)
    owed = await world.core.database.run(
        lambda connection: connection.execute("SELECT owed FROM temp.sharer WHERE site = ?", (SITE,)).fetchone()
    )
    assert owed == (3,)


async def test_a_group_for_a_held_out_prompt_is_not_trained_on(world):
    (number,) = [each.id for each in (await world.ask(1)).assignments]
    work = WorkAssignment(id=number, prompt_index=0, seed=0, lease_s=1.0)
    (outcome,) = await world.core.push_groups([world.run.group(work)])

    assert (outcome.status, outcome.reason) == (PushStatus.DROPPED, DropReason.INVALID)


async def test_a_prompt_counts_once_however_often_it_is_delivered(world):
    grant = await world.ask()

    assert await world.answer(grant, results=results(grant)[:1]) == 1
    assert await world.answer(grant, reward=0.0) == 1
    assert await world.answer(grant, reward=0.0) == 0
    # The first content stands: 32 right ones and 32 wrong ones.
    assert (await world.of(0)).summary.average.mean == 0.5


async def test_texts_that_come_with_scores_are_kept_once_as_samples(world):
    grant = await world.ask()
    told = tuple(dataclasses.replace(result, prompt="1+1=") for result in results(grant))

    await world.answer(grant, results=(told[0],))
    await world.answer(grant, results=told)
    listed = await world.core.list_samples(wanted=SampleFilter(), page=SamplePage())

    assert [(each.kept_because, each.detail, each.site) for each in listed.samples] == [
        ("evaluation", "math", SITE)
    ] * 2
    # The site states counts, not ids.
    assert [each.num_tokens for each in listed.samples] == [32 * 3] * 2
    sample = await world.core.get_sample(sample_id=listed.samples[0].id)
    assert (sample.prompt, [rollout.completion for rollout in sample.rollouts]) == ("1+1=", ["x"] * 32)


async def test_texts_that_are_not_told_are_not_kept(world):
    await world.answer(await world.ask())

    assert not (await world.core.list_samples(wanted=SampleFilter(), page=SamplePage())).samples


async def test_the_prompts_of_a_silent_site_go_to_another_and_a_late_answer_counts_no_prompt_twice(world):
    lost = await world.ask()
    world.clock.advance(121.0)
    again = await world.ask(site=B)

    assert prompts(again) == prompts(lost)
    assert await world.answer(lost) == 2
    assert await world.answer(again, B, reward=0.0) == 0
    assert (await world.of(0)).sites == ((SITE, 2),)


async def test_near_its_end_prompts_are_handed_to_a_second_site_and_the_first_answer_counts(world):
    slow, fast = await world.ask(4), await world.ask(site=B)
    await world.answer(fast, B)
    taken = await world.ask(3, site=B)

    assert prompts(taken) == [0, 1, 2]
    # Each site is handed a prompt once.
    assert prompts(await world.ask(3, site=B)) == [3]
    assert not (await world.ask(site=B)).assignments
    assert not (await world.ask()).assignments
    assert await world.answer(taken, B) == 3
    assert await world.answer(slow, reward=0.0) == 1
    assert ((await world.of(0)).state, (await world.of(0)).sites) == (EvaluationState.DONE, ((SITE, 1), (B, 5)))


async def test_sets_not_begun_come_before_prompts_that_another_site_holds(tmp_path):
    world = await World(tmp_path, evaluation=[{"name": name, "num_prompts": 2} for name in "ab"]).open(tmp_path)
    grants = [await world.ask(site=site, names="ab") for site in (SITE, B, B, SITE)]

    assert [grant.evaluation.task_set for grant in grants] == ["a", "b", "a", "b"]
    await world.core.close()


async def test_a_question_whose_answer_was_lost_is_answered_the_same(world):
    first = await world.ask(request_id="a")

    assert prompts(await world.ask(request_id="a")) == prompts(first)
    assert prompts(await world.ask(request_id="b")) == [2, 3]


async def test_a_site_whose_process_begins_anew_holds_nothing_of_the_last_one(world):
    await world.ask(6)
    await world.core.register(world.run.registration(held=()))

    assert prompts(await world.ask(6, site=B)) == [0, 1, 2, 3, 4, 5]


async def test_prompts_and_scores_outlive_a_restart(world):
    first, second = await world.ask(request_id="a"), await world.ask(request_id="b")
    await world.answer(first)
    await world.again()

    assert prompts(await world.ask(request_id="b")) == [2, 3]
    assert await world.answer(first) == 0
    assert await world.answer(second) == 2
    assert (await world.of(0)).summary.num_prompts == 4


async def test_what_no_site_began_gives_way_to_a_newer_version_and_what_was_begun_does_not(world):
    await world.ask(version=0)
    for _ in range(4):
        await world.run.publish()

    # Every second version: 2 was open when 4 came; 0 goes on.
    assert [each.version for each in await world.core.list_evaluations()] == [0, 4]
    assert (await world.ask(site=B, version=0)).evaluation.version == 0
    assert (await world.ask(site=B)).evaluation.version == 4
    # Nothing is given of another version than the site's.
    assert not (await world.ask(site=B, version=3)).assignments


@pytest.mark.parametrize("has_site", [True, False])
async def test_an_evaluation_whose_version_no_site_has_any_more_ends_with_what_it_got(world, has_site):
    grant = await world.ask(version=0)
    await world.answer(grant)
    for _ in range(2):
        await world.run.publish()
    # No newer one is begun: it goes on, whoever comes back to it.
    world.clock.advance(200.0)
    await world.beat(version=2)
    await world.beat(B, version=1)
    assert not (await world.ask(site=B, version=1)).assignments
    assert (await world.of(0)).state is EvaluationState.RUNNING

    await world.beat(version=0 if has_site else 2)
    assert (await world.ask(site=B)).evaluation.version == 2
    await world.ask(site=B)

    old = await world.of(0)
    assert (old.state, old.summary.num_prompts, old.num_wanted) == (
        EvaluationState.RUNNING if has_site else EvaluationState.INCOMPLETE, 2, 6,
    )  # fmt: skip
    assert bool((await world.ask(version=0)).assignments) is has_site


async def test_a_coordinator_that_has_just_started_ends_no_evaluation_of_a_version_that_a_site_may_have(world):
    await world.ask(version=0)
    for _ in range(2):
        await world.run.publish()
    world.clock.advance(200.0)
    await world.again()
    for _ in range(2):
        await world.ask(site=B)

    assert (await world.of(0)).state is EvaluationState.RUNNING
    world.clock.advance(121.0)
    await world.ask(site=B)
    assert (await world.of(0)).state is EvaluationState.INCOMPLETE


async def test_what_is_answered_of_an_evaluation_that_is_over_counts_nothing(world):
    grant = await world.ask(version=0)
    for _ in range(2):
        await world.run.publish()
    world.clock.advance(200.0)
    for _ in range(2):
        await world.ask(site=B)

    assert await world.answer(grant) == 0
    assert (await world.of(0)).state is EvaluationState.INCOMPLETE


async def test_statistics_keep_nobody_from_the_store(world, monkeypatch):
    threads, store = [], await world.core.database.run(lambda _: threading.get_ident())

    def noted(*arguments, **options):
        threads.append(threading.get_ident())
        return summarize(*arguments, **options)

    monkeypatch.setattr("heterorl.coordinator.evaluation_jobs.summarize", noted)
    for grant in [await world.ask() for _ in range(3)]:
        await world.answer(grant)
        await world.of(0)

    assert len(threads) == 3
    assert store not in threads


@pytest.mark.parametrize("call", ["lease", "repeated push"])
async def test_a_process_that_died_before_it_summed_up_does_so_when_it_is_asked(world, call):
    grant = await world.ask(6)
    end = world.core.evaluation._end_over

    async def nothing():
        return None

    world.core.evaluation._end_over = nothing
    await world.answer(grant)
    assert (await world.of(0)).state is EvaluationState.RUNNING
    world.core.evaluation._end_over = end
    await (world.ask() if call == "lease" else world.answer(grant))

    assert (await world.of(0)).state is EvaluationState.DONE


async def test_no_work_of_an_evaluation_is_left_when_it_is_over(world):
    await world.abandon(await world.ask())
    await world.answer(await world.ask(6, site=B), B)

    assert (await world.of(0)).state is EvaluationState.DONE
    for table in ("work", "evaluation_results", "temp.out_work", "temp.holder"):
        (count,) = await world.core.database.run(
            lambda connection, table=table: connection.execute(f"SELECT count(*) FROM {table}").fetchone()
        )
        assert count == 0, table


async def test_versions_that_the_lineage_lost_are_forgotten(world):
    await world.run.publish()
    await world.run.publish()
    await world.ask()
    request = await world.run.prepare(lineage_version=1, snapshot=True)
    world.run.head = await world.core.publish_version(request)

    # 0 had given way to 2.
    assert await world.core.list_evaluations() == ()
    assert not (await world.ask(version=2)).assignments


async def test_at_the_end_the_last_version_alone_is_evaluated_whatever_its_number(world):
    await world.ask(version=0)
    await world.run.publish()
    assert [each.version for each in await world.core.list_evaluations()] == [0]
    await world.core.drain(reason="the end")

    assert [each.version for each in await world.core.list_evaluations()] == [0, 1]
    # A site that has not pulled the last version yet is told to ask again.
    waiting = await world.ask(version=0)
    assert (waiting.assignments, waiting.retry_after_s > 0) == ((), True)
    await world.answer(await world.ask(6))
    assert [(await world.of(version)).state for version in (0, 1)] == [EvaluationState.INCOMPLETE, EvaluationState.DONE]
    for version in (0, 1):
        assert await world.ask(version=version) == WorkGrant(
            assignments=(), reason="nothing is to be evaluated", retry_after_s=0.0
        )


async def test_a_finished_run_drains_while_something_is_to_be_evaluated_then_stops(tmp_path):
    world = await World(tmp_path, max_versions=1).open(tmp_path)
    await world.run.publish()
    try:
        assert await world.beat(version=1) == (Command.DRAIN,)
        await world.answer(await world.ask(6))
        assert await world.beat(version=1) == (Command.STOP,)
    finally:
        await world.core.close()


@pytest.mark.parametrize("is_begun", [False, True])
async def test_a_set_that_the_operator_removed_keeps_no_run_from_its_end(tmp_path, is_begun):
    world = await World(tmp_path, max_versions=1).open(tmp_path)
    if is_begun:
        await world.answer(await world.ask())
    world.config = world.config.model_copy(update={"evaluation": ()})
    await world.again()
    await world.run.publish()

    found = [(each.state, each.summary.num_prompts) for each in await world.core.list_evaluations()]
    assert found == [(EvaluationState.INCOMPLETE, 2)] * is_begun
    assert await world.beat(version=1) == (Command.STOP,)
    await world.core.close()


async def test_a_task_with_fewer_prompts_is_evaluated_whole(world):
    grant = await world.ask(num_prompts=1)

    assert prompts(grant) == [0]
    await world.answer(grant)
    assert ((await world.of(0)).num_wanted, (await world.of(0)).state) == (1, EvaluationState.DONE)


async def test_the_first_sites_task_is_the_sets_and_another_one_is_given_nothing(world):
    await world.ask()
    assert "another one at this site" in (await world.ask(site=B, digest=OTHER)).reason
    assert "no set" in (await world.ask(site=B, names=("code",))).reason


async def test_a_site_that_pulls_a_variant_evaluates_nothing(world):
    await world.core.acquire_lease(
        holder="learner", contract=world.run.contract, request_id="variants", variants=("int8",)
    )
    await world.core.register(world.run.registration(site=B, variant="int8"))

    refused = await world.ask(site=B)

    assert (refused.assignments, refused.evaluation) == ((), None)
    assert "pulls a variant" in refused.reason
    assert refused.retry_after_s >= 60.0
    assert (await world.ask()).assignments


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
        assert (await world.ask(site=B, digest=OTHER)).assignments
    finally:
        await world.core.close()


async def test_a_site_in_quarantine_evaluates_nothing_and_its_answers_count_nothing(world):
    request = dataclasses.replace(await world.run.prepare(), canary=(-1.0,))
    world.run.head = await world.core.publish_version(request)
    grant = await world.ask(version=0)
    off = CanaryReport(site=SITE, incarnation=INCARNATION, version=1, logprobs=(-9.0,))
    assert (await world.core.report_canary(off)).quarantine

    for refused in (world.ask(version=0), world.answer(grant)):
        with pytest.raises(Quarantined):
            await refused
    assert (await world.of(0)).summary.num_prompts == 0

    await world.core.release_site(site=SITE, reason="repaired")
    assert await world.answer(grant) == 2


async def test_what_is_not_a_sites_or_was_drawn_otherwise_is_refused_and_counts_nothing(world):
    grant = await world.ask()
    first = results(grant)[0]
    wrong = [
        (B, {}, "was not given to the site"),
        (SITE, {"state_root": OTHER}, "has another one"),
        (SITE, {"results": (dataclasses.replace(first, prompt_index=1),)}, "was not given to the site for prompt 1"),
        (SITE, {"results": (dataclasses.replace(first, samples=()),)}, "0 completions, 32 are wanted"),
    ]
    for site, changes, words in wrong:
        with pytest.raises(InvalidRequest, match=words):
            await world.answer(grant, site, **changes)
    with pytest.raises(NotRegistered):
        await world.answer(grant, "nobody")

    assert (await world.of(0)).summary.num_prompts == 0


async def test_prompts_that_are_given_back_go_to_others_and_are_never_closed(world):
    for _ in range(4):
        grant = await world.ask(1)
        assert prompts(grant) == [0]
        await world.abandon(grant, reason=ReturnReason.ENGINE_FAILED)
        with pytest.raises(InvalidRequest, match="was not given to the site"):
            await world.answer(grant)

    assert prompts(await world.ask(site=B)) == [0, 1]


async def test_a_slow_site_may_answer_after_three_others_had_its_prompt(tmp_path):
    world = await World(tmp_path, evaluation=[{"name": "math", "num_prompts": 1}]).open(tmp_path)
    sites = (SITE, B, "us-2", "us-3")
    grants = []
    for site in sites:
        await world.run.register(site)
        grants.append(await world.ask(site=site))
        # Its lease ends, so the next one gets the prompt.
        world.clock.advance(200.0)

    assert [prompts(grant) for grant in grants] == [[0]] * 4
    assert [await world.answer(grant, site) for grant, site in zip(grants, sites, strict=True)] == [1, 0, 0, 0]
    assert (await world.of(0)).state is EvaluationState.DONE
    await world.core.close()


async def test_a_list_goes_on_behind_whole_versions(tmp_path):
    sets = [{"name": name, "num_prompts": 1} for name in ("a", "b")]
    world = await World(tmp_path, evaluation=sets).open(tmp_path)
    try:
        for version in range(3):
            for _ in sets:
                await world.answer(await world.ask(names=("a", "b")))
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
