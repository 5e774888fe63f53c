"""Where tokens stand: rows, which are computed once for all rollouts that share a prefix, and slots, where rollouts
of a prompt attend side by side.

    rows     of each run: all but the last token of every prompt, the last tokens, the prefixes of completions
    slots    of a bundle of k rollouts of a prompt: P of the prompt, then for each position k of completions

Attention is cheap and regular, so slots are dense; all else is dear, so a prefix that 8 rollouts share is one row. The
sums of a gradient are those of the rollouts one by one.

Suffixes: R runs, G prompts of a run, M rollouts of a prompt, P prompt tokens, T completion tokens, C = T - 1 of them
that something follows, B bundles of all runs, S slots, N rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

MOST_TOGETHER = 40
"""Slots of completions in a bundle: scores grow with its square, the number of bundles falls with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What all runs of a batch have in common."""

    num_prompts: int
    group_size: int
    prompt_length: int
    max_new_tokens: int
    vocab_size: int

    @property
    def num_inputs(self) -> int:
        """Completion tokens that another one may follow."""
        return self.max_new_tokens - 1

    @property
    def together(self) -> int:
        """Rollouts of a bundle: a divisor of the group's size."""
        fitting = [
            count
            for count in range(1, self.group_size + 1)
            if self.group_size % count == 0 and count * self.num_inputs <= MOST_TOGETHER
        ]
        return max(fitting, default=1)

    @property
    def num_bundles(self) -> int:
        """Bundles of a prompt."""
        return self.group_size // self.together

    @property
    def num_slots(self) -> int:
        """Slots of a bundle."""
        return self.prompt_length + self.num_inputs * self.together

    @property
    def num_positions(self) -> int:
        """Positions that a token can have."""
        return self.prompt_length + self.num_inputs


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layout:
    """Rows and slots of one forward pass over whole rollouts; indices are int64 tensors on the device.

    `entries_BS` are where the first layer finds a slot's queries, keys and values: they depend on token and position
    alone. `seen_*` are of the rows that a token is predicted from, the only ones that the last layer finishes.
    """

    counts: list[int]
    tokens_N: torch.Tensor
    turns_N: torch.Tensor
    entries_BS: torch.Tensor
    rows_BS: torch.Tensor
    taken_N: torch.Tensor
    seen_counts: list[int]
    seen_N: torch.Tensor
    predicting_RGMT: torch.Tensor
    is_causal: bool = False
    """Whether each slot sees all slots before it, and the device's own attention does the work."""


