"""Checks of a start try every source of a mixture."""

import numpy as np
import pytest

from heterorl.common.errors import ConfigError, PromptRefused, RewardError
from heterorl.common.model.model_loading import TokenLimits
from heterorl.common.tasks.sources.mixture import MixtureTask, Source
from heterorl.common.tasks.task import AnswerProblem, Prompt
from heterorl.common.text.conversation import try_answers, try_prompts, try_reward
from heterorl.common.types.rollout import RewardPart
from tests.support.plain_task import PlainTask

NUM = 64
ROOM = TokenLimits(vocab_size=1000, positions=0)


class Rows(PlainTask):
    """A task some of whose prompts, answers or rewards fail."""

    num_prompts, num_evaluation_prompts = NUM, 1

    def __init__(self, *, refused=(), unreadable=(), fails=False):
        self.digest = f"{refused} {unreadable} {fails}"
        self._refused, self._unreadable, self._fails = set(refused), set(unreadable), fails

    def prompt(self, index):
        refusal = f"reset of prompt {index} raised" if index in self._refused else ""
        return Prompt(index=index, text="p", answer="1", refusal=refusal)

    def answer_problem(self, prompt):
        if prompt.index in self._unreadable:
            return AnswerProblem(key="task.match", text="no number", action="correct it")
        return None

    def score(self, prompt, completion):
        if self._fails:
            raise RewardError("no answer")
        return (RewardPart(name="r", value=1.0),)


class Prompter:
    """A prompter that refuses what a prompt refuses."""

    def encode_prompt(self, prompt, *, tools=()):
        if prompt.refusal:
            raise PromptRefused("task.environment", prompt.refusal, action="correct the environment")
        return np.arange(3, dtype=np.int32)


def mixed(second):
    tasks = {"first": Rows(), "second": second, "third": Rows()}
    return MixtureTask([Source(label=label, weight=1, task=task) for label, task in tasks.items()])


def test_a_later_source_whose_prompts_are_all_refused_ends_the_start():
    words = "^task.sources, second: task.environment: all of 32 prompts that were tried are refused: reset of prompt"
    with pytest.raises(ConfigError, match=words):
        try_prompts(mixed(Rows(refused=range(NUM))), Prompter(), room=ROOM, max_new_tokens=8)


@pytest.mark.parametrize(("num_refused", "is_refused"), [(0, False), (NUM // 2, False), (NUM // 2 + 2, True)])
def test_some_refused_prompts_are_told_and_above_a_half_refused(num_refused, is_refused, caplog):
    task, words = (
        mixed(Rows(refused=range(num_refused))),
        f"{num_refused // 2} of 32 prompts that were tried are refused",
    )
    if is_refused:
        with pytest.raises(ConfigError, match=f"^task.sources, second: task.environment: {words}"):
            try_prompts(task, Prompter(), room=ROOM, max_new_tokens=8)
        return
    try_prompts(task, Prompter(), room=ROOM, max_new_tokens=8)
    assert (words in caplog.text) == bool(num_refused)


def test_a_later_source_whose_reward_fails_ends_the_start():
    with pytest.raises(
        ConfigError, match=f"^task.sources, second: the reference answer of prompt {NUM} of second gets"
    ):
        try_reward(mixed(Rows(fails=True)), None)
    told = []
    assert try_reward(mixed(Rows()), None, say=told.append) == 1.0
    assert told[1] == f"the reference answer of prompt {NUM} of second gets a reward of 1"
    assert len(told) == 3


def test_a_source_whose_answers_cannot_be_read_ends_the_start():
    with pytest.raises(ConfigError, match=f"^task.sources, second: task.match: {NUM} of {NUM} rows"):
        try_answers(mixed(Rows(unreadable=range(NUM))))
