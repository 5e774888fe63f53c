"""Tasks by name: `arithmetic`, `progression`, `reasoning_gym:NAME`, `jsonl:PATH`; rewards by dotted path."""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from pydantic import Field

from services.common.config import Config
from services.common.errors import ConfigError, RewardError
from services.common.tasks.arithmetic import ArithmeticTask
from services.common.tasks.progression import ProgressionTask
from services.common.tasks.task import Prompt, Task
from services.common.types import Digest, RewardPart
from services.common.wire import bytes_digest

Reward = Callable[[str, str, str], float | dict[str, float]]


class TaskConfig(Config):
    """Prompts and reward; the same on every node of a run."""

    name: str = "arithmetic"
    """`arithmetic`, `progression`, `reasoning_gym:NAME` (any of its datasets) or `jsonl:PATH` (prompt, answer)."""
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
    verify_timeout_s: float = Field(default=5.0, gt=0)
    """math_verify: time for one comparison, seconds; a verifier that needs longer is killed."""
    reward: str = ""
    """Dotted path `package.module:function` of your own reward: f(prompt, completion, answer) -> float or parts."""


class RewardedTask:
    """A task with the user's own reward; implements Task."""

    def __init__(self, task: Task, path: str) -> None:
        self._task = task
        self._reward = load_reward(path)
        self.num_prompts = task.num_prompts
        self.num_evaluation_prompts = task.num_evaluation_prompts
        source = inspect.getsource(self._reward)
        self.digest: Digest = bytes_digest(f"{task.digest}\n{path}\n{source}".encode())

    def prompt(self, index: int) -> Prompt:
        """The training prompt at a position."""
        return self._task.prompt(index)

    def evaluation_prompt(self, index: int) -> Prompt:
        """The held-out prompt at a position."""
        return self._task.evaluation_prompt(index)

    def score(self, prompt: Prompt, completion: str) -> tuple[RewardPart, ...]:
        """The function's value, as named parts.

        Raises:
            RewardError: the function raised, or returned what is no number.
        """
        try:
            value = self._reward(prompt.text, completion, prompt.answer)
            parts = value if isinstance(value, dict) else {"reward": value}
            scored = tuple(RewardPart(name=str(name), value=float(part)) for name, part in parts.items())
        except Exception as error:
            raise RewardError(f"the reward function failed on prompt {prompt.index}: {error!r}") from error
        if not all(math.isfinite(part.value) for part in scored):
            raise RewardError(f"the reward function returned a value that is not finite on prompt {prompt.index}")
        return scored


def load_reward(path: str) -> Reward:
    """Import `package.module:function`.

    Raises:
        ConfigError: it cannot be imported or called.
    """
    module, _, name = path.partition(":")
    try:
        function: Reward = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            "task.reward", f"cannot import {path}: {error}", action="use package.module:function"
        ) from error
    if not callable(function):
        raise ConfigError("task.reward", f"{path} is not a function")
    return function


def build_task(config: TaskConfig) -> Task:
    """The task that a configuration names.

    Raises:
        ConfigError: the name is unknown, or its data cannot be read.
    """
    kind, _, argument = config.name.partition(":")
    task: Task
    if kind == "arithmetic" and not argument:
        task = ArithmeticTask(digits=config.digits, seed=config.seed)
    elif kind == "progression" and not argument:
        task = ProgressionTask(digits=config.digits, terms=config.terms, seed=config.seed)
    elif kind == "reasoning_gym" and argument:
        from services.common.tasks.reasoning_gym import ReasoningGymTask

        task = ReasoningGymTask(
            name=argument, size=config.size, evaluation_size=config.evaluation_size, seed=config.seed
        )
    elif kind == "jsonl" and argument:
        from services.common.tasks.jsonl import JsonlTask

        task = JsonlTask(
            path=Path(argument),
            evaluation_path=Path(config.evaluation_path) if config.evaluation_path else None,
            evaluation_size=config.evaluation_size,
            match=config.match,
            verify_timeout_s=config.verify_timeout_s,
        )
    else:
        raise ConfigError(
            "task.name", f"{config.name} is not arithmetic, progression, reasoning_gym:NAME or jsonl:PATH"
        )
    return RewardedTask(task, config.reward) if config.reward else task
