"""Which rank trains on which groups: whole groups, the same answer on every rank.

Guarantees: every sequence is on exactly one rank, a group's sequences all on one; all ranks take the same number of
passes, so that collective operations inside a pass meet. Nothing here changes the loss: advantages, denominators and
the averaging constants are those of the whole step before anything is split, so gradients of shares only add up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from heterorl.learner.train.batch import TrainingSequence
from heterorl.learner.train.micro_batch import Batching, split


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shares:
    """The micro-batches of each rank: `parts[rank][number]`; the rank with most of them sets `num_passes`."""

    parts: tuple[tuple[list[TrainingSequence], ...], ...]

    @property
    def num_passes(self) -> int:
        """Forward and backward passes of every rank; one that has run out of micro-batches takes empty ones."""
        return max((len(parts) for parts in self.parts), default=0)

    def ordered(self) -> list[TrainingSequence]:
        """All sequences: rank after rank, micro-batch after micro-batch."""
        return [sequence for parts in self.parts for part in parts for sequence in part]

    def replaced(self, sequences: Sequence[TrainingSequence]) -> Shares:
        """The same shares of other sequences, given in the order of `ordered`."""
        remaining = iter(sequences)
        return Shares(
            parts=tuple(tuple([next(remaining) for _ in part] for part in parts) for parts in self.parts),
        )


def assign_groups(costs: Sequence[int], num_ranks: int) -> list[int]:
    """The rank of each group: the dearest first, each to the rank that has least so far.

    No rank gets more than 4/3 of the best possible maximum (Graham 1969, theorem 2). Ties go to the earlier group and
    the lower rank, so that every rank computes the same.

    Args:
        costs: tokens of each group.
        num_ranks: at least 1.
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
    """Whole groups to ranks by tokens, then each rank's sequences into micro-batches.

    Args:
        sequences: of the whole step.
        num_ranks: at least 1.
        max_tokens: budget of one pass, padding included.
        batching: padded or packed.
    """
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
    """What a rank without work reads, so that the others' collective operations meet; its loss is multiplied by 0."""
    return TrainingSequence.scored(np.zeros(1, np.int32), np.zeros(1, np.int32))
