"""Configuration of a task, and the task that it names."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field, model_validator

from heterorl.common.errors import ConfigError
from heterorl.common.tasks.arithmetic import ArithmeticTask, ProgressionTask
from heterorl.common.tasks.source_config import HttpRewardConfig, SourceConfig
from heterorl.common.tasks.task import Measure, Message, SystemPromptTask, Task, with_system

if TYPE_CHECKING:
    from heterorl.common.tasks.sources.row_reader import Rows

_KINDS = (
    "arithmetic", "progression", "reasoning_gym:NAME", "jsonl:PATH", "parquet:PATH", "hf:NAME@COMMIT[split]",
    "seeds", "mixture",
)  # fmt: skip
_OF_FILES = ("jsonl", "parquet", "hf")


def names_rows(name: str) -> bool:
    """Whether a task's name states files or a dataset, not a generator."""
    return name.partition(":")[0] in _OF_FILES


class WeightedSource(SourceConfig):
    """One source of a mixture: the keys of [task], and its share."""

    label: str = Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")
    """Name in metrics and reports."""
    weight: float = Field(default=1.0, gt=0)
    """Share of the prompts, relative to the sum of weights."""


class TaskConfig(SourceConfig):
    """Prompts and reward; equal on every node, except limits, workers and sandbox."""

    sources: tuple[WeightedSource, ...] = ()
    """Sources of a `mixture`. A key that a source does not set comes from [task]; one with a reward or environment
    takes neither from there."""

    @model_validator(mode="after")
    def _check_sources(self) -> TaskConfig:
        labels = [source.label for source in self.sources]
        if (self.name == "mixture") != bool(labels):
            raise ValueError('name = "mixture" needs sources, and sources need name = "mixture"')
        if len(set(labels)) != len(labels):
            raise ValueError("sources: two have one label; rename one")
        if any(source.name == "mixture" for source in self.sources):
            raise ValueError("sources: a source cannot be a mixture; list its sources here")
        return self

    @property
    def has_environment(self) -> bool:
        return any(source.environment for source in self.inherited() or (self,))

    @property
    def max_turns_of_all(self) -> int:
        """Most turns of a rollout; 1 without environments."""
        return max((source.max_turns for source in self.inherited() or (self,) if source.environment), default=1)

    @property
    def trajectory_s_of_all(self) -> float:
        """Longest time of a rollout, seconds; 0 without environments."""
        return max((source.trajectory_s for source in self.inherited() or (self,) if source.environment), default=0.0)

    def inherited(self) -> tuple[WeightedSource, ...]:
        """Sources with the keys that they inherit."""
        return tuple(each.model_copy(update=self._left_to(each)) for each in self.sources)

    def _left_to(self, source: WeightedSource) -> dict[str, object]:
        own = source.model_fields_set | {"name"}
        if own & {"reward", "rewards", "environment"}:
            # A reward belongs with its directory.
            own |= {"reward", "rewards", "reward_path", "environment", "environment_path"}
        return {key: getattr(self, key) for key in SourceConfig.model_fields if key not in own}


def build_task(config: SourceConfig, *, measure: Measure | None = None, every_row: bool = False) -> Task:
    """The task that a configuration names.

    `measure` counts tokens for datasets with a bound of the prompt.
    With `every_row` all rows of a dataset are held out, for a task that is only evaluated.

    Raises:
        ConfigError: the name is unknown, or its data cannot be read.
        DependencyMissing: a package that reads it is not installed.
    """
    if isinstance(config, TaskConfig) and config.sources:
        return _mixture(config, measure=measure)
    if config.match == "math_verify" and not config.uses_match:
        raise ConfigError(
            "task.match",
            "is not used: a reward or an environment gives the score",
            action='remove it, or name it in task.rewards, kind "match"',
        )
    return _completed(_build(config, measure=measure, every_row=every_row), config)


def _completed(task: Task, config: SourceConfig) -> Task:
    if config.system_prompt:
        task = SystemPromptTask(task, config.system_prompt)
    if config.environment:
        return _with_environment(task, config)
    return _with_rewards(task, config) if config.reward or config.rewards else task


