"""Whole groups -> sequences that carry everything the loss needs, and the step's denominators.

Guarantees: advantages and log denominators are computed here, once, in float64, over each whole group and before any
split; a rollout without tokens gives no sequence and takes no part in its group's means or in the denominators.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from services.common.types import Float32Array, Group, Int32Array
from services.learner.advantages import group_advantages
from services.learner.loss_config import LossConfig
from services.learner.loss_registry import log_denominators


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainingSequence:
    """One rollout ready for the loss: prompt and completion with its group's numbers.

    Example: TrainingSequence(prompt_token_ids=prompt, token_ids=rollout.token_ids, advantage=0.5, log_denominator=-0.6,
    sampler_logprobs=rollout.sampler_logprobs)
    """

    prompt_token_ids: Int32Array
    token_ids: Int32Array
    sampler_logprobs: Float32Array
    advantage: float
    log_denominator: float

    @property
    def num_inputs(self) -> int:
        """Tokens that the model reads: all but the last, which nothing follows."""
        return self.prompt_token_ids.size + self.token_ids.size - 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """The sequences of one optimizer step in the order of their groups."""

    sequences: tuple[TrainingSequence, ...]

    @property
    def num_sequences(self) -> int:
        """Rollouts with at least one token, groups of equal rewards included."""
        return len(self.sequences)

    @property
    def num_tokens(self) -> int:
        """Completion tokens."""
        return sum(sequence.token_ids.size for sequence in self.sequences)


def build_batch(groups: Sequence[Group], *, loss: LossConfig) -> Batch:
    """Give every rollout its advantage and its log denominator.

    Raises:
        ValueError: a prompt has no token, so nothing predicts the first token of its completions, or a rollout has
            not one log-prob per token.
    """
    return Batch(sequences=tuple(sequence for group in groups for sequence in _sequences(group, loss)))


def _sequences(group: Group, loss: LossConfig) -> list[TrainingSequence]:
    if group.prompt_token_ids.size == 0:
        raise ValueError(f"group {group.id}: the prompt is empty")
    if any(rollout.sampler_logprobs.size != rollout.token_ids.size for rollout in group.rollouts):
        raise ValueError(f"group {group.id}: log-probs and tokens differ in number")
    rewards_G = torch.tensor([rollout.reward for rollout in group.rollouts], dtype=torch.float64)
    is_valid_G = torch.tensor([rollout.token_ids.size > 0 for rollout in group.rollouts])
    means_G = torch.tensor(
        [
            rollout.sampler_logprobs.mean(dtype=np.float64) if rollout.token_ids.size else 0.0
            for rollout in group.rollouts
        ],
        dtype=torch.float64,
    )
    advantages_G = group_advantages(rewards_G, is_valid_G, kind=loss.advantage).tolist()
    log_denominators_G = log_denominators(loss, means_G, is_valid_G).tolist()
    return [
        TrainingSequence(
            prompt_token_ids=group.prompt_token_ids,
            token_ids=rollout.token_ids,
            sampler_logprobs=rollout.sampler_logprobs,
            advantage=advantage,
            log_denominator=log_denominator,
        )
        for rollout, advantage, log_denominator in zip(group.rollouts, advantages_G, log_denominators_G, strict=True)
        if rollout.token_ids.size > 0
    ]
