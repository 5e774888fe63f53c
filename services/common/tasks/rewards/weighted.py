"""Weighted sum of named rewards, and its construction from the configuration.

Parts keep the order of the configuration. An error of one part fails the completion.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from heterorl.common.errors import ConfigError, RewardError
from heterorl.common.tasks.rewards.function_reward import FunctionReward
from heterorl.common.tasks.rewards.remote_reward import RemoteReward, Terms
from heterorl.common.tasks.rewards.sandbox.code_reward import CodeReward
from heterorl.common.tasks.source_config import (
    CodeRewardConfig,
    FunctionRewardConfig,
    HttpRewardConfig,
    JudgeRewardConfig,
    MatchRewardConfig,
    RewardConfig,
    SourceConfig,
)
from heterorl.common.tasks.task import WHOLE, AnswerProblem, Doubts, Prompt, RewardSource, Task, TaskWrapper
from heterorl.common.types.common import Digest
from heterorl.common.types.rollout import MAX_PART_NAME, MAX_REWARD_PARTS, RewardPart, weighted_sum
from heterorl.common.wire.common_messages import bytes_digest

ABSENT = math.nan
"""Value of a reward that is not computed here."""


class _Absent(RewardSource):
    """Stands for a reward that is not computed here."""

    def __init__(self, digest: Digest) -> None:
        self.digest = digest

    def score(self, prompt: Prompt, completion: str) -> tuple[RewardPart, ...]:  # noqa: ARG002 - of the base class
        return (RewardPart(name=WHOLE, value=ABSENT),)


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedReward:
    """One reward of the sum; `is_own_score` marks the task's own score."""

    name: str
    weight: float
    source: RewardSource
    is_own_score: bool = False

    def score_all(self, prompt: Prompt, completions: Sequence[str]) -> list[tuple[RewardPart, ...]]:
        try:
            rows = list(self.source.score_all(prompt, completions))
        except RewardError as error:
            raise RewardError(f"task.rewards, {self.name}: {error}") from error
        return [self._named(parts) for parts in rows]

    def _named(self, parts: tuple[RewardPart, ...]) -> tuple[RewardPart, ...]:
        if self.is_own_score:
            return (RewardPart(name=self.name, value=weighted_sum(parts), weight=self.weight),)
        if len(parts) == 1 and parts[0].name == WHOLE:
            return (replace(parts[0], name=self.name, weight=self.weight),)
        return tuple(replace(part, name=f"{self.name}/{part.name}", weight=self.weight) for part in parts)


class WeightedTask(TaskWrapper):
    """A task with a weighted sum of rewards."""

    def __init__(self, task: Task, rewards: Sequence[NamedReward]) -> None:
        stated = [(reward.name, reward.weight, reward.source.digest) for reward in rewards]
        digest = bytes_digest(f"{task.digest}\nrewards 1\n{json.dumps(stated)}".encode())
        super().__init__(task, digest=digest, num_workers=max(1, *(reward.source.num_workers for reward in rewards)))
        self.rewards = tuple(rewards)
        # Then all rewards wait for the last completion of a group.
        self.by_group = any(reward.source.by_group for reward in rewards)

    @property
    def remote(self) -> dict[str, Terms]:
        return {each.name: each.source.terms for each in self.rewards if isinstance(each.source, RemoteReward)}

    def doubts(self, prompt: Prompt, completion: str) -> Doubts:
        found = {each.name: each.source.doubts(prompt, completion) for each in self.rewards}
        return Doubts(
            near=tuple(name for name, doubts in found.items() if doubts.near),
            by_code=tuple(name for name, doubts in found.items() if doubts.by_code),
        )

    def run_again(self, prompt: Prompt, completion: str) -> tuple[RewardPart, ...]:
        rewards = [each for each in self.rewards if isinstance(each.source, CodeReward)]
        return tuple(part for reward in rewards for part in reward.score_all(prompt, [completion])[0])

    def answer_problem(self, prompt: Prompt) -> AnswerProblem | None:
        every = (each.source.answer_problem(prompt) for each in self.rewards)
        return next((problem for problem in every if problem), None)

    def without_remote(self) -> WeightedTask:
        rewards = [
            replace(each, source=_Absent(each.source.digest)) if isinstance(each.source, RemoteReward) else each
            for each in self.rewards
        ]
        return WeightedTask(self.inner, rewards)

    def score(self, prompt: Prompt, completion: str) -> tuple[RewardPart, ...]:
        return self._sums(prompt, [completion])[0]

    def score_all(self, prompt: Prompt, completions: Sequence[str]) -> Iterator[tuple[RewardPart, ...]]:
        """Parts of all completions, in order; batch `group` makes one request."""
        return iter(self._sums(prompt, completions)) if self.by_group else super().score_all(prompt, completions)

    def _sums(self, prompt: Prompt, completions: Sequence[str]) -> list[tuple[RewardPart, ...]]:
        rows = [reward.score_all(prompt, completions) for reward in self.rewards]
        return [_allowed(tuple(part for parts in column for part in parts)) for column in zip(*rows, strict=True)]

    def close(self) -> None:
        for reward in self.rewards:
            reward.source.close()


