"""Sequence parallelism (Ulysses): ranks compute slices of one micro-batch's positions.

Embeddings, norms, gated layers, output embedding and log-probs see this rank's columns only. Attention crosses slices,
under a name of its own in transformers' table of attention functions. A rank exchanges its columns of all heads for all
columns of its own heads, attends, and gets its columns back:

    all heads of own columns  [R, H, C, D]   <->   all columns of own heads  [R, H/P, P C, D]

An exchange of equal parts is its own transpose: its gradient is the exchange of the gradients. transformers makes no
mask for a name that it does not know; causality is decided here, sequence by sequence, so an S x S mask is held for a
window only. Slices are consecutive columns of one width; rows are padded on the right, where causal attention cannot
see it. All ranks of the group then have all log-probs and entropies, and compute the same loss.

Guarantees: the gradients of a group's ranks add up to the whole micro-batch's, so an engine that averages over
all ranks needs the same factor as without slices.

Suffixes: R rows, H heads, K heads of keys and values, C columns of one slice, S = P C columns of all, D width of a
head, P slices; N completion tokens of the micro-batch, n of this slice.

Source: Jacobs et al. 2023, DeepSpeed Ulysses, arXiv:2309.14509, section 3.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from heterorl.common.errors import ConfigError
from heterorl.common.model.model_directory import first_line
from heterorl.learner.backends.ranks.collectives import Collectives
from heterorl.learner.backends.ranks.passes import PassEngine
from heterorl.learner.train.batch import Batching
from heterorl.learner.train.model import CHECK_TOLERANCE, check_micro_batch

KEY = "backend.sequence_parallel"
NAME = "heterorl_slices"
"""Prefix of the attention function's name; each model of a process has its own number."""
_ACTION = "set it to 1, or train another model"
# Other arguments of attention functions that change the result.
_UNKNOWN = ("position_bias", "softcap", "s_aux")
_NUMBERS = itertools.count()
_LOW_TOLERANCE = 0.25
"""Tolerance of log-probs' mean where products are bf16: one unit of a logit of 32 to 64."""


class SliceGroup:
    """`size` consecutive ranks, of which this one is number `index`.

    All call the same methods in the same order. They are on one machine where its number of ranks is a multiple of
    `size`.
    """

    def __init__(self, ranks: Collectives, *, size: int) -> None:
        """Make the groups of all ranks; every rank calls."""
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


def heads_for_columns(values_RHCD: torch.Tensor, group: SliceGroup) -> torch.Tensor:
    """Exchange own columns of all heads for all columns of own heads."""
    parts_PRHCD = values_RHCD.unflatten(1, (group.size, -1)).movedim(1, 0)
    return _exchanged(parts_PRHCD, group).movedim(0, 2).flatten(2, 3)


def columns_for_heads(values_RHSD: torch.Tensor, group: SliceGroup) -> torch.Tensor:
    """Exchange all columns of own heads for own columns of all heads."""
    parts_PRHCD = values_RHSD.unflatten(2, (group.size, -1)).movedim(2, 0)
    return _exchanged(parts_PRHCD, group).movedim(0, 1).flatten(1, 2)


def whole_of_parts(own_n: torch.Tensor, places: Sequence[torch.Tensor], group: SliceGroup) -> torch.Tensor:
    """The values [N] of all slices, on every rank of the group.

    `places` are each slice's positions among the N. Every rank computes the same from the values, so each value's
    gradient returns unchanged to the rank it came from.
    """
    # Padded to one length: slices differ in completion tokens.
    own = own_n.new_zeros(max(place.numel() for place in places))
    own[: own_n.numel()] = own_n.detach()
    whole_N = own_n.new_empty(sum(place.numel() for place in places))
    for place, part in zip(places, group.gather(own), strict=True):
        whole_N[place] = part[: place.numel()]
    # The same values, for their gradient.
    return whole_N.index_copy(0, places[group.index], own_n)


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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Slice:
    """One rank's part of a micro-batch."""

    input_ids_RC: torch.Tensor
    position_ids_RC: torch.Tensor
    """Positions in the sequence, not in the slice."""
    sources_n: torch.Tensor
    """Flat positions in the slice."""
    targets_n: torch.Tensor
    places: tuple[torch.Tensor, ...]
    """Positions of every slice among the N completion tokens."""
    segments: tuple[tuple[int, int], ...]
    """First column and end of each packed sequence, over all slices; attention does not cross them."""


def cut(
    input_ids_RS: torch.Tensor,
    position_ids_RS: torch.Tensor,
    sources_N: torch.Tensor,
    targets_N: torch.Tensor,
    *,
    size: int,
    index: int,
) -> Slice:
    """Slice `index` of `size`; the arguments are a micro-batch's."""
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