def mask_of(sizes: Sizes) -> Bools:
    """True where a slot [S, S] sees another one: what came before it in the prompt and in its own rollout."""
    prompt, together = sizes.prompt_length, sizes.together
    slots = np.arange(sizes.num_slots)
    is_prompt = slots < prompt
    member = np.where(is_prompt, -1, (slots - prompt) % together)
    position = np.where(is_prompt, slots, prompt + (slots - prompt) // together)
    is_seen: Bools = (position[None, :] <= position[:, None]) & (
        is_prompt[None, :] | (member[None, :] == member[:, None])
    )
    return is_seen


def extend(parents_RGM: Ints, tokens_RGM: Ints, vocab_size: int) -> Ints:
    """The lowest member of each group with the same prefix, given that of the prefix before and the next token."""
    names = parents_RGM * vocab_size + tokens_RGM
    lowest: Ints = (names[..., :, None] == names[..., None, :]).argmax(-1)
    return lowest


def prompt_rows(sizes: Sizes) -> Ints:
    """Place [G, P] of each prompt token in the rows of its run: last tokens come after all others."""
    num, length = sizes.num_prompts, sizes.prompt_length
    rows = np.arange(num)[:, None] * (length - 1) + np.arange(length)
    rows[:, -1] = num * (length - 1) + np.arange(num)
    return rows


def prefix_rows(prompts_RGP: Ints, vocab_size: int) -> tuple[Ints, list[int]]:
    """Rows [R, G, P] of generation, one for each prefix that prompts of a run have, and how many each run has."""
    rows, counts, total = np.empty_like(prompts_RGP), [], 0
    for prompts_GP, rows_GP in zip(prompts_RGP, rows, strict=True):
        start, prefix_G = total, np.zeros(len(prompts_GP), np.int64)
        for place, tokens_G in enumerate(prompts_GP.T):
            names, prefix_G = np.unique(prefix_G * vocab_size + tokens_G, return_inverse=True)
            rows_GP[:, place] = total + prefix_G
            total += len(names)
        counts.append(total - start)
    return rows, counts


def lay_out(sizes: Sizes, prompts_RGP: Ints, tokens_RGMT: Ints, lengths_RGM: Ints, first_RGMT: Ints) -> Layout:
    """Give every prefix a row and every token a slot, on the CPU.

    Args:
        sizes: of the batch.
        prompts_RGP: token ids.
        tokens_RGMT: token ids; beyond the length anything.
        lengths_RGM: tokens of each completion, at least 1; a prefix after which one completion ends ends all that
            have it.
        first_RGMT: of `extend`, for each prefix.
    """
    num_runs = len(prompts_RGP)
    num, length, inputs, together = sizes.num_prompts, sizes.prompt_length, sizes.num_inputs, sizes.together
    bundles, num_slots, vocab = sizes.num_bundles, sizes.num_slots, sizes.vocab_size
    tokens, first = tokens_RGMT[..., :inputs], first_RGMT[..., :inputs]
    run = np.arange(num_runs)[:, None, None]
    is_input = np.arange(inputs) < (lengths_RGM - 1)[..., None]
    is_node = is_input & (first == np.arange(sizes.group_size)[:, None])

    ranks = (is_node.reshape(num_runs, -1).cumsum(1) - 1).reshape(is_node.shape)
    num_nodes = is_node.sum((1, 2, 3))
    counts = num_nodes + num * length
    starts = np.concatenate(([0], counts.cumsum()[:-1]))[:, None, None]
    of_prompt = prompt_rows(sizes) + starts
    of_node = ranks + (starts + num * length)[..., None]
    of_input = np.where(is_input, np.take_along_axis(of_node, first, 2), of_prompt[:, :, -1, None, None])

    positions = np.arange(length + inputs)
    turns = run * sizes.num_positions + positions
    prompt_entries = turns[..., :length] * vocab + prompts_RGP
    entries = turns[:, None, :, length:] * vocab + tokens
    prompt_slots = (np.arange(num_runs * num).reshape(num_runs, num, 1) * bundles) * num_slots + np.arange(length)
    member = np.arange(sizes.group_size)[:, None]
    bundle = np.arange(num_runs * num).reshape(num_runs, num, 1, 1) * bundles + member // together
    slots = bundle * num_slots + length + np.arange(inputs) * together + member % together

    def by_row(values_RGP: Any, values_RGMC: Any) -> Ints:
        result = np.empty(int(counts.sum()), np.int64)
        result[of_prompt] = values_RGP
        result[of_node[is_node]] = np.broadcast_to(values_RGMC, is_node.shape)[is_node]
        return result

    def by_slot(values_RGP: Ints, values_RGMC: Ints) -> Ints:
        result = np.empty((num_runs, num, bundles, num_slots), np.int64)
        result[..., :length] = values_RGP[:, :, None]
        by_bundle = values_RGMC.reshape(num_runs, num, bundles, together, inputs).swapaxes(3, 4)
        result[..., length:] = by_bundle.reshape(num_runs, num, bundles, -1)
        return result.reshape(-1, num_slots)

    seen_counts = num_nodes + num
    seen_starts = np.concatenate(([0], seen_counts.cumsum()[:-1]))[:, None, None]
    skipped = starts + num * (length - 1) - seen_starts
    predicting = np.empty(tokens_RGMT.shape, np.int64)
    predicting[..., 0] = of_prompt[:, :, -1:] - skipped
    predicting[..., 1:] = of_input - skipped[..., None]
    seen = np.repeat(skipped[:, 0, 0], seen_counts) + np.arange(int(seen_counts.sum()))

    return Layout(
        counts=counts.tolist(),
        tokens_N=torch.from_numpy(by_row(run * vocab + prompts_RGP, run[..., None] * vocab + tokens)),
        turns_N=torch.from_numpy(by_row(turns[..., :length], turns[:, None, :, length:])),
        entries_BS=torch.from_numpy(by_slot(prompt_entries, entries)),
        rows_BS=torch.from_numpy(by_slot(of_prompt, of_input)),
        taken_N=torch.from_numpy(by_row(prompt_slots, slots)),
        seen_counts=seen_counts.tolist(),
        seen_N=torch.from_numpy(seen),
        predicting_RGMT=torch.from_numpy(predicting),
    )


def lay_out_apart(sizes: Sizes, prompts_RGP: torch.Tensor, tokens_RGMT: torch.Tensor) -> Layout:
    """Give every token a row and a slot, whatever its completion's length: all runs have equally many rows.

    Args:
        sizes: of the batch.
        prompts_RGP: int64 token ids, on the device.
        tokens_RGMT: int64 token ids; beyond the length anything.
    """
    device, num_runs = prompts_RGP.device, len(prompts_RGP)
    num, length, inputs, together = sizes.num_prompts, sizes.prompt_length, sizes.num_inputs, sizes.together
    bundles, vocab, members = sizes.num_bundles, sizes.vocab_size, sizes.group_size

    def numbers(*shape: int) -> torch.Tensor:
        return torch.arange(math.prod(shape), device=device).view(shape)

    def by_row(values_RGP: torch.Tensor, values_RGMC: torch.Tensor) -> torch.Tensor:
        firsts, lasts = values_RGP[..., :-1].flatten(1), values_RGP[..., -1]
        return torch.cat((firsts, lasts, values_RGMC.flatten(1)), 1).flatten()

    def by_slot(values_RGP: torch.Tensor, values_RGMC: torch.Tensor) -> torch.Tensor:
        of_bundle = values_RGMC.view(num_runs, num, bundles, together, inputs).transpose(3, 4).flatten(3)
        of_prompt = values_RGP[:, :, None].expand(-1, -1, bundles, -1)
        return torch.cat((of_prompt, of_bundle), 3).flatten(0, 2)

    shape, prompt_shape = (num_runs, num, members, inputs), (num_runs, num, length)
    run = numbers(num_runs, 1, 1)
    num_rows = num * length + num * members * inputs
    of_prompt = run * num_rows + torch.from_numpy(prompt_rows(sizes)).to(device)
    of_node = run[..., None] * num_rows + num * length + numbers(1, num, members, inputs)
    turns = run * sizes.num_positions + numbers(1, 1, sizes.num_positions)
    prompt_turns, node_turns = turns[..., :length].expand(prompt_shape), turns[:, None, :, length:].expand(shape)
    tokens = tokens_RGMT[..., :inputs]
    bundle = numbers(num_runs, num, bundles)
    prompt_slots = bundle[..., :1] * sizes.num_slots + numbers(1, 1, length)
    member = numbers(members, 1)
    slots = bundle.repeat_interleave(together, 2)[..., None] * sizes.num_slots
    slots = slots + length + numbers(inputs) * together + member % together
    num_seen = num_rows - num * (length - 1)
    skipped = run * num_rows + num * (length - 1) - run * num_seen
    return Layout(
        counts=[num_rows] * num_runs,
        tokens_N=by_row(run * vocab + prompts_RGP, run[..., None] * vocab + tokens),
        turns_N=by_row(prompt_turns, node_turns),
        entries_BS=by_slot(prompt_turns * vocab + prompts_RGP, node_turns * vocab + tokens),
        rows_BS=by_slot(of_prompt, of_node),
        taken_N=by_row(prompt_slots, slots),
        seen_counts=[num_seen] * num_runs,
        seen_N=(run[:, 0] * num_rows + num * (length - 1) + numbers(1, num_seen)).flatten(),
        predicting_RGMT=torch.cat((of_prompt[..., -1:, None].expand(-1, -1, members, -1), of_node), 3)
        - skipped[..., None],
        is_causal=together == 1,
    )


def unshared(shape: tuple[int, ...]) -> Ints:
    """`first` [R, G, M, T] under which every rollout has rows of its own."""
    return np.broadcast_to(np.arange(shape[2])[:, None], shape)
