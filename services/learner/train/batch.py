"""Whole groups to training sequences with advantages, and the step's denominators.

Guarantees: advantages and log denominators are computed once, in float64, over each whole group and before any split. A
rollout without drawn tokens is not a member.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from heterorl.common.types.common import Float32Array, Int32Array
from heterorl.common.types.rollout import Group, Rollout
from heterorl.common.types.trajectory import Strip, strips_of
from heterorl.learner.loss.custom import LossBatch
from heterorl.learner.loss.group import beta_weights, group_advantages, group_log_denominator, log_denominators
from heterorl.learner.loss.loss_config import LossConfig
from heterorl.learner.loss.loss_spec import LossSpec, loss_spec_of
from heterorl.learner.train.completion_stats import has_signal


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainingSequence:
    """One rollout for the loss: the model's inputs, and numbers of its group.

    The loss is over the drawn tokens of all strips in order. All strips of a rollout share a pass, so means and sums
    over it are exact. Example: TrainingSequence(strips=strips_of(prompt, rollout), advantage=0.5, log_denominator=-0.6,
    sampler_logprobs=rollout.sampler_logprobs)
    """

    strips: tuple[Strip, ...]
    sampler_logprobs: Float32Array
    advantage: float
    log_denominator: float
    centred_reward: float = 0.0
    """Reward minus the mean over the group's rollouts, for every kind of advantage."""
    log_expectation: float = 0.0
    """GEPO's log denominator, for every loss."""
    group: int = 0
    """Position of the group in the step."""
    number: int = 0
    """Position of the rollout in the group."""
    row: int = 0
    """Position of the rollout in the step."""
    staleness: Int32Array | None = None
    """Versions between each token's sampler and the learner; None is 0 for all."""
    coupling: float = 0.0
    """See `LossInputs`; known after a first pass only."""
    is_selected: np.ndarray[tuple[int], np.dtype[np.bool_]] | None = None
    """Tokens that the step's selection keeps; None is all."""
    reference_logprobs: np.ndarray[tuple[int], np.dtype[np.float64]] | None = None
    """Log-probs of the reference model, where the loss has one."""
    routed_experts: bytes = b""
    """See Rollout."""

    @classmethod
    def scored(cls, prompt: Int32Array, tokens: Int32Array) -> TrainingSequence:
        """A sequence for scoring only: without reward, group or sampler."""
        marks = np.arange(prompt.size + tokens.size) >= prompt.size
        return cls(
            strips=(Strip(token_ids=np.concatenate([prompt, tokens]), is_drawn=marks),),
            sampler_logprobs=np.zeros(tokens.size, np.float32),
            advantage=0.0,
            log_denominator=0.0,
        )

    @property
    def num_drawn(self) -> int:
        """Tokens that the loss is over."""
        return self.sampler_logprobs.size

    @property
    def num_inputs(self) -> int:
        """Tokens that the model reads."""
        return sum(strip.num_inputs for strip in self.strips)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """The sequences of one optimizer step in the order of their groups."""

    sequences: tuple[TrainingSequence, ...]
    whole: LossBatch | None = None
    """All rollouts after a first pass, in the order of their rows, for a custom loss that takes the step."""

    @property
    def num_sequences(self) -> int:
        """Rollouts; includes groups of equal rewards unless the loss drops them."""
        return len(self.sequences)

    def with_whole(self, known: Batch, device: torch.device) -> Batch:
        """This step with the `whole` of a first pass, on a device."""
        return self if known.whole is None else replace(self, whole=known.whole.to(device))

    @property
    def num_tokens(self) -> int:
        return sum(sequence.num_drawn for sequence in self.sequences)

    def sum_of_powers(self, power: float) -> float:
        """Sum of T^-power over the sequences."""
        return float(sum(float(sequence.num_drawn) ** -power for sequence in self.sequences))


