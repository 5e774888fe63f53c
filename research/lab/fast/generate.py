"""Completions of many runs at once: a pass over the prompts, then one for each token, with a key-value cache.

Rollouts of a prompt that have the same prefix so far are one row (see `layout`). Tokens are drawn as the engine of the
services draws them, from the same noise; what a run draws depends on its own weights, prompts and noise alone.
Suffixes as in `layout`; V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from heterorl.common.model.logprobs import draw
from heterorl.common.types.common import SamplingSemantics
from heterorl_research.lab.fast.forward import Folded
from heterorl_research.lab.fast.functions import gather, heads_of, side_by_side
from heterorl_research.lab.fast.layout import Bools, Ints, Sizes, extend, prefix_rows, unshared

_CHECK_EVERY = 64
"""Tokens between two looks at whether a rollout is still open: each look waits for the device."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Drawn:
    """Completions, padded with 0: token ids, log-probs (float32) and prefixes [R, G, M, T], lengths [R, G, M].

    `first_RGMT` is the lowest member of the group with the same prefix, or the member itself where nothing is shared.
    """

    tokens_RGMT: Ints
    logprobs_RGMT: np.ndarray[tuple[int, ...], np.dtype[np.float32]]
    lengths_RGM: Ints
    first_RGMT: Ints


@torch.no_grad()
def generate(
    folded: Folded,
    sizes: Sizes,
    prompts_RGP: Ints,
    noise_RGMTV: Tensor,
    mask_SS: Tensor,
    *,
    sampling: SamplingSemantics,
    eos_token_id: int,
    is_sharing: bool,
) -> Drawn:
    """Draw M completions of every prompt.

    Args:
        folded: weights of the runs, one after another.
        sizes: of the batch.
        prompts_RGP: token ids.
        noise_RGMTV: standard Gumbel noise, on the device of the weights.
        mask_SS: of the slots, 0 or -inf.
        sampling: how tokens are drawn.
        eos_token_id: ends a completion.
        is_sharing: whether equal prefixes are one row.
    """
    passes = _Passes(folded, sizes, prompts_RGP, mask_SS)
    shape = (len(prompts_RGP), sizes.num_prompts, sizes.group_size)
    logits = passes.read_prompts(is_sharing=is_sharing).repeat_interleave(sizes.group_size, 0)
    if not is_sharing:
        return _apart(passes, logits, sizes, shape, noise_RGMTV, sampling=sampling, eos_token_id=eos_token_id)
    tokens = np.zeros((*shape, sizes.max_new_tokens), np.int64)
    logprobs = np.zeros(tokens.shape, np.float32)
    first = np.zeros(tokens.shape, np.int64)
    lengths = np.zeros(shape, np.int64)
    is_open = np.ones(shape, bool)
    parents: Ints = np.zeros(shape, np.int64)
    for position in range(sizes.max_new_tokens):
        drawn, logs = draw(logits, noise_RGMTV[..., position, :].reshape(-1, sizes.vocab_size), sampling)
        tokens[..., position] = np.where(is_open, drawn.cpu().numpy().reshape(shape), 0)
        logprobs[..., position] = np.where(is_open, logs.cpu().numpy().reshape(shape), 0.0)
        lengths += is_open
        parents = extend(parents, tokens[..., position], sizes.vocab_size)
        first[..., position] = parents
        is_open = is_open & (tokens[..., position] != eos_token_id)
        is_last = position == sizes.max_new_tokens - 1
        if is_last or not is_open.any():
            first[..., position:] = parents[..., None]
            break
        logits = passes.read(tokens[..., position], position, is_open, parents)
    return Drawn(tokens_RGMT=tokens, logprobs_RGMT=logprobs, lengths_RGM=lengths, first_RGMT=first)


