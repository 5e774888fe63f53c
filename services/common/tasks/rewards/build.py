"""A task's rewards as its configuration names them."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from heterorl.common.errors import ConfigError
from heterorl.common.tasks.rewards.config import (
    CodeRewardConfig,
    FunctionRewardConfig,
    HttpRewardConfig,
    JudgeRewardConfig,
    MatchRewardConfig,
    RewardConfig,
)
from heterorl.common.tasks.rewards.own import OwnReward
from heterorl.common.tasks.rewards.remote import RemoteReward, Terms
from heterorl.common.tasks.rewards.sandbox.rewards import CodeReward
from heterorl.common.tasks.rewards.weighted import NamedReward, RewardSource, WeightedTask
from heterorl.common.tasks.task import Task
from heterorl.common.wire.common import bytes_digest

_LOG = logging.getLogger(__name__)
MAX_RUBRIC_BYTES = 1 << 16


def weighted_task(task: Task, rewards: Sequence[RewardConfig], *, timeout_s: float, num_workers: int) -> WeightedTask:
    """A task with the weighted sum of the rewards that a configuration names.

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
        key = f"task.rewards[{number}]"
        source: RewardSource
        if isinstance(reward, MatchRewardConfig):
            source = task
        elif isinstance(reward, FunctionRewardConfig):
            source = own_reward(
                reward.function,
                task=task,
                directory=reward.directory,
                key=f"{key}.function",
                timeout_s=timeout_s,
                num_workers=num_workers,
            )
        elif isinstance(reward, CodeRewardConfig):
            source = CodeReward(reward, key=key, timeout_s=timeout_s, num_workers=num_workers)
        else:
            source = _remote(reward, key=key, timeout_s=timeout_s, num_workers=num_workers)
        named.append(NamedReward(name=reward.name, weight=reward.weight, source=source, is_own_score=source is task))
    return WeightedTask(task, named)


def own_reward(path: str, *, task: Task, directory: str, key: str, timeout_s: float, num_workers: int) -> OwnReward:
    """A user's function, loaded, for the rows of a task.

    Raises:
        ConfigError: it cannot be, or it asks for columns that the rows lack.
    """
    reward = OwnReward(path, directory=Path(directory), key=key, timeout_s=timeout_s, num_workers=num_workers)
    try:
        reward.check(task.prompt(0))
    except ConfigError:
        reward.close()
        raise
    _LOG.info("reward %s: %d files of %s", path, reward.num_files, reward.place)
    return reward


def _remote(
    reward: HttpRewardConfig | JudgeRewardConfig, *, key: str, timeout_s: float, num_workers: int
) -> RemoteReward:
    job: dict[str, Any] = reward.model_dump(mode="json")
    if isinstance(reward, HttpRewardConfig):
        stated: list[object] = [reward.low, reward.high, reward.batch, reward.version]
        terms = Terms(name=reward.name, low=reward.low, high=reward.high, signed_by=reward.signed_by)
    else:
        rubric = _rubric(reward, key=key)
        question = [rubric, reward.model, reward.field, reward.pattern, reward.temperature, reward.max_tokens]
        stated = [*question, reward.low, reward.high]
        # A judge's scale is the reward's 0 to 1.
        terms = Terms(name=reward.name, low=0.0, high=1.0)
        job |= {"rubric": rubric, "question": question}
    return RemoteReward(
        job,
        terms=terms,
        # Neither urls nor keys: each site may have its own.
        digest=bytes_digest(json.dumps([f"{reward.kind} 1", *stated]).encode()),
        key=key,
        by_group=isinstance(reward, HttpRewardConfig) and reward.batch == "group",
        timeout_s=timeout_s,
        num_workers=num_workers,
    )


def _rubric(reward: JudgeRewardConfig, *, key: str) -> str:
    if bool(reward.rubric) == bool(reward.rubric_file):
        raise ConfigError(f"{key}.rubric", "say either rubric or rubric_file: what the judge is asked")
    text = reward.rubric
    if reward.rubric_file:
        try:
            with Path(reward.rubric_file).open("rb") as file:
                text = file.read(MAX_RUBRIC_BYTES + 1).decode()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{key}.rubric_file", f"cannot read {reward.rubric_file}: {error}") from error
    if len(text) > MAX_RUBRIC_BYTES:
        raise ConfigError(f"{key}.rubric_file", f"longer than {MAX_RUBRIC_BYTES} characters")
    if "{completion}" not in text:
        raise ConfigError(f"{key}.rubric", "{completion} stands nowhere in it", action="the judge would never see it")
    return text
