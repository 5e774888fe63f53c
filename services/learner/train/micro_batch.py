"""Sequences -> micro-batches within a token budget, padded or packed.

Guarantees: every sequence is in exactly one micro-batch; a sequence's log-probs do not depend on its neighbours.
Padded: one sequence a row, padding on the right, where causal attention cannot see it, so no mask is needed. Packed:
all in one row; position ids start again at 0 with each sequence, from which transformers derives block-diagonal causal
attention (`model.check_forward` refuses models that do not).

Suffixes: R rows of S tokens for the model; B sequences of T completion tokens for the loss; N completion tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from heterorl.common.model.routing import RoutedTokens
from heterorl.learner.loss.objectives import LossInputs
from heterorl.learner.train.batch import TrainingSequence

Batching = Literal["padded", "packed"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """Sequences of one forward and backward pass.

    `sources_N` are flat positions (row * S + column) of the hidden states that predict the completion tokens
    `targets_N`; both run through the mask of `loss_inputs` row by row, whose tensors are small: the loss is exact.
    `places_B` [B, 2] are the group and the rollout of each sequence; they stay on the CPU. `routed` are the recorded
    experts of the R * S tokens; None where no sequence has any.
    """

    input_ids_RS: torch.Tensor
    position_ids_RS: torch.Tensor
    sources_N: torch.Tensor
    targets_N: torch.Tensor
    loss_inputs: LossInputs
    places_B: torch.Tensor
    routed: RoutedTokens | None = None

    def to(self, device: torch.device) -> MicroBatch:
        """The same tensors on `device`."""
        return MicroBatch(
            input_ids_RS=self.input_ids_RS.to(device),
            position_ids_RS=self.position_ids_RS.to(device),
            sources_N=self.sources_N.to(device),
            targets_N=self.targets_N.to(device),
            loss_inputs=self.loss_inputs.to(device),
            places_B=self.places_B,
            routed=self.routed.to(device) if self.routed else None,
        )


def split(
    sequences: Sequence[TrainingSequence], *, max_tokens: int, batching: Batching
) -> list[list[TrainingSequence]]:
    """Cut sequences into lists of at most `max_tokens` model inputs, padding included; longest first.

    A sequence that alone exceeds the budget is alone in its list.
    """
    # sorted() is stable, so equal lengths keep the order of their groups and the split is deterministic.
    ordered = sorted(sequences, key=lambda sequence: sequence.num_inputs, reverse=True)
    parts: list[list[TrainingSequence]] = []
    used = 0
    for sequence in ordered:
        # Longest first: in a padded list every row costs as much as the first.
        cost = parts[-1][0].num_inputs if parts and batching == "padded" else sequence.num_inputs
        if parts and used + cost <= max_tokens:
            parts[-1].append(sequence)
            used += cost
        else:
            parts.append([sequence])
            used = sequence.num_inputs
    return parts


def collate(sequences: Sequence[TrainingSequence], *, batching: Batching) -> MicroBatch:
    """Lay sequences out as one micro-batch."""
    lengths = [sequence.num_inputs for sequence in sequences]
    is_packed = batching == "packed"
    rows, width = (1, sum(lengths)) if is_packed else (len(sequences), max(lengths))
    starts = np.cumsum([0, *lengths[:-1]]) if is_packed else np.arange(rows) * width
    input_ids = np.zeros(rows * width, np.int64)
    # Padding goes on counting: a jump in the positions would be read as the start of a packed sequence.
    position_ids = np.tile(np.arange(width), rows)
    sources: list[np.ndarray[tuple[int], np.dtype[np.int64]]] = []
    routed = _Routed(sequences, num_tokens=rows * width)
    for sequence, start, length in zip(sequences, starts, lengths, strict=True):
        num_prompt = sequence.prompt_token_ids.size
        input_ids[start : start + num_prompt] = sequence.prompt_token_ids
        input_ids[start + num_prompt : start + length] = sequence.token_ids[:-1]
        if is_packed:
            position_ids[start : start + length] = np.arange(length)
        routed.put(sequence, int(start))
        sources.append(np.arange(start + num_prompt - 1, start + length))
    return MicroBatch(
        input_ids_RS=torch.from_numpy(input_ids.reshape(rows, width)),
        position_ids_RS=torch.from_numpy(position_ids.reshape(rows, width)),
        sources_N=torch.from_numpy(np.concatenate(sources)),
        targets_N=torch.from_numpy(np.concatenate([sequence.token_ids for sequence in sequences]).astype(np.int64)),
        loss_inputs=_loss_inputs(sequences),
        places_B=torch.tensor([(sequence.group, sequence.number) for sequence in sequences]),
        routed=routed.tokens(),
    )


class _Routed:
    """The recorded experts of a micro-batch, put where the tokens lie."""

    def __init__(self, sequences: Sequence[TrainingSequence], *, num_tokens: int) -> None:
        sizes = {len(one.routed_experts) // one.num_inputs for one in sequences if one.routed_experts}
        # Of one contract all are of one size, as admission has seen to.
        assert len(sizes) <= 1, "records of several models"
        self._ids_NC = np.zeros((num_tokens, sizes.pop() if sizes else 0), np.uint8)
        self._is_recorded_N = np.zeros(num_tokens, np.bool_)

    def put(self, sequence: TrainingSequence, start: int) -> None:
        if sequence.routed_experts:
            tokens = slice(start, start + sequence.num_inputs)
            self._ids_NC[tokens] = np.frombuffer(sequence.routed_experts, np.uint8).reshape(sequence.num_inputs, -1)
            self._is_recorded_N[tokens] = True

    def tokens(self) -> RoutedTokens | None:
        if not self._is_recorded_N.any():
            return None
        return RoutedTokens(ids_NC=torch.from_numpy(self._ids_NC), is_recorded_N=torch.from_numpy(self._is_recorded_N))


def _loss_inputs(sequences: Sequence[TrainingSequence]) -> LossInputs:
    longest = max(sequence.token_ids.size for sequence in sequences)
    mask_BT = np.zeros((len(sequences), longest), np.bool_)
    is_selected_BT = np.zeros((len(sequences), longest), np.bool_)
    sampler_BT = np.zeros((len(sequences), longest), np.float64)
    staleness_BT = np.zeros((len(sequences), longest), np.float64)
    for row, sequence in enumerate(sequences):
        tokens = slice(sequence.token_ids.size)
        mask_BT[row, tokens] = True
        is_selected_BT[row, tokens] = True if sequence.is_selected is None else sequence.is_selected
        sampler_BT[row, tokens] = sequence.sampler_logprobs
        staleness_BT[row, tokens] = 0 if sequence.staleness is None else sequence.staleness
    return LossInputs(
        sampler_BT=torch.from_numpy(sampler_BT),
        mask_BT=torch.from_numpy(mask_BT),
        advantages_B=_vector([sequence.advantage for sequence in sequences]),
        centred_rewards_B=_vector([sequence.centred_reward for sequence in sequences]),
        log_denominators_B=_vector([sequence.log_denominator for sequence in sequences]),
        log_expectations_B=_vector([sequence.log_expectation for sequence in sequences]),
        couplings_B=_vector([sequence.coupling for sequence in sequences]),
        staleness_BT=torch.from_numpy(staleness_BT),
        is_selected_BT=torch.from_numpy(is_selected_BT),
        reference_BT=_reference(sequences, longest),
        places_B2=torch.tensor([(sequence.group, sequence.row) for sequence in sequences]),
    )


def _reference(sequences: Sequence[TrainingSequence], longest: int) -> torch.Tensor | None:
    if any(sequence.reference_logprobs is None for sequence in sequences):
        return None
    reference_BT = np.zeros((len(sequences), longest), np.float64)
    for row, sequence in enumerate(sequences):
        reference_BT[row, : sequence.token_ids.size] = sequence.reference_logprobs
    return torch.from_numpy(reference_BT)


def _vector(values: Sequence[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)
