"""Progressions: right answers, partial credit, nothing held out that is trained on."""

import pytest

from heterorl.common.tasks.arithmetic import ProgressionTask
from heterorl.common.tasks.task_config import TaskConfig, build_task


def test_terms_follow_each_other_modulo_the_base_with_reversed_digits():
    task = ProgressionTask(digits=2, terms=3)
    prompts = [task.prompt(index) for index in range(task.num_prompts)]

    prompt = next(prompt for prompt in prompts if prompt.text == "12+34=")
    assert prompt.answer == "640841"


@pytest.mark.parametrize(
    ("completion", "expected"),
    [("640841", 1.0), (" 640841 ", 1.0), ("640842", 2 / 3), ("6408", 2 / 3), ("740841", 0.0), ("", 0.0),
     ("6408410", 0.0), ("64084", 2 / 3), ("<think>46, 80</think> 640842", 2 / 3)],
)  # fmt: skip
def test_reward_is_the_share_of_terms_before_the_first_wrong_one(completion, expected):
    task = ProgressionTask(digits=2, terms=3)
    prompt = next(prompt for prompt in map(task.prompt, range(task.num_prompts)) if prompt.text == "12+34=")

    assert task.score(prompt, completion)[0].value == pytest.approx(expected)


def test_held_out_pairs_are_not_trained_on_and_seeds_move_them():
    task, other = ProgressionTask(digits=1, terms=2), ProgressionTask(digits=1, terms=2, seed=1)
    trained = {task.prompt(index).text for index in range(task.num_prompts)}
    held_out = {task.evaluation_prompt(index).text for index in range(task.num_evaluation_prompts)}

    assert not trained & held_out
    assert len(trained) == task.num_prompts
    assert task.digest != other.digest


def test_the_default_makes_more_than_a_hundred_tokens():
    task = build_task(TaskConfig(name="progression"))

    assert len(task.prompt(0).answer) == 102
