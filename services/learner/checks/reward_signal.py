"""Noticing that rewards teach nothing: step after step, all rollouts of every group have one reward."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from heterorl.common.process import metrics
from heterorl.common.types.rollout import FinishReason, QueuedGroup
from heterorl.learner.train.completions import has_signal

_LOG = logging.getLogger(__name__)
NUM_STEPS = 20
"""Steps in a row without a reward signal, after which a person is told."""


@dataclass(slots=True)
class RewardSignal:
    """Counts steps in a row in which no group has rewards that differ; warns once for each such stretch."""

    num_flat: int = 0

    def note(self, groups: Sequence[QueuedGroup]) -> None:
        """Look at the groups of a step."""
        if any(has_signal(queued.group) for queued in groups):
            if self.num_flat >= NUM_STEPS:
                _LOG.info("rewards differ again, after %d steps", self.num_flat)
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
        " were cut at max_new_tokens. Where rewards are low: can the model answer such prompts at all (task), does it"
        " see them as it was trained to (use_chat_template), are answers cut off (sampling.max_new_tokens), does the"
        " reward find the answer in the text (task.reward)? Where they are high, the task is learnt. A larger"
        " group_size makes differences more likely"
    )
