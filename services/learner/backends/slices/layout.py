"""Which columns and which completion tokens of a micro-batch are a rank's.

Slices are of consecutive columns and one width; rows are padded on the right, where causal attention cannot see it.

Suffixes: R rows of S columns, C of one slice; N completion tokens, n of this slice.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch.nn import functional


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Slice:
    """One rank's part of a micro-batch, with what it needs to know of the whole."""

    input_ids_RC: torch.Tensor
    position_ids_RC: torch.Tensor
    """In the sequence, not in the slice."""
    sources_n: torch.Tensor
    """Flat positions in the slice."""
    targets_n: torch.Tensor
    places: tuple[torch.Tensor, ...]
    """Of every slice: which of the N completion tokens are its."""
    segments: tuple[tuple[int, int], ...]
    """First column and the end of each packed sequence, over all slices; attention does not cross them."""


def cut(
    input_ids_RS: torch.Tensor,
    position_ids_RS: torch.Tensor,
    sources_N: torch.Tensor,
    targets_N: torch.Tensor,
    *,
    size: int,
    index: int,
) -> Slice:
    """Slice `index` of `size`; the arguments are those of a micro-batch."""
    width = input_ids_RS.shape[1]
    own_width = -(-width // size)
    columns = slice(index * own_width, (index + 1) * own_width)
    pad = [0, own_width * size - width]
    rows_N, columns_N = sources_N // width, sources_N % width
    owners_N = columns_N // own_width
    places = tuple((owners_N == number).nonzero()[:, 0] for number in range(size))
    own = places[index]
    return Slice(
        input_ids_RC=functional.pad(input_ids_RS, pad)[:, columns],
        position_ids_RC=functional.pad(position_ids_RS, pad)[:, columns],
        sources_n=rows_N[own] * own_width + columns_N[own] % own_width,
        targets_n=targets_N[own],
        places=places,
        segments=_segments(position_ids_RS, end=own_width * size),
    )


def _segments(position_ids_RS: torch.Tensor, *, end: int) -> tuple[tuple[int, int], ...]:
    if position_ids_RS.shape[0] > 1:
        # Several rows are padded: each is one sequence.
        return ((0, end),)
    starts = (position_ids_RS[0, 1:] != position_ids_RS[0, :-1] + 1).nonzero()[:, 0] + 1
    borders = [0, *starts.tolist(), end]
    return tuple(itertools.pairwise(borders))