def _apart(
    passes: _Passes,
    logits: Tensor,
    sizes: Sizes,
    shape: tuple[int, int, int],
    noise_RGMTV: Tensor,
    *,
    sampling: SamplingSemantics,
    eos_token_id: int,
) -> Drawn:
    """The same with a row for every rollout; tokens stay on the device, which never waits for the host."""
    noise_TNV = noise_RGMTV.flatten(0, 2).transpose(0, 1)
    is_open = torch.ones(len(logits), dtype=torch.bool, device=logits.device)
    drawn: list[tuple[Tensor, Tensor, Tensor]] = []
    for position in range(sizes.max_new_tokens):
        tokens, logprobs = draw(logits, noise_TNV[position], sampling)
        tokens = torch.where(is_open, tokens, 0)
        drawn.append((tokens, torch.where(is_open, logprobs, 0.0), is_open))
        is_open = is_open & (tokens != eos_token_id)
        if position == sizes.max_new_tokens - 1 or (position % _CHECK_EVERY == 0 and not is_open.any()):
            break
        logits = passes.read_apart(tokens, position)
    columns = [torch.stack(some, -1) for some in zip(*drawn, strict=True)]
    num_more = sizes.max_new_tokens - len(drawn)
    tokens_NT, logprobs_NT, is_token_NT = (torch.nn.functional.pad(column, (0, num_more)).cpu() for column in columns)
    return Drawn(
        tokens_RGMT=tokens_NT.view(*shape, -1).numpy(),
        logprobs_RGMT=logprobs_NT.view(*shape, -1).numpy(),
        lengths_RGM=is_token_NT.sum(-1).view(shape).numpy(),
        first_RGMT=unshared((*shape, sizes.max_new_tokens)),
    )


