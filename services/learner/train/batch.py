"""A step's sequences: advantages of whole groups, shares of ranks, micro-batches.

Guarantees: advantages and log denominators are computed once, in float64, over each whole group and before any split. A
rollout without drawn tokens is not a member.

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

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from heterorl.common.model.router_replay import RoutedTokens
from heterorl.common.types.common import Float32Array, Int32Array
from heterorl.common.types.rollout import Group, Rollout, Strip, drawn_turns, strips_of
from heterorl.learner.loss.custom import LossBatch
from heterorl.learner.loss.group import beta_weights, group_advantages, group_log_denominator, log_denominators
from heterorl.learner.loss.loss_config import LossConfig
from heterorl.learner.loss.loss_spec import LossSpec, loss_spec_of
from heterorl.learner.loss.objectives import LossInputs


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainingSequence:
    """One rollout for the loss: the model's inputs, its group's numbers.

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
    turns: Int32Array | None = None
    """The turn that drew each token; None is 0 for all."""
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
    """Give every trainable rollout its advantage and log denominator.

    Both are over the trainable rollouts of its group. Staleness counts from `head_version`, the version of the
    learner's weights. Raises ValueError if a prompt has no token, a rollout has not one log-prob for each drawn token,
    or a reward is outside the range of the advantage.
    """
    spec = loss_spec_of(loss)
    kept = {number: group for number, group in enumerate(groups) if not spec.drop_uniform_groups or has_signal(group)}
    scales = _prompt_scales(kept.values()) if spec.advantage == "beta" else [1.0] * len(kept)
    sequences = [
        sequence
        for (number, group), scale in zip(kept.items(), scales, strict=True)
        for sequence in _sequences(group, spec, number=number, scale=scale, head_version=head_version)
    ]
    return Batch(sequences=tuple(replace(sequence, row=row) for row, sequence in enumerate(sequences)))


def _prompt_scales(groups: Collection[Group]) -> list[float]:
    """BNPO's weight of each group.
    Groups of one prompt are pooled, so that a prompt counts once in the moments."""
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
            turns=drawn_turns(rollout) if spec.custom is not None else None,
            routed_experts=_record(group, rollout, own),
        )
        for (place, rollout), own, advantage, centred_reward, log_denominator in zip(
            members, strips, advantages_G, centred_G, log_denominators_G, strict=True
        )
    ]


def _record(group: Group, rollout: Rollout, strips: Sequence[Strip]) -> bytes:
    """The recorded experts of the tokens that the model reads.

    It does not read a stale end.
    """
    num_recorded = group.prompt_token_ids.size + rollout.token_ids.size - 1
    return rollout.routed_experts[: len(rollout.routed_experts) // num_recorded * strips[0].num_inputs]


def _staleness(rollout: Rollout, head_version: int) -> Int32Array:
    drawn = [span for span in rollout.spans if span.is_drawn]
    ages = [max(head_version - span.version, 0) for span in drawn]
    return np.repeat(np.array(ages, np.int32), [span.end - span.start for span in drawn])


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
    """Cut sequences into lists of at most `max_tokens` model inputs.

    Padding counts; the longest come first. A longer sequence has a list of its own.
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
    """The recorded experts of each strip; none with several turns."""
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
    counts = [sequence.num_drawn for sequence in sequences]
    has_reference = all(sequence.reference_logprobs is not None for sequence in sequences)
    has_turns = all(sequence.turns is not None for sequence in sequences)
    return LossInputs(
        sampler_BT=_rows(sequences, "sampler_logprobs", torch.float64),
        mask_BT=torch.arange(max(counts)) < torch.tensor(counts)[:, None],
        advantages_B=_vector([sequence.advantage for sequence in sequences]),
        centred_rewards_B=_vector([sequence.centred_reward for sequence in sequences]),
        log_denominators_B=_vector([sequence.log_denominator for sequence in sequences]),
        log_expectations_B=_vector([sequence.log_expectation for sequence in sequences]),
        couplings_B=_vector([sequence.coupling for sequence in sequences]),
        staleness_BT=_rows(sequences, "staleness", torch.float64),
        is_selected_BT=_rows(sequences, "is_selected", torch.bool, absent=1),
        reference_BT=_rows(sequences, "reference_logprobs", torch.float64) if has_reference else None,
        turns_BT=_rows(sequences, "turns", torch.int64) if has_turns else None,
        places_B2=torch.tensor([(sequence.group, sequence.row) for sequence in sequences]),
    )


def _rows(sequences: Sequence[TrainingSequence], name: str, dtype: torch.dtype, *, absent: int = 0) -> torch.Tensor:
    """Drawn tokens' numbers as [B, T], 0 in padding.
    A sequence without them has `absent`."""
    rows = [(sequence.num_drawn, getattr(sequence, name)) for sequence in sequences]
    return pad_sequence(
        [
            torch.full((size,), absent, dtype=dtype) if row is None else torch.tensor(row, dtype=dtype)
            for size, row in rows
        ],
        batch_first=True,
    )


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
    """The rank of each group: largest first, to the least loaded.

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
    """Assign whole groups to ranks by tokens, and cut micro-batches."""
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
    """The input of a rank without work; its loss counts 0.
    With it the rank joins the others' collective operations."""
    return TrainingSequence.scored(np.zeros(1, np.int32), np.zeros(1, np.int32))


def has_signal(group: Group) -> bool:
    """Whether the group's rewards differ."""
    return len({rollout.reward for rollout in group.trainable}) > 1