class SlicedAttention:
    """An attention function as transformers calls it."""

    def __init__(self, group: SliceGroup) -> None:
        self._group = group
        self.segments: tuple[tuple[int, int], ...] = ()
        """Segments of the current micro-batch, forward and backward; see Slice. Set before each pass."""

    def __call__(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        scaling: float | None = None,
        sliding_window: int | None = None,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attend from this slice's columns.
        Queries [R, H, C, D], keys and values [R, K, C, D] -> [R, C, H, D]."""
        is_causal = options.get("is_causal")
        is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if attention_mask is not None or not is_causal or any(options.get(name) is not None for name in _UNKNOWN):
            raise ConfigError(KEY, f"{type(module).__name__} is not plain causal attention", action=_ACTION)
        check_heads(query.shape[1], key.shape[1], size=self._group.size)
        whole = heads_for_columns(query, self._group)
        keys, values = (heads_for_columns(self._for_each(states), self._group) for states in (key, value))
        parts = [
            _attend(
                *(states[:, :, start:end] for states in (whole, keys, values)), scaling=scaling, window=sliding_window
            )
            for start, end in self.segments
        ]
        own_RHCD = columns_for_heads(torch.cat(parts, dim=2), self._group)
        return own_RHCD.transpose(1, 2).contiguous(), None

    def _for_each(self, states_RKCD: torch.Tensor) -> torch.Tensor:
        """Give each rank at least one head; gradients of copies add up."""
        copies = self._group.size // states_RKCD.shape[1]
        return states_RKCD.repeat_interleave(copies, dim=1) if copies > 1 else states_RKCD


def install(model: nn.Module, attention: SlicedAttention) -> None:
    """Let a model attend over slices from its next pass on."""
    from transformers import AttentionInterface

    network: Any = model
    if network.config._attn_implementation != "sdpa":
        problem = f"attention over slices is by torch's fused kernels, not {network.config._attn_implementation}"
        raise ConfigError(KEY, problem, action="leave the choice of attention at sdpa, or set it to 1")
    name = f"{NAME}_{next(_NUMBERS)}"
    AttentionInterface.register(name, attention)
    network.set_attn_implementation(name)
    if network.config._attn_implementation != name:
        problem = f"{type(model).__name__} does not call transformers' attention interface"
        raise ConfigError(KEY, problem, action=_ACTION)


def check_model(model: nn.Module, *, size: int) -> None:
    """Refuse a model with indivisible heads, or attention in chunks."""
    network: Any = model
    config = network.config.get_text_config()
    heads = config.num_attention_heads
    check_heads(heads, getattr(config, "num_key_value_heads", None) or heads, size=size)
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        raise ConfigError(KEY, "attention in chunks does not go over slices", action=_ACTION)


def check_heads(num_heads: int, num_key_value_heads: int, *, size: int) -> None:
    """Refuse heads that cannot be divided among the ranks of a group."""
    if num_heads % size:
        problem = f"{num_heads} attention heads cannot be divided among {size} ranks"
        raise ConfigError(KEY, problem, action=f"set a divisor of {num_heads}")
    if num_key_value_heads % size and size % num_key_value_heads:
        problem = f"{num_key_value_heads} heads of keys and values are neither a multiple nor a divisor of {size}"
        raise ConfigError(KEY, problem, action=f"set a divisor or a multiple of {num_key_value_heads}")


def _attend(
    query_RHSD: torch.Tensor,
    key_RKSD: torch.Tensor,
    value_RKSD: torch.Tensor,
    *,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    length = query_RHSD.shape[2]
    mask_SS: torch.Tensor | None = None
    if window is not None and window < length:
        columns_S = torch.arange(length, device=query_RHSD.device)
        distances_SS = columns_S[:, None] - columns_S
        mask_SS = (distances_SS >= 0) & (distances_SS < window)
        # With a mask and shared heads torch has no fused kernel.
        copies = query_RHSD.shape[1] // key_RKSD.shape[1]
        key_RKSD, value_RKSD = (states.repeat_interleave(copies, dim=1) for states in (key_RKSD, value_RKSD))
    return functional.scaled_dot_product_attention(
        query_RHSD,
        key_RKSD,
        value_RKSD,
        attn_mask=mask_SS,
        is_causal=mask_SS is None,
        scale=scaling,
        enable_gqa=query_RHSD.shape[1] != key_RKSD.shape[1],
    )


class SlicedEngine:
    """A PassEngine of slices over one of whole rows.
    All ranks of a group get the same micro-batch."""

    def __init__(self, inner: PassEngine, attention: SlicedAttention, group: SliceGroup) -> None:
        self._inner = inner
        self._attention = attention
        self._group = group

    def __call__(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        group = self._group
        own = cut(*inputs, size=group.size, index=group.index)
        self._attention.segments = own.segments
        logprobs_n, entropies_n = self._inner(own.input_ids_RC, own.position_ids_RC, own.sources_n, own.targets_n)
        logprobs_N = whole_of_parts(logprobs_n, own.places, group)
        with torch.no_grad():
            entropies_N = whole_of_parts(entropies_n, own.places, group)
        return logprobs_N, entropies_N

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        self._inner.set_gradient_accumulation_boundary(is_boundary)

    def backward(self, loss: torch.Tensor) -> None:
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
    """Make groups of ranks share their passes.

    A check demands that the log-probs of three short sequences stay. All ranks call. `inner` takes whole rows; the
    attention function of its model is exchanged.

    Raises ConfigError: on all ranks: ranks, heads, positions or attention do not allow it, or the model mixes positions
    outside of its attention.
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
        try:
            sliced_N, _ = engine(*tensors)
        except (AttributeError, TypeError) as error:
            # As where attention reads the mask itself, which is None on all ranks.
            problem = f"{type(model).__name__} fails over slices: {type(error).__name__}: {first_line(error)}"
            raise ConfigError(KEY, problem, action=_ACTION) from error
    differences_N = (whole_N - sliced_N).abs()
    # One token may be off by some units of a large logit; a model that mixes positions is off by nats.
    difference = float(differences_N.mean() if is_low else differences_N.max())
    is_fine = difference <= (_LOW_TOLERANCE if is_low else CHECK_TOLERANCE)
    if not ranks.all_agree(is_fine):
        problem = f"log-probs over slices differ from log-probs of whole rows by {difference:.2g}"
        raise ConfigError(KEY, problem, action="set it to 1: the model mixes positions outside of its attention")
    return engine
