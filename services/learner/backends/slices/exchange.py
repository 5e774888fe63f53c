"""Positions for heads and back, and the values of all slices: what crosses ranks in a pass, with gradients.

    all heads of own columns  [R, H, C, D]   <->   all columns of own heads  [R, H/P, P C, D]

An exchange of equal parts is its own transpose: its gradient is the exchange of the gradients.

Suffixes: R rows, H heads, C columns of one slice, S = P C columns of all, D width of a head, P slices; N completion
tokens of the micro-batch, n of this slice.

Source: Jacobs et al. 2023, DeepSpeed Ulysses, arXiv:2309.14509, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from heterorl.learner.backends.slices.group import SliceGroup


def heads_for_columns(values_RHCD: torch.Tensor, group: SliceGroup) -> torch.Tensor:
    """Give the other ranks their heads of this slice's columns; returns all columns of this rank's heads."""
    parts_PRHCD = values_RHCD.unflatten(1, (group.size, -1)).movedim(1, 0)
    return _exchanged(parts_PRHCD, group).movedim(0, 2).flatten(2, 3)


def columns_for_heads(values_RHSD: torch.Tensor, group: SliceGroup) -> torch.Tensor:
    """Give the other ranks their columns of this rank's heads; returns all heads of this slice's columns."""
    parts_PRHCD = values_RHSD.unflatten(2, (group.size, -1)).movedim(2, 0)
    return _exchanged(parts_PRHCD, group).movedim(0, 1).flatten(1, 2)


def whole_of_parts(own_n: torch.Tensor, places: Sequence[torch.Tensor], group: SliceGroup) -> torch.Tensor:
    """The values [N] of all slices, on every rank of the group.

    Every rank goes on to compute the same of them, so each value's gradient goes to the rank it came from as it is.

    Args:
        own_n: this slice's.
        places: of each slice, where its values are among the N.
        group: who shares the micro-batch.
    """
    whole_N: torch.Tensor = _Whole.apply(own_n, places, group)  # type: ignore[no-untyped-call]
    return whole_N


def _exchanged(parts: torch.Tensor, group: SliceGroup) -> torch.Tensor:
    received: torch.Tensor = _Exchange.apply(parts, group)  # type: ignore[no-untyped-call]
    return received


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor, group: SliceGroup) -> torch.Tensor:
        ctx.group = group
        return group.exchange(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.group.exchange(gradients[0]), None


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own_n: torch.Tensor, places: Sequence[torch.Tensor], group: SliceGroup) -> torch.Tensor:
        ctx.save_for_backward(places[group.index])
        # Of one length, because no two slices have as many completion tokens.
        own = own_n.new_zeros(max(place.numel() for place in places))
        own[: own_n.numel()] = own_n
        whole_N = own_n.new_empty(sum(place.numel() for place in places))
        for place, part in zip(places, group.gather(own), strict=True):
            whole_N[place] = part[: place.numel()]
        return whole_N

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (own,) = ctx.saved_tensors
        return gradients[0].index_select(0, own), None, None
