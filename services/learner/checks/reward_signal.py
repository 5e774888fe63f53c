"""Groups whose rewards are all equal: their replacement, and a warning.

Guarantees: at most `max_replaced_per_step` are replaced, in the order of arrival, after the verifier. The others are
trained on, so a run whose prompts are all solved, or all too hard, goes on.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import Field

from heterorl.common.process import metrics
from heterorl.common.process.config_file import Config
from heterorl.common.types.rollout import FinishReason, QueuedGroup
from heterorl.learner.train.completion_stats import has_signal

_LOG = logging.getLogger(__name__)
NUM_STEPS = 20
"""Steps in a row without a reward signal before the warning."""


class DynamicSamplingConfig(Config):
    """Replacement of groups of equal rewards (DAPO, arXiv 2503.14476 section 3.2)."""

    max_replaced_per_step: int = Field(default=0, ge=0, le=1 << 20)
    """Most groups of equal rewards that a step replaces; others are trained on. With a share u of such groups it
    replaces groups_per_step u / (1 - u). 0: none."""


def split_uniform(groups: Sequence[QueuedGroup], *, room: int) -> tuple[list[QueuedGroup], list[QueuedGroup]]:
    """Groups that stay, and up to `room` of equal rewards that go."""
    kept: list[QueuedGroup] = []
    replaced: list[QueuedGroup] = []
    for queued in groups:
        is_replaced = len(replaced) < room and not has_signal(queued.group)
        (replaced if is_replaced else kept).append(queued)
    return kept, replaced


@dataclass(slots=True)
class RewardSignal:
    """Counts steps in a row without rewards that differ in a group.
    Warns once for each such stretch."""

    num_flat: int = 0

    def note(self, groups: Sequence[QueuedGroup]) -> None:
        if any(has_signal(queued.group) for queued in groups):
            if self.num_flat >= NUM_STEPS:
                _LOG.info("rewards of a step differ again; %d steps before had equal ones", self.num_flat)
            self.num_flat = 0
        else:
            self.num_flat += 1
            if self.num_flat == NUM_STEPS:
                _LOG.warning("%s", _advice(groups))
        metrics.STEPS_WITHOUT_SIGNAL.set(self.num_flat)


def _advice(groups: Sequence[QueuedGroup]) -> str:
    rollouts = [rollout for queued in groups for rollout in queued.group.trainable]
    rewards = [rollout.reward for rollout in rollouts]
    num_cut = sum(rollout.finish_reason is FinishReason.LENGTH for rollout in rollouts)
    return (
        f"NO GRADIENT FROM REWARDS in {NUM_STEPS} steps in a row: all rollouts of each group had one reward. In the"
        f" newest step rewards were {min(rewards):g} to {max(rewards):g}, and {num_cut} of {len(rollouts)} completions"
        " were cut at max_new_tokens. If rewards are low: can the model answer such prompts at all (task), does it"
        " see them as it was trained to (use_chat_template), are answers cut off (sampling.max_new_tokens), does the"
        " reward find the answer in the text (task.reward)? If they are high, the task is learnt. A larger"
        " group_size makes differences more likely"
    )