class _Passes:
    """The forward passes of one generation, and what they keep."""

    def __init__(self, folded: Folded, sizes: Sizes, prompts_RGP: Ints, mask_SS: Tensor) -> None:
        self._folded, self._sizes, self._mask = folded, sizes, mask_SS
        self._prompts = prompts_RGP
        self._run = np.arange(len(prompts_RGP))[:, None, None]
        of_row = np.arange(len(prompts_RGP)).repeat(sizes.num_prompts * sizes.group_size)
        self._of_row = self._on_device(of_row)
        shape = folded.shape
        num = len(prompts_RGP) * sizes.num_prompts * sizes.num_bundles * shape.num_heads
        self._caches = [mask_SS.new_empty(2, num, sizes.num_slots, shape.head_dim) for _ in folded.layers]

    def read_prompts(self, *, is_sharing: bool) -> Tensor:
        """Logits [R x G, V] after each prompt; a prefix that prompts of a run share is one row."""
        folded, sizes, heads = self._folded, self._sizes, self._folded.shape.num_heads
        length, num = sizes.prompt_length, sizes.num_prompts
        num_runs = len(self._prompts)
        turns = self._run * sizes.num_positions + np.arange(length)
        if is_sharing:
            rows, counts = prefix_rows(self._prompts, sizes.vocab_size)
        else:
            rows = np.arange(self._prompts.size).reshape(self._prompts.shape)
            counts = [num * length] * num_runs
        # Of the slots of a row, which are equal, one is taken.
        tokens, turned, slots = np.empty((3, sum(counts)), np.int64)
        tokens[rows] = self._run * sizes.vocab_size + self._prompts
        turned[rows] = turns
        slots[rows] = np.arange(rows.size).reshape(rows.shape)
        taken = self._on_device(slots)
        hidden = gather(folded.embedding, self._on_device(tokens))
        for number, layer in enumerate(folded.layers):
            if number == 0:
                places = self._on_device(turns * sizes.vocab_size + self._prompts)
                table = folded.table
            else:
                table = folded.queries_keys_values(hidden, layer, counts, self._on_device(turned))
                places = self._on_device(rows)
            query, key, value = heads_of(gather(table, places.view(-1, length)), 3, heads)
            cache = self._caches[number].view(2, -1, sizes.num_bundles, heads, sizes.num_slots, query.shape[-1])
            cache[0, ..., :length, :] = key.view(-1, 1, heads, length, query.shape[-1])
            cache[1, ..., :length, :] = value.view(-1, 1, heads, length, query.shape[-1])
            if number == len(folded.layers) - 1:
                last = self._on_device(rows[..., -1].ravel())
                hidden, counts, taken = hidden[last], [num] * num_runs, taken[last]
            mixed = self._mix(query, key, value, self._mask[:length, :length])[taken]
            hidden = folded.rest_of_layer(mixed, hidden, layer, counts)
        return folded.logits(hidden, counts)

    def read_apart(self, tokens_N: Tensor, position: int) -> Tensor:
        """Logits [R x G x M, V] after one more token, with a row for every rollout."""
        folded, sizes, heads = self._folded, self._sizes, self._folded.shape.num_heads
        together, num = sizes.together, sizes.num_prompts * sizes.group_size
        start = sizes.prompt_length + position * together
        end = start + together
        counts = [num] * len(self._prompts)
        turns = self._of_row * sizes.num_positions + sizes.prompt_length + position
        hidden = gather(folded.embedding, self._of_row * sizes.vocab_size + tokens_N)
        for number, layer in enumerate(folded.layers):
            if number == 0:
                table = gather(folded.table, turns * sizes.vocab_size + tokens_N)
            else:
                table = folded.queries_keys_values(hidden, layer, counts, turns)
            query, key, value = heads_of(table.view(-1, together, table.shape[-1]), 3, heads)
            cache = self._caches[number]
            cache[0, :, start:end] = key
            cache[1, :, start:end] = value
            mixed = self._mix(query, cache[0, :, :end], cache[1, :, :end], self._mask[start:end, :end])
            hidden = folded.rest_of_layer(mixed, hidden, layer, counts)
        return folded.logits(hidden, counts)

    def read(self, tokens_RGM: Ints, position: int, is_open: Bools, first_RGM: Ints) -> Tensor:
        """Logits [R x G x M, V] after one more token; those of a rollout that has ended mean nothing."""
        folded, sizes, heads = self._folded, self._sizes, self._folded.shape.num_heads
        together, vocab = sizes.together, sizes.vocab_size
        start = sizes.prompt_length + position * together
        turn = self._run * sizes.num_positions + sizes.prompt_length + position
        is_row = is_open & (first_RGM == np.arange(sizes.group_size))
        counts = is_row.sum((1, 2)).tolist()
        rows = np.where(is_open, self._rows(is_row, first_RGM), 0)
        # Slots [R x G x bundles, together] are the members in their order.
        taken = self._on_device(np.flatnonzero(is_row))
        turns = self._on_device(np.broadcast_to(turn, is_row.shape)[is_row])
        hidden = gather(folded.embedding, self._on_device((self._run * vocab + tokens_RGM)[is_row]))
        for number, layer in enumerate(folded.layers):
            if number == 0:
                table, places = folded.table, self._on_device(turn * vocab + tokens_RGM)
            else:
                table, places = folded.queries_keys_values(hidden, layer, counts, turns), self._on_device(rows)
            query, key, value = heads_of(gather(table, places.view(-1, together)), 3, heads)
            cache = self._caches[number]
            cache[0, :, start : start + together] = key
            cache[1, :, start : start + together] = value
            end = start + together
            mixed = self._mix(query, cache[0, :, :end], cache[1, :, :end], self._mask[start:end, :end])[taken]
            hidden = folded.rest_of_layer(mixed, hidden, layer, counts)
        return folded.logits(hidden, counts)[self._on_device(rows).flatten()]

    def _rows(self, is_row: Bools, first_RGM: Ints) -> Ints:
        ranks = (is_row.ravel().cumsum() - 1).reshape(is_row.shape)
        return np.take_along_axis(ranks, first_RGM, 2)

    def _mix(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        """Attention's results [slots, width] at the slots of the queries."""
        scores = torch.baddbmm(mask.expand(query.shape[0], -1, -1), query, key.mT)
        mixed = torch.bmm(torch.softmax(scores, -1), value)
        return side_by_side(mixed[None], self._folded.shape.num_heads).flatten(0, 1)

    def _on_device(self, values: Ints) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self._mask.device)
