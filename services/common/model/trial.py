"""One reward before the first: the reference answer of one prompt, by the way that every completion goes."""

from __future__ import annotations

import logging

from heterorl.common.errors import ConfigError, RewardError
from heterorl.common.model.prompts import Prompter
from heterorl.common.tasks.task import Task
from heterorl.common.types.rollout import total_reward

_LOG = logging.getLogger(__name__)


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
