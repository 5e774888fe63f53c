"""Sequences to ranks, and to micro-batches within a token budget, padded or packed.

Guarantees: every sequence is in one micro-batch of one rank, and a group's sequences on one rank. A strip's log-probs
do not depend on its neighbours. All ranks compute the same division and take the same number of passes, so collective
operations inside a pass meet. Advantages, denominators and averaging constants come from the whole step, so
gradients of shares only add up.

Padded: one strip a row, padding on the right, where causal attention cannot see it; no mask is needed. Packed: one row;
position ids start at 0 with each strip, from which transformers derives block-diagonal causal attention
(`model.check_forward` refuses models that do not).

Suffixes: R rows of S tokens for the model; B sequences of T drawn tokens for the loss; N drawn tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from heterorl.common.model.router_replay import RoutedTokens
from heterorl.learner.loss.objectives import LossInputs
from heterorl.learner.train.batch import TrainingSequence

Batching = Literal["padded", "packed"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """Sequences of one forward and backward pass.

    `sources_N` are flat positions (row * S + column) of the hidden states that predict the drawn tokens `targets_N`;
    both follow the mask of `loss_inputs` row by row. `places_B` [B, 2] are group and rollout of each sequence, on the
    CPU. `routed` are the recorded experts of the R * S tokens; None where no sequence has any.
    """

    input_ids_RS: torch.Tensor
    position_ids_RS: torch.Tensor
    sources_N: torch.Tensor
    targets_N: torch.Tensor
    loss_inputs: LossInputs
    places_B: torch.Tensor
    routed: RoutedTokens | None = None

    def to(self, device: torch.device) -> MicroBatch:
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

    A longer sequence has a list of its own.
    """
    # sorted() is stable, so equal lengths keep the order of their groups and the split is deterministic.
    ordered = sorted(sequences, key=lambda sequence: sequence.num_inputs, reverse=True)
    parts: list[list[TrainingSequence]] = []
    rows = width = 0
    for sequence in ordered:
        # In a padded list every row costs as much as the longest.
        wider = max(width, *(strip.num_inputs for strip in sequence.strips)) if batching == "padded" else 1
        added = len(sequence.strips) if batching == "padded" else sequence.num_inputs
        if parts and (rows + added) * wider <= max_tokens:
            parts[-1].append(sequence)
            rows, width = rows + added, wider
        else:
            parts.append([sequence])
            rows, width = added, max(strip.num_inputs for strip in sequence.strips)
    return parts


def collate(sequences: Sequence[TrainingSequence], *, batching: Batching) -> MicroBatch:
    """Lay sequences out as one micro-batch."""
    strips = [strip for sequence in sequences for strip in sequence.strips]
    records = [record for sequence in sequences for record in _records(sequence)]
    lengths = [strip.num_inputs for strip in strips]
    is_packed = batching == "packed"
    rows, width = (1, sum(lengths)) if is_packed else (len(strips), max(lengths))
    starts = np.cumsum([0, *lengths[:-1]]) if is_packed else np.arange(rows) * width
    input_ids = np.zeros(rows * width, np.int64)
    # Positions of padding continue: a jump would start a packed strip.
    position_ids = np.tile(np.arange(width), rows)
    sources: list[np.ndarray[tuple[int], np.dtype[np.int64]]] = []
    for strip, start, length in zip(strips, starts, lengths, strict=True):
        input_ids[start : start + length] = strip.token_ids[:-1]
        if is_packed:
            position_ids[start : start + length] = np.arange(length)
        # A token is predicted where the one before it is read.
        sources.append(start - 1 + np.flatnonzero(strip.is_drawn))
    targets = np.concatenate([strip.token_ids[strip.is_drawn] for strip in strips])
    return MicroBatch(
        input_ids_RS=torch.from_numpy(input_ids.reshape(rows, width)),
        position_ids_RS=torch.from_numpy(position_ids.reshape(rows, width)),
        sources_N=torch.from_numpy(np.concatenate(sources)),
        targets_N=torch.from_numpy(targets.astype(np.int64)),
        loss_inputs=_loss_inputs(sequences),
        places_B=torch.tensor([(sequence.group, sequence.number) for sequence in sequences]),
        routed=_routed(records, starts.tolist(), lengths, num_tokens=rows * width),
    )