def _build(config: SourceConfig, *, measure: Measure | None, every_row: bool = False) -> Task:
    kind, _, argument = config.name.partition(":")
    measure = _with_system(measure, config.system_prompt) if measure and config.system_prompt else measure
    num_held_out = None if every_row else config.evaluation_size
    task: Task
    if kind == "arithmetic" and not argument:
        task = ArithmeticTask(digits=config.digits, seed=config.seed)
    elif kind == "progression" and not argument:
        task = ProgressionTask(digits=config.digits, terms=config.terms, seed=config.seed)
    elif kind == "reasoning_gym" and argument:
        from heterorl.common.tasks.rewards.sandbox.gym_reward import ReasoningGymTask

        task = ReasoningGymTask(argument, config)
    elif kind == "seeds" and not argument:
        from heterorl.common.tasks.environments.environment_task import seeds_task

        if not config.environment:
            raise ConfigError("task.name", "seeds are prompts of an environment", action="set task.environment")
        task = seeds_task(size=config.size, evaluation_size=config.evaluation_size, seed=config.seed)
    elif kind in _OF_FILES and argument:
        from heterorl.common.tasks.sources.rows_task import RowsTask

        task = RowsTask(*_opened(kind, argument, config), config, evaluation_size=num_held_out, measure=measure)
    else:
        near = difflib.get_close_matches(kind, [known.partition(":")[0] for known in _KINDS], n=1)
        hint = f"; did you mean {next(known for known in _KINDS if known.startswith(near[0]))}?" if near else ""
        if kind == "csv":
            hint = "; for CSV name its directory: hf:/data[train] reads /data/train.csv"
        raise ConfigError(
            "task.name",
            f"{config.name!r} is none of {', '.join(_KINDS)}{hint}",
            action="docs/recipes.md lists the sources of prompts",
        )
    return task


def _opened(kind: str, argument: str, config: SourceConfig) -> tuple[Rows, Rows | None]:
    """Rows of files, and of held-out ones if they are named."""
    from heterorl.common.tasks.sources.dataset_files import open_parquet, open_repository
    from heterorl.common.tasks.sources.row_reader import JsonLines

    if kind == "hf":
        if config.evaluation_path:
            problem = "hf: takes held-out prompts from a split"
            raise ConfigError("task.evaluation_path", problem, action="name task.data.evaluation_split")
        return open_repository(argument, config.data)
    path = config.evaluation_path
    if config.data.evaluation_split:
        action = "name task.evaluation_path, or give the source its own [task.data]"
        raise ConfigError("task.data.evaluation_split", "files have no splits", action=action)
    if kind == "parquet":
        return open_parquet(argument, path, config.data)
    return JsonLines("task.name", Path(argument)), JsonLines("task.evaluation_path", Path(path)) if path else None


def _with_system(measure: Measure, text: str) -> Measure:
    """Counts the tokens of rows as the policy reads them."""
    first = Message(role="system", content=text)
    return lambda prompts: measure([with_system(prompt, first) for prompt in prompts])


def _with_environment(task: Task, config: SourceConfig) -> Task:
    from heterorl.common.tasks.environments.environment_task import EnvironmentTask, EpisodeLimits, numbers_task
    from heterorl.common.tasks.environments.episodes import Episodes

    if config.reward or config.rewards:
        problem = "the environment gives the reward, but task.reward or task.rewards is set"
        raise ConfigError("task.environment", problem, action="remove one of them")
    episodes = Episodes(
        config.environment, directory=Path(config.environment_path), step_timeout_s=config.step_timeout_s,
        memory_bytes=config.environment_memory_bytes, max_observation_chars=config.max_observation_chars,
        num_processes=config.environment_workers, num_rows=config.size + config.evaluation_size,
        tool_parser=config.tool_parser,
    )  # fmt: skip
    limits = EpisodeLimits(max_turns=config.max_turns, trajectory_s=config.trajectory_s)
    try:
        if episodes.has_rows:
            if config.name != "seeds":
                problem = f"{config.environment} brings its own data set, but the prompts are {config.name}"
                raise ConfigError("task.name", problem, action='set it to "seeds"')
            task = numbers_task(num_rows=episodes.num_rows, size=config.size, evaluation_size=config.evaluation_size)
        return EnvironmentTask(task, episodes, limits, seed=config.seed, system_prompt=config.system_prompt)
    except ConfigError:
        episodes.close()
        raise


def _with_rewards(task: Task, config: SourceConfig) -> Task:
    from heterorl.common.tasks.rewards.function_reward import FunctionRewardTask
    from heterorl.common.tasks.rewards.weighted import own_reward, weighted_task

    if config.rewards and config.reward:
        problem = "task.reward and task.rewards are both set"
        raise ConfigError("task.reward", problem, action='make it one of task.rewards, kind "function"')
    rewards = config.rewards
    if config.reward.startswith(("http://", "https://")):
        rewards = (HttpRewardConfig(name="reward", url=config.reward),)
    if rewards:
        return weighted_task(task, rewards, config)
    reward = own_reward(config.reward, task, config, directory=config.reward_path, key="task.reward")
    return FunctionRewardTask(task, reward)


def _mixture(config: TaskConfig, *, measure: Measure | None) -> Task:
    from heterorl.common.tasks.sources.mixture import MixtureTask, Source, without_held_out

    sources = {each.label: each for each in config.inherited()}
    tasks: dict[str, Task] = {}
    for label, each in sources.items():
        with _of_source(label):
            tasks[label] = _build(each, measure=measure)
    found = []
    for label, task in without_held_out(tasks).items():
        with _of_source(label):
            found.append(Source(label=label, weight=sources[label].weight, task=_completed(task, sources[label])))
    return MixtureTask(found)


@contextmanager
def _of_source(label: str) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        raise error.within(f"task.sources, {label}", str(error)) from error
