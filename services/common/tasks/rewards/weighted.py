"""A task whose reward is a weighted sum of named rewards.

Guarantees: the parts stand in the order of the configuration, each with its weight; a part that fails fails them all.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from heterorl.common.errors import RewardError
from heterorl.common.tasks.task import Prompt, Task
from heterorl.common.types.common import Digest
from heterorl.common.types.rollout import MAX_PART_NAME, MAX_REWARD_PARTS, RewardPart, total_reward
from heterorl.common.wire.common import bytes_digest

WHOLE = "reward"
"""The one part of a function that returns a number; it takes the name of its reward."""


class RewardSource(Protocol):
    """What gives the values of one reward; a task does."""

    @property
    def digest(self) -> Digest:
        """Digest of all that its values depend on, but for prompt and completion."""
        ...

    def score(self, prompt: Prompt, completion: str) -> tuple[RewardPart, ...]:
        """Values, named where there are several.

        Raises:
            RewardError: there is none; that is not a score.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedReward:
    """One reward of a sum; `is_own_score` where it is that of the task whose prompts they are."""

    name: str
    weight: float
    source: RewardSource
    is_own_score: bool = False

    def score(self, prompt: Prompt, completion: str) -> tuple[RewardPart, ...]:
        """Its parts, by name and weight.

        Raises:
            RewardError: it could not be computed.
        """
        try:
            parts = self.source.score(prompt, completion)
        except RewardError as error:
            raise RewardError(f"task.rewards, {self.name}: {error}") from error
        if self.is_own_score:
            return (RewardPart(name=self.name, value=total_reward(parts), weight=self.weight),)
        if len(parts) == 1 and parts[0].name == WHOLE:
            return (replace(parts[0], name=self.name, weight=self.weight),)
        return tuple(replace(part, name=f"{self.name}/{part.name}", weight=self.weight) for part in parts)

    def close(self) -> None:
        """End the processes that compute it."""
        close = getattr(self.source, "close", None)
        if close is not None:
            close()


class WeightedTask:
    """A task's prompts with a weighted sum of rewards; implements Task."""

    def __init__(self, task: Task, rewards: Sequence[NamedReward]) -> None:
        """Join them.

        Args:
            task: whose prompts they are, and whose own score one of the rewards may be.
            rewards: in the order in which their parts stand.
        """
        self.inner = task
        self.rewards = tuple(rewards)
        self.num_prompts = task.num_prompts
        self.num_evaluation_prompts = task.num_evaluation_prompts
        self.num_workers = max(int(getattr(reward.source, "num_workers", 1)) for reward in rewards)
        stated = [(reward.name, reward.weight, reward.source.digest) for reward in rewards]
        self.digest: Digest = bytes_digest(f"{task.digest}\nrewards 1\n{json.dumps(stated)}".encode())

    def with_own_score(self, task: Task) -> WeightedTask:
        """The same with the task's own score computed by another form of the task."""
        rewards = [replace(reward, source=task) if reward.is_own_score else reward for reward in self.rewards]
        return WeightedTask(task, rewards)

    def prompt(self, index: int) -> Prompt:
        """The training prompt at a position."""
        return self.inner.prompt(index)

    def evaluation_prompt(self, index: int) -> Prompt:
        """The held-out prompt at a position."""
        return self.inner.evaluation_prompt(index)

    def score(self, prompt: Prompt, completion: str) -> tuple[RewardPart, ...]:
        """The parts of all rewards, with their weights.

        Raises:
            RewardError: one of them could not be computed.
        """
        parts = tuple(part for reward in self.rewards for part in reward.score(prompt, completion))
        # The coordinator takes no other: a group with one would be refused at every push.
        if len(parts) > MAX_REWARD_PARTS:
            raise RewardError(f"{len(parts)} parts of task.rewards together, {MAX_REWARD_PARTS} are allowed")
        for part in parts:
            if len(part.name) > MAX_PART_NAME:
                raise RewardError(f"the name of a part, {part.name!r}, has more than {MAX_PART_NAME} characters")
        return parts

    def close(self) -> None:
        """End the processes that compute rewards."""
        for reward in self.rewards:
            reward.close()
