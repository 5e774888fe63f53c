"""What each source of a mixture of tasks had of a step: groups and their mean reward."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from heterorl.common.types.common import SourceReport
from heterorl.common.types.rollout import QueuedGroup


def by_source(groups: Sequence[QueuedGroup]) -> tuple[SourceReport, ...]:
    """A report for each source of which a group was trained; none of a task that has one source."""
    rewards: dict[str, list[list[float]]] = defaultdict(list)
    for queued in groups:
        rewards[queued.source].append([rollout.reward for rollout in queued.group.rollouts])
    return tuple(
        SourceReport(
            label=label, num_groups=len(found), reward_mean=_mean([number for some in found for number in some])
        )
        for label, found in sorted(rewards.items())
        if label
    )


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers) if numbers else 0.0
