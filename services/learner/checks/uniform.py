"""Groups that teach nothing, because all their rewards are equal: which of them make room for others. Pure.

Guarantees: judged by the rewards that the examiner let through, in the order of arrival, never more than the room; what
is beyond it is trained on, so that a run whose prompts are all solved, or all out of reach, goes on.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from heterorl.common.process.config import Config
from heterorl.common.types.rollout import QueuedGroup
from heterorl.learner.train.completions import has_signal


class DynamicSamplingConfig(Config):
    """Replacement of groups whose rewards are all equal (DAPO, arXiv 2503.14476 section 3.2)."""

    max_replaced_per_step: int = Field(default=0, ge=0, le=1 << 20)
    """Groups of equal rewards that a step replaces by others, so that it keeps its size; 0 replaces none. What comes
    beyond it is trained on, so that a run whose prompts are all solved goes on. At a share u of such groups a full step
    needs groups_per_step u / (1 - u) in the mean."""


def split_uniform(groups: Sequence[QueuedGroup], *, room: int) -> tuple[list[QueuedGroup], list[QueuedGroup]]:
    """Divide groups into those that a step keeps and, up to `room`, those of equal rewards that it replaces."""
    kept: list[QueuedGroup] = []
    replaced: list[QueuedGroup] = []
    for queued in groups:
        is_replaced = len(replaced) < room and not has_signal(queued.group)
        (replaced if is_replaced else kept).append(queued)
    return kept, replaced
