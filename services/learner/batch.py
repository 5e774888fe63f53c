"""Groups -> micro-batches of bounded size, with masks and the numbers that only whole groups can give.

Guarantees: advantages and log E_q[q] are computed once per whole group, in float64, before any split; every rollout is
in exactly one micro-batch; a rollout without tokens takes no part in its group's means.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.common.types import Float32Array, Group, Int32Array
from services.learner.advantages import group_advantages
from services.learner.loss_config import GepoConfig, LossConfig
from services.learner.losses import log_expectation


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainingSequence:
    """One rollout ready for the loss: prompt and completion with its group's numbers."""

    prompt_token_ids: Int32Array
    token_ids: Int32Array
    sampler_logprobs: Float32Array
    advantage: float
    log_expectation: float

    @property
    def num_tokens(self) -> int:
        """Length of prompt and completion."""
        return self.prompt_token_ids.size + self.token_ids.size


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Sequences of one forward pass: R rows of S tokens for the model, B sequences of T completion tokens for the loss.

    Padded: R = B, one sequence a row, `attention` [R, S]. Packed: R = 1, sequences one after another, `attention`
    [1, 1, S, S] lets each see itself alone. `sources_BT` is the flat position (row * S + column) of the hidden state
    that predicts each completion token; mask_BT is 1 on completion tokens.
    """

    input_ids_RS: Tensor
    position_ids_RS: Tensor
    attention: Tensor
    sources_BT: Tensor
    targets_BT: Tensor
    mask_BT: Tensor
    sampler_logprobs_BT: Tensor
    advantages_B: Tensor
    log_expectation_B: Tensor


def sequences_of(groups: Sequence[Group], *, config: LossConfig) -> list[TrainingSequence]:
    """Give every rollout its advantage and its group's log expectation.

    Groups without any tokens give no sequences.
    """
    result: list[TrainingSequence] = []
    denominator = config.denominator if isinstance(config, GepoConfig) else "contraharmonic"
    for group in groups:
        members = [rollout for rollout in group.rollouts if rollout.token_ids.size]
        if not members:
            continue
        advantages = group_advantages([rollout.reward for rollout in members], kind=config.advantage)
        means = [rollout.sampler_logprobs.astype(np.float64).mean() for rollout in members]
        expectation = log_expectation(torch.tensor(means, dtype=torch.float64), denominator=denominator).item()
        result += [
            TrainingSequence(
                prompt_token_ids=group.prompt_token_ids,
                token_ids=rollout.token_ids,
                sampler_logprobs=rollout.sampler_logprobs,
                advantage=float(advantage),
                log_expectation=expectation,
            )
            for rollout, advantage in zip(members, advantages, strict=True)
        ]
    return result


def micro_batches(
    sequences: Sequence[TrainingSequence], *, max_tokens: int, is_packed: bool
) -> list[list[TrainingSequence]]:
    """Cut sequences into batches of at most `max_tokens`, padding included; one longer sequence stands alone."""
    ordered = sorted(sequences, key=lambda sequence: sequence.num_tokens, reverse=True)
    result: list[list[TrainingSequence]] = []
    for sequence in ordered:
        if result:
            # Longest first, so the first member's length is the padded width.
            padded = (len(result[-1]) + 1) * result[-1][0].num_tokens
            packed = sum(member.num_tokens for member in result[-1]) + sequence.num_tokens
            if (packed if is_packed else padded) <= max_tokens:
                result[-1].append(sequence)
                continue
        result.append([sequence])
    return result


def collate(
    sequences: Sequence[TrainingSequence], *, device: torch.device, dtype: torch.dtype, is_packed: bool
) -> MicroBatch:
    """Lay sequences out as one micro-batch; `dtype` is that of loss and attention mask."""
    lengths = [sequence.num_tokens for sequence in sequences]
    width = sum(lengths) if is_packed else max(lengths)
    rows = 1 if is_packed else len(sequences)
    starts = np.cumsum([0, *lengths[:-1]]) if is_packed else np.arange(rows) * width
    input_ids, position_ids = np.zeros(rows * width, np.int64), np.zeros(rows * width, np.int64)
    owner = np.full(rows * width, -1)
    shape = (len(sequences), max(sequence.token_ids.size for sequence in sequences))
    sources, targets = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    mask, logprobs = np.zeros(shape), np.zeros(shape)
    for row, (sequence, start, total) in enumerate(zip(sequences, starts, lengths, strict=True)):
        prompt, length = sequence.prompt_token_ids.size, sequence.token_ids.size
        input_ids[start : start + total] = np.concatenate([sequence.prompt_token_ids, sequence.token_ids])
        position_ids[start : start + total] = np.arange(total)
        owner[start : start + total] = row
        sources[row, :length] = start + prompt - 1 + np.arange(length)
        targets[row, :length] = sequence.token_ids
        mask[row, :length] = 1
        logprobs[row, :length] = sequence.sampler_logprobs

    def floats(values: object) -> Tensor:
        return torch.as_tensor(values, dtype=dtype, device=device)

    def integers(values: npt.NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(values).to(device)

    return MicroBatch(
        input_ids_RS=integers(input_ids.reshape(rows, width)),
        position_ids_RS=integers(position_ids.reshape(rows, width)),
        attention=_block_causal(owner, floats) if is_packed else integers((owner >= 0).reshape(rows, width) * 1),
        sources_BT=integers(sources),
        targets_BT=integers(targets),
        mask_BT=floats(mask),
        sampler_logprobs_BT=floats(logprobs),
        advantages_B=floats([sequence.advantage for sequence in sequences]),
        log_expectation_B=floats([sequence.log_expectation for sequence in sequences]),
    )


def _block_causal(owner: npt.NDArray[np.int64], floats: Callable[[object], Tensor]) -> Tensor:
    """Additive mask [1, 1, S, S]: 0 where a token may look, a very negative number elsewhere."""
    allowed = np.tril(owner[:, None] == owner[None, :])
    mask = floats(np.where(allowed, 0.0, 1.0))
    return (mask * torch.finfo(mask.dtype).min)[None, None]
