"""An engine whose passes are shared: each rank of a group computes a slice of the positions, all get the whole result.

Embeddings, norms, gated layers, the output embedding and the log-probs see this rank's columns alone; attention crosses
slices (`attention`). Log-probs and entropies of all completion tokens are then on every rank of the group, which
computes the same loss of them.

Guarantees: the gradients that the ranks of a group add up to are those of the whole micro-batch, so an engine that
averages over all ranks needs the same factor as without slices.
"""

from __future__ import annotations

import torch
from torch import nn

from heterorl.common.errors import ConfigError
from heterorl.learner.backends.ranks.collectives import Collectives
from heterorl.learner.backends.ranks.passes import PassEngine
from heterorl.learner.backends.slices.attention import KEY, SlicedAttention, check_model, install
from heterorl.learner.backends.slices.exchange import whole_of_parts
from heterorl.learner.backends.slices.group import SliceGroup
from heterorl.learner.backends.slices.layout import cut
from heterorl.learner.train.micro_batch import Batching
from heterorl.learner.train.model import CHECK_TOLERANCE, check_micro_batch

_LOW_TOLERANCE = 0.1
"""Of log-probs where products are bf16, which keeps 8 bits."""


class SlicedEngine:
    """A PassEngine of slices over one of whole rows; all ranks of a group are called with the same micro-batch."""

    def __init__(self, inner: PassEngine, attention: SlicedAttention, group: SliceGroup) -> None:
        """Share the passes of `inner`, whose model attends by `attention`."""
        self._inner = inner
        self._attention = attention
        self._group = group

    def __call__(
        self,
        input_ids_RS: torch.Tensor,
        position_ids_RS: torch.Tensor,
        sources_N: torch.Tensor,
        targets_N: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See PassEngine."""
        group = self._group
        own = cut(input_ids_RS, position_ids_RS, sources_N, targets_N, size=group.size, index=group.index)
        self._attention.segments = own.segments
        logprobs_n, entropies_n = self._inner(own.input_ids_RC, own.position_ids_RC, own.sources_n, own.targets_n)
        logprobs_N = whole_of_parts(logprobs_n, own.places, group)
        with torch.no_grad():
            entropies_N = whole_of_parts(entropies_n, own.places, group)
        return logprobs_N, entropies_N

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """See PassEngine."""
        self._inner.set_gradient_accumulation_boundary(is_boundary)

    def backward(self, loss: torch.Tensor) -> None:
        """See PassEngine."""
        self._inner.backward(loss)


def slice_passes(
    inner: PassEngine,
    model: nn.Module,
    *,
    size: int,
    ranks: Collectives,
    batching: Batching,
    is_low: bool,
    device: torch.device,
) -> SlicedEngine:
    """Make groups of ranks share their passes, and see that the log-probs of three short sequences stay.

    Args:
        inner: takes whole rows.
        model: within it; its attention function is exchanged.
        size: ranks of a group.
        ranks: all of them; all call.
        batching: as micro-batches will be laid out.
        is_low: whether products are bf16.
        device: of this rank's passes.

    Raises:
        ConfigError: on all ranks: the ranks, the heads or the positions do not allow it, or what the model says of a
            token depends on its neighbours by another way than attention.
    """
    check_model(model, size=size)
    group = SliceGroup(ranks, size=size)
    attention = SlicedAttention(group)
    engine = SlicedEngine(inner, attention, group)
    batch = check_micro_batch(model, batching=batching).to(device)
    tensors = (batch.input_ids_RS, batch.position_ids_RS, batch.sources_N, batch.targets_N)
    with torch.no_grad():
        whole_N, _ = inner(*tensors)
        install(model, attention)
        sliced_N, _ = engine(*tensors)
    difference = float((whole_N - sliced_N).abs().max())
    is_fine = difference <= (_LOW_TOLERANCE if is_low else CHECK_TOLERANCE)
    if not ranks.all_agree(is_fine):
        problem = f"log-probs over slices differ from those of whole rows by {difference:.2g}"
        raise ConfigError(KEY, problem, action="set it to 1: the model mixes positions outside of its attention")
    return engine
