"""The ranks that share a micro-batch, and the two things that they say to each other."""

from __future__ import annotations

import torch
import torch.distributed as dist

from heterorl.common.errors import ConfigError
from heterorl.learner.backends.ranks.collectives import Collectives


class SliceGroup:
    """`size` consecutive ranks, of which this one is number `index`; all call the same methods in the same order.

    They are of one machine where its number of ranks is a multiple of `size`.
    """

    def __init__(self, ranks: Collectives, *, size: int) -> None:
        """Make the groups of all ranks; every rank calls.

        Raises:
            ConfigError: the ranks cannot be divided into groups of this size.
        """
        if ranks.world_size % size:
            raise ConfigError(
                "backend.sequence_parallel",
                f"{ranks.world_size} ranks cannot be divided into groups of {size}",
                action="start a multiple of it, or set another",
            )
        self.size = size
        self.index = ranks.rank % size
        self._group, _ = dist.new_subgroups(group_size=size)

    def exchange(self, parts: torch.Tensor) -> torch.Tensor:
        """Send `parts[i]` to rank i; returns what rank i sent, at i."""
        sent = parts.contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self._group)
        return received

    def gather(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's values, of one shape and type, by rank."""
        own = values.contiguous()
        everyone = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(everyone, own, group=self._group)
        return everyone
