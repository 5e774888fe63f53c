"""Scores of a group, several at once where a task has several processes, and how long none could be had."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from heterorl.common.tasks.task import Prompt
from heterorl.common.types.rollout import RewardPart

_LOG = logging.getLogger(__name__)
LOUD_AFTER = 8


class Scores(Protocol):
    """What gives the parts of a completion's reward."""

    def score(self, prompt: Prompt, completion: str) -> tuple[RewardPart, ...]:
        """Named parts, whose weighted sum is the reward."""
        ...


def score_group(task: Scores, prompt: Prompt, texts: Sequence[str]) -> Iterator[tuple[RewardPart, ...]]:
    """The parts of each completion's reward, in order; the first failure gives up the rest.

    Raises:
        RewardError: one could not be computed.
    """
    if getattr(task, "by_group", False):
        score_all: Any = getattr(task, "score_all", None)
        yield from score_all(prompt, texts)
        return
    num_workers = min(int(getattr(task, "num_workers", 1)), len(texts))
    if num_workers <= 1:
        yield from (task.score(prompt, text) for text in texts)
        return
    executor = ThreadPoolExecutor(max_workers=num_workers, thread_name_prefix="reward")
    try:
        yield from executor.map(lambda text: task.score(prompt, text), texts)
    finally:
        executor.shutdown(cancel_futures=True)


@dataclass(slots=True, kw_only=True)
class FailureRow:
    """Counts groups in a row that were lost for want of one thing, and says so before all are lost in silence."""

    missing: str = "REWARD"
    cure: str = "correct task.reward or what it needs, or raise task.reward_timeout_s"
    length: int = 0
    problem: str = ""
    """What a person is told while the row is long; empty else."""

    def passed(self) -> None:
        """A group had it."""
        self.length, self.problem = 0, ""

    def failed(self, error: Exception) -> None:
        """A group had none: an error in the log at the eighth in a row, the sixteenth, the thirty-second ..."""
        self.length += 1
        if self.length >= LOUD_AFTER:
            words = f"NO {self.missing} for {self.length} groups in a row, nothing can be trained on"
            self.problem = f"{words}: {error} ({self.cure})"
            if self.length & (self.length - 1) == 0:
                _LOG.error("%s", self.problem)
