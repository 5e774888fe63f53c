"""Held-out prompts in named parts, so that a checkpoint can be best on one and not on another."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import defaultdict

from heterorl.common.errors import ConfigError
from heterorl.common.tasks.task import Prompt, Task
from heterorl.common.types.rollout import RewardPart
from heterorl_research.lab.config import RegimeConfig


class PartOfTask(Task):
    """Some of another task's held-out prompts."""

    def __init__(self, task: Task, indices: list[int]) -> None:
        self._task = task
        self._indices = indices
        self.num_prompts = task.num_prompts
        self.num_evaluation_prompts = len(indices)
        self.digest = task.digest

    def prompt(self, index: int) -> Prompt:
        """The training prompt at a position."""
        return self._task.prompt(index)

    def evaluation_prompt(self, index: int) -> Prompt:
        """The held-out prompt at a position of this part."""
        return dataclasses.replace(self._task.evaluation_prompt(self._indices[index]), index=index)

    def score(self, prompt: Prompt, completion: str) -> tuple[RewardPart, ...]:
        """The task's score."""
        return self._task.score(prompt, completion)


def evaluation_seed(regime: RegimeConfig, *, seed: int, version: int) -> int:
    """Seed of the completions of a run's evaluation of a version; that of prompt i of a part is larger by i."""
    if regime.evaluation_noise == "same":
        return seed
    return int.from_bytes(hashlib.blake2b(f"evaluation/{seed}/{version}".encode(), digest_size=6).digest(), "little")


def split_evaluation(task: Task, *, num_prompts: int, offset: int = 0) -> dict[str, PartOfTask]:
    """Cut held-out prompts into parts by how hard they are.

    Sums are as hard as they have carries; other prompts count as hard when their text is longer than the median.

    Args:
        task: what they are prompts of.
        num_prompts: of all parts, where the task has so many.
        offset: held-out prompts before the first.

    Raises:
        ConfigError: the task has no prompt so far on.
    """
    last = min(offset + num_prompts, task.num_evaluation_prompts)
    if offset >= last:
        raise ConfigError(
            "regime.evaluation_offset",
            f"the task has {task.num_evaluation_prompts} held-out prompts, none from there on",
        )
    prompts = [task.evaluation_prompt(index) for index in range(offset, last)]
    hardness = [_carries(prompt.text) for prompt in prompts]
    if any(value is None for value in hardness):
        hardness = [len(prompt.text) for prompt in prompts]
    middle = sorted(value or 0 for value in hardness)[len(prompts) // 2]
    parts: defaultdict[str, list[int]] = defaultdict(list)
    for prompt, value in zip(prompts, hardness, strict=True):
        parts["easier" if (value or 0) < middle else "harder"].append(prompt.index)
    return {name: PartOfTask(task, indices) for name, indices in sorted(parts.items())}


def _carries(text: str) -> int | None:
    """Carries of "123+989="; None for another text."""
    left, plus, right = text.rstrip("=").partition("+")
    if not (plus and left.isdigit() and right.isdigit() and len(left) == len(right)):
        return None
    carry = count = 0
    for one, other in zip(reversed(left), reversed(right), strict=True):
        carry = int(int(one) + int(other) + carry > 9)
        count += carry
    return count