def _records(sequence: TrainingSequence) -> list[bytes]:
    """The recorded experts of each strip; a rollout of several turns has none."""
    assert len(sequence.strips) == 1 or not sequence.routed_experts
    return [sequence.routed_experts] * len(sequence.strips)


def _routed(
    records: Sequence[bytes], starts: Sequence[int], lengths: Sequence[int], *, num_tokens: int
) -> RoutedTokens | None:
    """The recorded experts of a micro-batch, at the places of its tokens."""
    sizes = {len(record) // length for record, length in zip(records, lengths, strict=True) if record}
    if not sizes:
        return None
    # `limits` has checked that all records have one size.
    assert len(sizes) == 1, "records of several models"
    ids_NC = np.zeros((num_tokens, sizes.pop()), np.uint8)
    is_recorded_N = np.zeros(num_tokens, np.bool_)
    for record, start, length in zip(records, starts, lengths, strict=True):
        if record:
            ids_NC[start : start + length] = np.frombuffer(record, np.uint8).reshape(length, -1)
            is_recorded_N[start : start + length] = True
    return RoutedTokens(ids_NC=torch.from_numpy(ids_NC), is_recorded_N=torch.from_numpy(is_recorded_N))


def _loss_inputs(sequences: Sequence[TrainingSequence]) -> LossInputs:
    longest = max(sequence.num_drawn for sequence in sequences)
    mask_BT = np.zeros((len(sequences), longest), np.bool_)
    is_selected_BT = np.zeros((len(sequences), longest), np.bool_)
    sampler_BT = np.zeros((len(sequences), longest), np.float64)
    staleness_BT = np.zeros((len(sequences), longest), np.float64)
    for row, sequence in enumerate(sequences):
        tokens = slice(sequence.num_drawn)
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
        reference_BT[row, : sequence.num_drawn] = sequence.reference_logprobs
    return torch.from_numpy(reference_BT)


def _vector(values: Sequence[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shares:
    """The micro-batches of each rank, `parts[rank][number]`."""

    parts: tuple[tuple[list[TrainingSequence], ...], ...]

    @property
    def num_passes(self) -> int:
        """Passes of every rank; a rank without micro-batches left takes empty ones."""
        return max((len(parts) for parts in self.parts), default=0)

    def ordered(self) -> list[TrainingSequence]:
        """All sequences: rank after rank, micro-batch after micro-batch."""
        return [sequence for parts in self.parts for part in parts for sequence in part]

    def replaced(self, sequences: Sequence[TrainingSequence]) -> Shares:
        """The same shares of other sequences, given in the order of `ordered`."""
        remaining = iter(sequences)
        return Shares(parts=tuple(tuple([next(remaining) for _ in part] for part in parts) for parts in self.parts))


def assign_groups(costs: Sequence[int], num_ranks: int) -> list[int]:
    """The rank of each group: the largest first, each to the rank with the least so far.

    No rank gets more than 4/3 of the best possible maximum (Graham 1969, theorem 2). Ties go to the earlier group and
    the lower rank, so every rank computes the same.
    """
    assert num_ranks >= 1
    loads = [0] * num_ranks
    ranks = [0] * len(costs)
    for position in sorted(range(len(costs)), key=lambda position: (-costs[position], position)):
        rank = min(range(num_ranks), key=lambda rank: (loads[rank], rank))
        ranks[position] = rank
        loads[rank] += costs[position]
    return ranks


def share_out(sequences: Sequence[TrainingSequence], *, num_ranks: int, max_tokens: int, batching: Batching) -> Shares:
    """Assign whole groups to ranks by tokens, and split each rank's sequences into micro-batches."""
    costs: dict[int, int] = {}
    for sequence in sequences:
        costs[sequence.group] = costs.get(sequence.group, 0) + sequence.num_inputs
    groups = sorted(costs)
    rank_of = dict(zip(groups, assign_groups([costs[group] for group in groups], num_ranks), strict=True))
    return Shares(
        parts=tuple(
            tuple(
                split(
                    [sequence for sequence in sequences if rank_of[sequence.group] == rank],
                    max_tokens=max_tokens,
                    batching=batching,
                )
            )
            for rank in range(num_ranks)
        )
    )


def empty_pass() -> TrainingSequence:
    """The input of a rank without work, which joins the others' collective operations; its loss is multiplied by 0."""
    return TrainingSequence.scored(np.zeros(1, np.int32), np.zeros(1, np.int32))