def _allowed(parts: tuple[RewardPart, ...]) -> tuple[RewardPart, ...]:
    # The coordinator would refuse a group with more or longer ones at every push.
    if len(parts) > MAX_REWARD_PARTS:
        raise RewardError(f"{len(parts)} parts of task.rewards together, {MAX_REWARD_PARTS} are allowed")
    for part in parts:
        if len(part.name) > MAX_PART_NAME:
            raise RewardError(f"the name of a part, {part.name!r}, has more than {MAX_PART_NAME} characters")
    return parts


_LOG = logging.getLogger(__name__)
MAX_RUBRIC_BYTES = 1 << 16
NUM_TRIED = 32
"""First rows of which one must have what a reward function asks for."""


def weighted_task(task: Task, rewards: Sequence[RewardConfig], config: SourceConfig) -> WeightedTask:
    """Task with weighted rewards; raises ConfigError for equal names or no weight."""
    names = [reward.name for reward in rewards]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError("task.rewards", f"two rewards have the name {twice[0]}", action="name each once")
    if not any(reward.weight for reward in rewards):
        raise ConfigError("task.rewards", "every weight is 0", action="give one reward a weight")
    named = []
    for number, reward in enumerate(rewards):
        key = f"task.rewards[{number}]"
        source: RewardSource
        if isinstance(reward, MatchRewardConfig):
            source = task
        elif isinstance(reward, FunctionRewardConfig):
            source = own_reward(reward.function, task, config, directory=reward.directory, key=f"{key}.function")
        elif isinstance(reward, CodeRewardConfig):
            source = CodeReward(reward, key=key, timeout_s=config.reward_timeout_s, num_workers=config.reward_workers)
        else:
            source = _remote(reward, config, key=key)
        named.append(NamedReward(name=reward.name, weight=reward.weight, source=source, is_own_score=source is task))
    return WeightedTask(task, named)


def own_reward(path: str, task: Task, config: SourceConfig, *, directory: str, key: str) -> FunctionReward:
    """A loaded reward function; raises ConfigError for failed loads and absent columns."""
    reward = FunctionReward(
        path, directory=Path(directory), key=key, timeout_s=config.reward_timeout_s, num_workers=config.reward_workers
    )
    problems = [reward.answer_problem(task.prompt(index)) for index in range(min(NUM_TRIED, task.num_prompts))]
    if problems[0] is not None and all(problems):
        reward.close()
        raise ConfigError(problems[0].key, problems[0].text, action=problems[0].action)
    _LOG.info("reward %s: %d files of %s, digest %.12s", path, reward.num_files, reward.place, reward.digest)
    return reward


def _remote(reward: HttpRewardConfig | JudgeRewardConfig, config: SourceConfig, *, key: str) -> RemoteReward:
    job: dict[str, Any] = reward.model_dump(mode="json")
    if isinstance(reward, HttpRewardConfig):
        stated: list[object] = [reward.low, reward.high, reward.batch, reward.version]
        terms = Terms(name=reward.name, low=reward.low, high=reward.high, signed_by=reward.signed_by)
    else:
        rubric = _rubric(reward, key=key)
        # The number rises where equal replies get other scores; cached ones are asked again.
        question = [6, rubric, reward.model, reward.field, reward.pattern, sorted(reward.request.items())]
        stated = [*question, reward.low, reward.high]
        # The judge's scale becomes 0 to 1.
        terms = Terms(name=reward.name, low=0.0, high=1.0)
        job |= {"rubric": rubric, "question": question}
    return RemoteReward(
        job,
        terms=terms,
        # Without url and key: each site may have its own.
        digest=bytes_digest(json.dumps([f"{reward.kind} 2", *stated], sort_keys=True).encode()),
        key=key,
        by_group=isinstance(reward, HttpRewardConfig) and reward.batch == "group",
        timeout_s=config.reward_timeout_s,
        num_workers=config.reward_workers,
    )


def _rubric(reward: JudgeRewardConfig, *, key: str) -> str:
    if bool(reward.rubric) == bool(reward.rubric_file):
        raise ConfigError(f"{key}.rubric", "set either rubric or rubric_file")
    text, is_long = reward.rubric, False
    if reward.rubric_file:
        try:
            with Path(reward.rubric_file).open("rb") as file:
                data = file.read(MAX_RUBRIC_BYTES + 1)
            # A text that is cut here may end within a character.
            is_long = len(data) > MAX_RUBRIC_BYTES
            text = data.decode(errors="ignore" if is_long else "strict")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{key}.rubric_file",
                f"cannot read {reward.rubric_file}: {error}",
                action="check the path, and that this user can read the file",
            ) from error
    if is_long:
        raise ConfigError(f"{key}.rubric_file", f"longer than {MAX_RUBRIC_BYTES} bytes", action="shorten the rubric")
    if "{completion}" not in text:
        raise ConfigError(
            f"{key}.rubric", "has no {completion}", action="add it, since the judge must see the completion"
        )
    return text
