"""Tasks by name: `arithmetic`, `progression[:prefix]`, `reasoning_gym:NAME`, `jsonl:PATH`; rewards by dotted path."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationInfo, field_validator

from heterorl.common.errors import ConfigError
from heterorl.common.process.config import Config
from heterorl.common.tasks.arithmetic import ArithmeticTask
from heterorl.common.tasks.progression import ProgressionTask
from heterorl.common.tasks.rewards.config import MAX_REWARDS, HttpRewardConfig, RewardConfig, from_file
from heterorl.common.tasks.task import Task

_KINDS = ("arithmetic", "progression", "progression:prefix", "reasoning_gym:NAME", "jsonl:PATH")


class TaskConfig(Config):
    """Prompts and reward; the same on every node of a run."""

    name: str = "arithmetic"
    """`arithmetic`, `progression` (an answer that is too long is worth nothing), `progression:prefix` (its first terms
    count), `reasoning_gym:NAME` (any of its datasets) or `jsonl:PATH` (prompt, answer)."""
    digits: int = Field(default=3, ge=1, le=9)
    """arithmetic and progression: digits of each number."""
    terms: int = Field(default=34, ge=1, le=10_000)
    """progression: numbers of each answer; 34 of 3 digits make completions of 103 tokens."""
    size: int = Field(default=10_000, ge=1)
    """reasoning_gym: number of training prompts."""
    evaluation_size: int = Field(default=512, ge=1)
    """reasoning_gym and jsonl: number of held-out prompts."""
    evaluation_path: str = ""
    """jsonl: a file of held-out prompts; empty holds out some prompts of the file itself."""
    seed: int = Field(default=0, ge=0)
    """reasoning_gym: seed of the data set; the others: which pairs come first and which are held out."""
    match: Literal["exact", "math_verify"] = "exact"
    """jsonl: how an answer is compared."""
    reward: str = ""
    """`package.module:function` of your own reward: f(prompt, completion, answer) -> float or named parts. It runs in
    processes of its own; all files of its package, and those it imports of the same directory, must be equal on every
    node, byte for byte. Or the url of a reward service (http, https): short for one of task.rewards."""
    rewards: tuple[RewardConfig, ...] = Field(default=(), max_length=MAX_REWARDS)
    """Named rewards, each with its weight; their weighted sum is the reward. Empty: task.reward, or else the task's own
    score. Equal on every node."""
    reward_path: str = ""
    """Directory of the reward's package or module, taken from the configuration file's directory on; empty is that
    directory itself. What is installed keeps its names."""
    reward_timeout_s: float = Field(default=5.0, gt=0, le=3600)
    """Time for the reward of one completion, seconds. A process that needs longer is killed and replaced, and the group
    is given up."""
    reward_workers: int = Field(default=1, ge=1, le=64)
    """Most processes that compute rewards at once; each is started when those that run are not enough. A sampler takes
    4 unless this is set."""

    @field_validator("reward_path")
    @classmethod
    def _make_absolute(cls, value: str, info: ValidationInfo) -> str:
        # Here, where the file is known: other processes are given the result.
        if not info.data.get("reward"):
            return value
        return from_file(value, info)


def build_task(config: TaskConfig) -> Task:
    """The task that a configuration names.

    Raises:
        ConfigError: the name is unknown, or its data cannot be read.
    """
    kind, _, argument = config.name.partition(":")
    task: Task
    if kind == "arithmetic" and not argument:
        task = ArithmeticTask(digits=config.digits, seed=config.seed)
    elif kind == "progression" and argument in ("", "prefix"):
        task = ProgressionTask(
            digits=config.digits, terms=config.terms, seed=config.seed, prefix_counts=argument == "prefix"
        )
    elif kind == "reasoning_gym" and argument:
        from heterorl.common.tasks.reasoning_gym import ReasoningGymTask

        task = ReasoningGymTask(
            name=argument, size=config.size, evaluation_size=config.evaluation_size, seed=config.seed
        )
    elif kind == "jsonl" and argument:
        from heterorl.common.tasks.jsonl import JsonlTask

        task = JsonlTask(
            path=Path(argument),
            evaluation_path=Path(config.evaluation_path) if config.evaluation_path else None,
            evaluation_size=config.evaluation_size,
            match=config.match,
            timeout_s=config.reward_timeout_s,
            num_workers=config.reward_workers,
        )
    else:
        near = difflib.get_close_matches(kind, [known.partition(":")[0] for known in _KINDS], n=1)
        hint = f"; did you mean {next(known for known in _KINDS if known.startswith(near[0]))}?" if near else ""
        raise ConfigError("task.name", f"{config.name!r} is none of {', '.join(_KINDS)}{hint}")
    return _rewarded(task, config) if config.reward or config.rewards else task


def _rewarded(task: Task, config: TaskConfig) -> Task:
    from heterorl.common.tasks.rewards.build import own_reward, weighted_task
    from heterorl.common.tasks.rewards.own import RewardedTask

    timeout_s, num_workers = config.reward_timeout_s, config.reward_workers
    if config.rewards and config.reward:
        problem = "both task.reward and task.rewards name rewards"
        raise ConfigError("task.reward", problem, action='make it one of task.rewards, kind "function"')
    rewards = config.rewards
    if config.reward.startswith(("http://", "https://")):
        rewards = (HttpRewardConfig(name="reward", url=config.reward),)
    if rewards:
        return weighted_task(task, rewards, timeout_s=timeout_s, num_workers=num_workers)
    reward = own_reward(
        config.reward, directory=config.reward_path, key="task.reward", timeout_s=timeout_s, num_workers=num_workers
    )
    return RewardedTask(task, reward)


def apart(task: Task, config: TaskConfig) -> Task:
    """The task with its score in processes that can be killed; where it computes its score so already, itself."""
    from heterorl.common.tasks.rewards.apart import TaskApart
    from heterorl.common.tasks.rewards.weighted import WeightedTask

    if isinstance(task, WeightedTask):
        return task.with_own_score(apart(task.inner, config.model_copy(update={"rewards": (), "reward": ""})))
    if config.reward or (config.name.startswith("jsonl:") and config.match == "math_verify"):
        return task
    if config.name.startswith("jsonl:"):
        job: dict[str, object] = {"kind": "exact"}
    else:
        job = {"kind": "task", "config": config.model_dump(mode="json"), "digest": task.digest}
    return TaskApart(task, job, timeout_s=config.reward_timeout_s, num_workers=config.reward_workers)


def close_task(task: Task) -> None:
    """End the processes that a task runs, if any."""
    close = getattr(task, "close", None)
    if close is not None:
        close()
