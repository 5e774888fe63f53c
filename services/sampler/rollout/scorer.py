"""Rewards of completions beside generation: a task in processes is asked from threads, any other one at once.

Guarantees: whatever a reward takes, the event loop and the engine go on; what was queued for a group that was given up
is never asked.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from heterorl.common.generation.requests import Completion
from heterorl.common.tasks.scoring import FailureRow
from heterorl.common.tasks.task import Prompt
from heterorl.common.types.rollout import RewardPart
from heterorl.sampler.rollout.drafts import Draft
from heterorl.sampler.rollout.maker import RolloutMaker

_LOG = logging.getLogger(__name__)


class Scorer:
    """Asks for rewards, as many at once as the task has processes."""

    def __init__(self, maker: RolloutMaker) -> None:
        self._maker = maker
        # A plain task is a function: the lab computes it at once, in no virtual time.
        num_workers = int(getattr(maker.task, "num_workers", 0))
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="reward") if num_workers else None
        self._by_group = bool(getattr(maker.task, "by_group", False))
        self._failures = FailureRow()

    def ready(self, draft: Draft, member: int) -> tuple[int, ...]:
        """The members that can be scored now that one has ended: itself, or all where they are scored together."""
        if not self._by_group:
            return (member,)
        is_whole = len(draft.completions) == self._maker.group_size
        return tuple(range(self._maker.group_size)) if is_whole else ()

    async def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[tuple[RewardPart, ...]]:
        """The parts of completions' rewards, in order.

        Raises:
            RewardError: one could not be computed.
        """
        if self._threads is None:
            return self._maker.score_all(prompt, completions)
        return await asyncio.get_running_loop().run_in_executor(
            self._threads, self._maker.score_all, prompt, completions
        )

    def failed(self, draft: Draft, error: Exception) -> None:
        """Note that a group has no reward."""
        self._failures.failed(error)
        _LOG.warning("assignment %d gives no group: %s", draft.assignment.id, error)

    @property
    def problem(self) -> str:
        """Why no group gets its rewards; empty while some do."""
        return self._failures.problem

    def passed(self) -> None:
        """Note that a group has its rewards."""
        self._failures.passed()

    def close(self) -> None:
        """Ask for nothing more; what is being asked ends with the task's processes."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
