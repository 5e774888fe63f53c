"""A task whose own score is computed in processes that can be killed, like any other reward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from heterorl.common.errors import ConfigError, RewardError
from heterorl.common.tasks.rewards.process import PATIENCE, LoadFailed, RewardPool
from heterorl.common.tasks.task import Prompt, Task
from heterorl.common.types.common import Digest
from heterorl.common.types.rollout import RewardPart


class TaskApart:
    """A task's prompts here and its score elsewhere; implements Task."""

    def __init__(self, task: Task, job: Mapping[str, Any], *, timeout_s: float, num_workers: int) -> None:
        """Nothing starts before the first score.

        Args:
            task: whose prompts these are.
            job: what a process loads to score as the task does; see heterorl.common.tasks.rewards.worker.
            timeout_s: processor time for one completion, seconds.
            num_workers: most processes.
        """
        self.inner = task
        self.pool = RewardPool(job, timeout_s=PATIENCE * timeout_s, cpu_s=timeout_s, num_workers=num_workers)
        self.num_prompts = task.num_prompts
        self.num_evaluation_prompts = task.num_evaluation_prompts
        self.num_workers = num_workers
        self.digest: Digest = task.digest
        self._has_scored = False

    def prompt(self, index: int) -> Prompt:
        """The training prompt at a position."""
        return self.inner.prompt(index)

    def evaluation_prompt(self, index: int) -> Prompt:
        """The held-out prompt at a position."""
        return self.inner.evaluation_prompt(index)

    def score(self, prompt: Prompt, completion: str) -> tuple[RewardPart, ...]:
        """The task's own parts.

        Raises:
            ConfigError: the process cannot load the task.
            RewardError: the verifier failed, crashed or took too long; that is not a score.
        """
        request = {"index": prompt.index, "prompt": prompt.text, "answer": prompt.answer, "completion": completion}
        try:
            reply = self.pool.ask(request)
        except LoadFailed as error:
            if self._has_scored:
                # What it needs was there before; a full memory, say, is no mistake of a configuration.
                raise RewardError(f"the process that computes rewards cannot load its task again: {error}") from error
            raise ConfigError("task.name", f"the process that computes rewards cannot load it: {error}") from error
        except RewardError as error:
            raise RewardError(f"the reward of prompt {prompt.index} failed: {error}") from error
        self._has_scored = True
        return tuple(RewardPart(name=str(name), value=float(value)) for name, value in reply["parts"].items())

    def close(self) -> None:
        """Kill the processes."""
        self.pool.close()
