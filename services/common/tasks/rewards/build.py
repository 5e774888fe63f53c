"""A task's rewards as its configuration names them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from heterorl.common.errors import ConfigError
from heterorl.common.tasks.rewards.config import MatchRewardConfig, RewardConfig
from heterorl.common.tasks.rewards.own import OwnReward
from heterorl.common.tasks.rewards.weighted import NamedReward, WeightedTask
from heterorl.common.tasks.task import Task

_LOG = logging.getLogger(__name__)


def weighted_task(task: Task, rewards: Sequence[RewardConfig], *, timeout_s: float, num_workers: int) -> WeightedTask:
    """A task with the weighted sum of the rewards that a configuration names.

    Args:
        task: whose prompts they are.
        rewards: at least one.
        timeout_s: for one reward of one completion, seconds.
        num_workers: most processes of each reward.

    Raises:
        ConfigError: two have one name, or one cannot be loaded.
    """
    names = [reward.name for reward in rewards]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError("task.rewards", f"two rewards have the name {twice[0]}", action="name each once")
    if not any(reward.weight for reward in rewards):
        raise ConfigError("task.rewards", "every weight is 0", action="give one reward a weight: nothing is rewarded")
    named = []
    for number, reward in enumerate(rewards):
        source = (
            task
            if isinstance(reward, MatchRewardConfig)
            else own_reward(
                reward.function,
                directory=reward.directory,
                key=f"task.rewards[{number}].function",
                timeout_s=timeout_s,
                num_workers=num_workers,
            )
        )
        named.append(NamedReward(name=reward.name, weight=reward.weight, source=source, is_own_score=source is task))
    return WeightedTask(task, named)


def own_reward(path: str, *, directory: str, key: str, timeout_s: float, num_workers: int) -> OwnReward:
    """A user's function, loaded.

    Raises:
        ConfigError: it cannot be.
    """
    reward = OwnReward(path, directory=Path(directory), key=key, timeout_s=timeout_s, num_workers=num_workers)
    _LOG.info("reward %s: %d files of %s", path, reward.num_files, reward.place)
    return reward