def build_batch(groups: Sequence[Group], *, loss: LossConfig, head_version: int = 0) -> Batch:
    """Give every trainable rollout its advantage and log denominator, over the trainable rollouts of its group.

    Staleness counts from `head_version`, the version of the learner's weights.

    Raises:
        ValueError: a prompt has no token, a rollout has not one log-prob for each drawn token, or a reward is outside
            the range of the advantage.
    """
    spec = loss_spec_of(loss)
    scales = _prompt_scales(groups) if spec.advantage == "beta" else [1.0] * len(groups)
    sequences = [
        sequence
        for number, (group, scale) in enumerate(zip(groups, scales, strict=True))
        if not spec.drop_uniform_groups or has_signal(group)
        for sequence in _sequences(group, spec, number=number, scale=scale, head_version=head_version)
    ]
    return Batch(sequences=tuple(replace(sequence, row=row) for row, sequence in enumerate(sequences)))


def _prompt_scales(groups: Sequence[Group]) -> list[float]:
    """BNPO's weight of each group; groups of one prompt are pooled, so that a prompt counts once in the moments."""
    rewards: dict[bytes, list[float]] = {}
    for group in groups:
        pooled = rewards.setdefault(group.prompt_token_ids.tobytes(), [])
        pooled.extend(rollout.reward for rollout in group.trainable)
    weights_P = beta_weights(torch.tensor([float(np.mean(values)) for values in rewards.values()], dtype=torch.float64))
    scale_of = dict(zip(rewards, weights_P.tolist(), strict=True))
    return [scale_of[group.prompt_token_ids.tobytes()] for group in groups]


def _sequences(group: Group, spec: LossSpec, *, number: int, scale: float, head_version: int) -> list[TrainingSequence]:
    if group.prompt_token_ids.size == 0:
        raise ValueError(f"group {group.id}: the prompt is empty")
    members = [(place, rollout) for place, rollout in enumerate(group.rollouts) if rollout.is_trainable]
    rollouts = [rollout for _, rollout in members]
    strips = [strips_of(group.prompt_token_ids, rollout) for rollout in rollouts]
    counts = [sum(int(strip.is_drawn.sum()) for strip in own) for own in strips]
    if counts != [rollout.num_drawn for rollout in rollouts]:
        raise ValueError(f"group {group.id}: log-probs and tokens differ in number")
    rewards_G = torch.tensor([rollout.reward for rollout in rollouts], dtype=torch.float64)
    counts_G = torch.tensor(counts)
    sums_G = torch.tensor(
        [float(rollout.sampler_logprobs.sum(dtype=np.float64)) for rollout in rollouts], dtype=torch.float64
    )
    means_G = sums_G / counts_G
    advantages_G = (group_advantages(rewards_G, kind=spec.advantage) * scale).tolist()
    centred_G = group_advantages(rewards_G, kind="mean").tolist()
    log_probs_G = sums_G if spec.normalisation == "raw" else means_G
    log_denominators_G = log_denominators(spec, log_probs_G).tolist()
    log_expectation = group_log_denominator(means_G, kind="contraharmonic")
    return [
        TrainingSequence(
            strips=own,
            sampler_logprobs=rollout.sampler_logprobs,
            advantage=advantage,
            log_denominator=log_denominator,
            centred_reward=centred_reward,
            log_expectation=log_expectation,
            group=number,
            number=place,
            staleness=_staleness(rollout, head_version) if spec.needs_staleness else None,
            routed_experts=rollout.routed_experts,
        )
        for (place, rollout), own, advantage, centred_reward, log_denominator in zip(
            members, strips, advantages_G, centred_G, log_denominators_G, strict=True
        )
    ]


def _staleness(rollout: Rollout, head_version: int) -> Int32Array:
    drawn = [span for span in rollout.spans if span.is_drawn]
    ages = [max(head_version - span.version, 0) for span in drawn]
    return np.repeat(np.array(ages, np.int32), [span.end - span.start for span in drawn])
