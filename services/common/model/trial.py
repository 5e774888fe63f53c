"""Before the first group: some prompts through the template, and the reference answer of one to its reward."""

from __future__ import annotations

import logging

from heterorl.common.errors import ConfigError, PromptRefused, RewardError
from heterorl.common.model.prompts import Prompter
from heterorl.common.tasks.task import Task
from heterorl.common.types.rollout import total_reward

_LOG = logging.getLogger(__name__)
NUM_TRIED = 32
"""Prompts that are tried, evenly spread over the task."""


def try_prompts(task: Task, prompter: Prompter) -> None:
    """Write some prompts; a task of which the template writes none is not begun, single ones are left out later.

    Raises:
        ConfigError: all of them were refused.
    """
    tried = sorted({number * task.num_prompts // NUM_TRIED for number in range(NUM_TRIED)})
    for index in tried:
        try:
            prompter.encode_prompt(task.prompt(index))
        except PromptRefused as error:
            refused = error
        else:
            return
    problem = refused.args[0].removeprefix(f"{refused.key}: ")
    words = f"all of {len(tried)} prompts that were tried are refused: {problem}"
    raise ConfigError(refused.key, words, action=refused.action)


def try_reward(task: Task, prompter: Prompter | None) -> float:
    """Score the first prompt's own answer; a task whose rewards cannot be computed here is not begun.

    Args:
        task: whose prompt it is.
        prompter: through whose tokens the answer goes; None takes its text as it is.

    Raises:
        ConfigError: the reward failed.
        DependencyMissing: the package that computes it is not installed.
    """
    prompt = task.prompt(0)
    text = prompt.answer
    if prompter is not None:
        text = prompter.decode(prompter.tokens(prompt.answer))
    try:
        reward = total_reward(task.score(prompt, text))
    except RewardError as error:
        problem = f"the reference answer of prompt 0 gets no reward here: {error}"
        action = "correct task.reward or the data; raise task.reward_timeout_s if it only needs longer"
        raise ConfigError("task", problem, action=action) from error
    _LOG.info("the reference answer of prompt 0 gets a reward of %g", reward)
    return reward
