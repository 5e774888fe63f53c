"""Weighted sums of named rewards: parts by name and weight, one digest for all, and where they are computed."""

import itertools
import math

import pytest

from heterorl.common.errors import ConfigError, RewardError
from heterorl.common.process.config_file import InvalidConfig, load
from heterorl.common.tasks.task_config import TaskConfig, build_task
from heterorl.common.types.rollout import MAX_REWARD_PARTS, RewardPart, total_reward, weighted_sum
from heterorl.learner.learner_config import LearnerConfig

MATCH = {"kind": "match", "name": "correct"}
BRIEF = {"kind": "function", "name": "brief", "function": "mine:brief", "weight": 0.25}
SHAPE = {"kind": "function", "name": "shape", "function": "mine:shape", "weight": -0.5}


@pytest.fixture
def place(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def brief(prompt, completion, answer):\n    return float(len(completion) < 4)\n"
        "def shape(prompt, completion, answer):\n    return {'tags': 2.0, 'length': float(len(completion))}\n"
        "def many(prompt, completion, answer):\n    return {str(number): 1.0 for number in range(60)}\n"
        "def broken(prompt, completion, answer):\n    return 1 / 0\n"
    )
    return tmp_path


def settings(place, *rewards, **options):
    here = [{**reward, "directory": str(place)} if reward["kind"] == "function" else reward for reward in rewards]
    return TaskConfig(digits=1, rewards=here, reward_timeout_s=20, **options)


@pytest.mark.process
def test_parts_stand_by_name_and_weight_and_make_the_reward(place):
    task = build_task(settings(place, MATCH, BRIEF, SHAPE))
    prompt = task.prompt(0)
    try:
        parts = task.score(prompt, prompt.answer)
    finally:
        task.close()

    assert parts == (
        RewardPart(name="correct", value=1.0),
        RewardPart(name="brief", value=1.0, weight=0.25),
        RewardPart(name="shape/tags", value=2.0, weight=-0.5),
        RewardPart(name="shape/length", value=float(len(prompt.answer)), weight=-0.5),
    )
    # 1 + 0.25 - 0.5 * (2 + 2): the answer has two digits.
    assert total_reward(parts) == pytest.approx(-0.75)


def test_parts_that_add_up_to_one_make_a_reward_of_one_in_any_order():
    parts = [RewardPart(name=str(value), value=value) for value in (0.7, 0.2, 0.1)]

    assert {total_reward(order) for order in itertools.permutations(parts)} == {1.0}
    beyond = [*parts, RewardPart(name="x", value=1e308), RewardPart(name="y", value=1e308)]
    assert weighted_sum(beyond) == math.inf
    for value in (1e308, 1.1e6, -1.1e6, math.inf):
        with pytest.raises(RewardError, match=r"at most 1e\+06 either way is trained on"):
            total_reward([RewardPart(name="x", value=value)])
    assert math.isnan(total_reward([RewardPart(name="x", value=math.nan)]))


@pytest.mark.process
def test_digest_says_names_weights_order_and_files(place):
    digests = set()
    tasks = [
        settings(place), settings(place, MATCH), settings(place, MATCH, BRIEF), settings(place, BRIEF, MATCH),
        settings(place, {**MATCH, "name": "right"}, BRIEF), settings(place, MATCH, {**BRIEF, "weight": 0.5}),
        settings(place, MATCH, {**BRIEF, "function": "mine:shape"}),
    ]  # fmt: skip
    for config in tasks:
        task = build_task(config)
        digests.add(task.digest)
        task.close()
    assert len(digests) == len(tasks)

    (place / "mine.py").write_text((place / "mine.py").read_text() + "# changed\n")
    task = build_task(settings(place, MATCH, BRIEF))
    task.close()
    assert task.digest not in digests


@pytest.mark.process
def test_a_reward_that_fails_or_says_too_much_fails_them_all_and_is_named(place):
    broken = {"kind": "function", "name": "odd", "function": "mine:broken"}
    many = {"kind": "function", "name": "many", "function": "mine:many"}
    task = build_task(settings(place, MATCH, broken))
    with pytest.raises(RewardError, match="task.rewards, odd: .*ZeroDivisionError"):
        task.score(task.prompt(0), "1")
    task.close()
    task = build_task(settings(place, many, {**many, "name": "more"}))
    with pytest.raises(RewardError, match=f"120 parts .* {MAX_REWARD_PARTS} are allowed"):
        task.score(task.prompt(0), "1")
    task.close()
    task = build_task(settings(place, {**SHAPE, "name": "n" * 64}))
    assert task.score(task.prompt(0), "1")[0].name == "n" * 64 + "/tags"
    task.close()


@pytest.mark.process
@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ([MATCH, {**BRIEF, "name": "correct"}], "two rewards have the name correct"),
        ([{**MATCH, "weight": 0.0}], "every weight is 0"),
        ([{**BRIEF, "function": "mine:nothing"}], r"^task.rewards\[0\].function: .*has no function nothing"),
    ],
)
def test_what_cannot_be_summed_is_refused_by_its_key(place, rewards, message):
    with pytest.raises(ConfigError, match=message):
        build_task(settings(place, *rewards))


def test_one_reward_or_several_are_named_not_both(place):
    with pytest.raises(ConfigError, match="task.reward and task.rewards are both set"):
        build_task(settings(place, MATCH, reward="mine:brief", reward_path=str(place)))


def test_a_comparison_that_is_not_used_is_refused(place):
    with pytest.raises(ConfigError, match="task.match: is not used"):
        build_task(settings(place, BRIEF, match="math_verify"))
    assert settings(place, MATCH, BRIEF, match="math_verify").uses_match


def test_tables_are_read_from_a_file_whose_directory_their_functions_lie_in(place):
    file = place / "node.toml"
    file.write_text(
        '[task]\ndigits = 1\n[[task.rewards]]\nname = "correct"\nkind = "match"\n'
        '[[task.rewards]]\nname = "brief"\nkind = "function"\nfunction = "mine:brief"\nweight = 0.1\n'
    )
    config = load(LearnerConfig, file).task

    assert [(reward.name, reward.weight) for reward in config.rewards] == [("correct", 1.0), ("brief", 0.1)]
    assert config.rewards[1].directory == str(place)
    assert TaskConfig.model_validate_json(config.model_dump_json()) == config
    for wrong, key in (
        ('kind = "matsch"', "task.rewards[0].kind"),
        ('kind = "match"\nweight = inf', "task.rewards[0].weight"),
    ):
        file.write_text(f'[[task.rewards]]\nname = "correct"\n{wrong}\n')
        with pytest.raises(InvalidConfig) as raised:
            load(LearnerConfig, file)
        assert key in str(raised.value)
