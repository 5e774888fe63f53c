"""Held-out prompts in named parts, so that a checkpoint can be best on one and not on another."""

from __future__ import annotations

import dataclasses
from collections import defaultdict

from heterorl.common.tasks.task import Prompt, Task
from heterorl.common.types.common import Digest
from heterorl.common.types.rollout import RewardPart


class PartOfTask:
    """Implements Task with some of another task's held-out prompts."""

    def __init__(self, task: Task, indices: list[int]) -> None:
        self._task = task
        self._indices = indices
        self.num_prompts = task.num_prompts
        self.num_evaluation_prompts = len(indices)
        self.digest: Digest = task.digest

    def prompt(self, index: int) -> Prompt:
        """The training prompt at a position."""
        return self._task.prompt(index)

    def evaluation_prompt(self, index: int) -> Prompt:
        """The held-out prompt at a position of this part."""
        return dataclasses.replace(self._task.evaluation_prompt(self._indices[index]), index=index)

    def score(self, prompt: Prompt, completion: str) -> tuple[RewardPart, ...]:
        """The task's score."""
        return self._task.score(prompt, completion)


def split_evaluation(task: Task, *, num_prompts: int) -> dict[str, PartOfTask]:
    """Cut the first held-out prompts into parts by how hard they are.

    Sums are as hard as they have carries; other prompts count as hard when their text is longer than the median.
    """
    prompts = [task.evaluation_prompt(index) for index in range(min(num_prompts, task.num_evaluation_prompts))]
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
