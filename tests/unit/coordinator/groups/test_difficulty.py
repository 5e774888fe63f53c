"""A window of difficulty: prompts outside it are passed over, by numbers that nobody else has to know of."""

import dataclasses

import pytest
from pydantic import ValidationError

from heterorl.common.types.rollout import DropReason
from heterorl.common.types.run import PromptCounts
from heterorl.common.wire.sealed_groups import sealed
from heterorl.coordinator.coordinator_config import CoordinatorConfig, DifficultyConfig
from heterorl.coordinator.core import Coordinator
from heterorl.coordinator.groups.schedule import MAX_PASSED, band_of, note_rewards, prompt_of
from tests.support.clock import ManualClock
from tests.support.run import CONTRACT, Run, credits_of, rollout

WINDOW = DifficultyConfig(outside_share=0.1, low=0.25, high=0.75)
PROMPTS = CONTRACT.num_prompts


async def opened(tmp_path, **changes):
    values = {"groups_per_version": 10, "max_outstanding_groups": 1000, "max_staleness_versions": 500}
    config = CoordinatorConfig(data_dir=tmp_path / "data", **{**values, **changes})
    return await Coordinator.open(config, ManualClock())


async def started(core, tmp_path):
    run = Run(core, tmp_path)
    await run.begin()
    await run.publish()
    await run.register()
    return run


def rewards_of(prompt):
    """Of each ten prompts seven are solved, one is out of reach and two are between."""
    return {0: (0.0, 0.0), 1: (0.0, 1.0), 2: (1.0, 0.0)}.get(prompt % 10, (1.0, 1.0))


async def one_pass(core, run, works):
    """Push a group for each assignment; those of equal rewards are given up as the learner does, the rest is trained on."""
    useful, uniform = [], []
    for work in works:
        rollouts = tuple(rollout(run.head, reward=r, reward_parts=()) for r in rewards_of(work.prompt_index))
        group = dataclasses.replace(run.group(work), rollouts=rollouts)
        await core.push_groups([group])
        (uniform if len(set(rewards_of(work.prompt_index))) == 1 else useful).append(group.id)
    stream = core.stream_groups(epoch=run.epoch, held=[], credits=credits_of(len(works)))
    for _ in works:
        await anext(stream)
    await stream.aclose()
    for _ in range(2):
        # Said again because an answer was lost: counted once.
        await core.abandon_groups(epoch=run.epoch, ids=uniform, reason="equal", counted_as=DropReason.UNIFORM)
    await run.publish(consumed=useful)
    return uniform


@pytest.mark.parametrize(
    ("mean", "band"), [(0.5, "in window"), (0.25, "in window"), (0.2, "too hard"), (0.8, "too easy")]
)
def test_band_of_a_mean(mean, band):
    assert band_of(mean, WINDOW) == band


def test_window_without_an_inside_is_refused():
    with pytest.raises(ValidationError, match="low is above high"):
        DifficultyConfig(low=0.6, high=0.5)


async def test_second_pass_hands_out_what_teaches_and_a_little_of_the_rest_also_after_a_restart(tmp_path):
    core = await opened(tmp_path, difficulty=WINDOW)
    run = await started(core, tmp_path)
    first = await run.lease(PROMPTS)
    assert [work.id for work in first] == list(range(PROMPTS)), "what nobody has seen is handed out"
    uniform = await one_pass(core, run, first)
    assert len(uniform) == 40

    status = await core.get_status()
    assert status.prompts == PromptCounts(in_window=10, too_easy=35, too_hard=5, unseen=0, passed_over=0)
    assert status.ledger.is_balanced
    await core.close()
    core = await opened(tmp_path, difficulty=WINDOW)
    run.api = core
    second = await run.lease(20)

    # The same as another program would decide from the numbers alone.
    numbers = [work.id for work in second]
    assert [work.prompt_index for work in second] == [prompt_of(n, num_prompts=PROMPTS, seed=0) for n in numbers]
    teaching = sum(work.prompt_index % 10 in (1, 2) for work in second)
    assert teaching >= 10, "a fifth of the prompts has most of the assignments; a tenth of the others comes back"
    assert len(set(numbers) | {work.id for work in first}) == PROMPTS + 20, "no assignment is handed out twice"
    status = await core.get_status()
    assert status.prompts.passed_over == numbers[-1] + 1 - PROMPTS - 20
    # A number that was passed over is nobody's.
    skipped = next(n for n in range(PROMPTS, numbers[-1]) if n not in numbers)
    await core.push_groups([dataclasses.replace(run.group(second[0]), assignment=skipped)])
    assert (await core.get_status()).ledger.dropped[DropReason.SURPLUS] == 1
    await core.close()


async def test_site_gets_work_when_no_prompt_is_inside(tmp_path):
    core = await opened(tmp_path, difficulty=DifficultyConfig(outside_share=0.0, low=5.0, high=6.0))
    run = await started(core, tmp_path)
    await one_pass(core, run, await run.lease(PROMPTS))

    numbers = [work.id for work in await run.lease(3)]

    # Behind as many as are passed over in a row, one goes out whatever its prompt.
    assert numbers == [PROMPTS + MAX_PASSED, PROMPTS + 2 * MAX_PASSED + 1, PROMPTS + 3 * MAX_PASSED + 2]
    await core.close()


async def test_mean_follows_the_newest_groups(tmp_path):
    core = await opened(tmp_path, difficulty=WINDOW)
    run = await started(core, tmp_path)
    await one_pass(core, run, await run.lease(PROMPTS))
    reading = core.context.database.run(
        lambda connection: dict(connection.execute("SELECT prompt_index, mean FROM prompts WHERE prompt_index < 4"))
    )

    assert await reading == {0: 0.0, 1: 0.5, 2: 0.5, 3: 1.0}
    work = next(work for work in await run.lease(8) if work.prompt_index % 10 in (1, 2))
    solved = tuple(rollout(run.head, reward=1.0, reward_parts=()) for _ in range(2))
    data = sealed(dataclasses.replace(run.group(work), rollouts=solved)).data
    await core.context.database.run(lambda connection: note_rewards(connection, [data, data, None], WINDOW))
    found = (await core.get_status()).prompts
    assert (found.in_window, found.too_easy, found.too_hard) == (9, 36, 5), "a prompt is counted where it is now"
    await core.close()


async def test_without_a_window_nothing_is_kept_and_nothing_is_passed_over(tmp_path):
    core = await opened(tmp_path)
    run = await started(core, tmp_path)
    await one_pass(core, run, await run.lease(PROMPTS))

    assert [work.id for work in await run.lease(2)] == [PROMPTS, PROMPTS + 1]
    assert (await core.get_status()).prompts is None
    rows = await core.context.database.run(
        lambda connection: connection.execute("SELECT count(*) FROM prompts").fetchone()[0]
    )
    assert rows == 0
    await core.close()
