"""Rows that the engine `hf` computes together.

ids, attention     padding on the left, so that all rows end in the same column
cache              keys and values of the columns so far
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from heterorl.common.generation.inference_engine import Completion, Finished, Request
from heterorl.common.model.logprobs import draw, gumbel, gumbel_noise
from heterorl.common.model.router_replay import RouterRecorder
from heterorl.common.types.common import SamplingSemantics
from heterorl.common.types.rollout import FinishReason, Span


def spans_of(versions: Sequence[int]) -> tuple[Span, ...]:
    """Runs of equal versions, from one version for each token."""
    starts = [place for place, version in enumerate(versions) if place == 0 or version != versions[place - 1]]
    return tuple(
        Span(version=int(versions[start]), start=start, end=end)
        for start, end in zip(starts, [*starts[1:], len(versions)], strict=True)
    )


class Group:
    """Completions of one request; `members` are those that still have rows."""

    def __init__(self, request: Request, *, sampling: SamplingSemantics, is_seeded: bool, device: torch.device) -> None:
        num = request.num_completions
        self.request = request
        self.sampling = request.sampling or sampling
        limit = self.sampling.max_new_tokens
        self.members = np.arange(num)
        self.column = 0
        self.is_done = np.zeros(num, bool)
        self._tokens = np.zeros((num, limit), np.int32)
        self._logprobs = np.zeros((num, limit), np.float32)
        self._versions = np.full(limit, -1, np.int32)
        # Members and their chosen experts, for each pass.
        self._routed: list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]] = []
        # On the device: noise has rows x vocabulary numbers.
        # A group of a seeded process may go on in one that is not: its seed has 128 bits.
        seed = (request.seed + request.first_member) % 2**63
        self._generator = None if is_seeded else torch.Generator(device).manual_seed(seed)

    def noise(self, vocab_size: int) -> Tensor:
        """Gumbel noise [rows, V] of the next token; ended members draw too."""
        if self._generator is None:
            noise = np.empty((len(self.members), vocab_size), np.float32)
            for place, member in enumerate(self.members.tolist()):
                sample = self.request.first_member + member
                noise[place] = gumbel_noise(
                    self.request.seed, sample=sample, position=self.column, vocab_size=vocab_size
                )
            return torch.from_numpy(noise)
        whole = gumbel((self.request.num_completions, vocab_size), self._generator)
        return whole if len(self.members) == len(whole) else whole[torch.from_numpy(self.members)]

    def note_routed(self, record: np.ndarray[Any, Any]) -> None:
        """Keep the experts [rows, columns, bytes] of the pass before `take`."""
        if self.request.sampling is None and not self.is_done.all():
            # Left of the prompt is padding.
            own = record if self._routed else record[:, -self.request.prompt.size :]
            self._routed.append((self.members, own))

    def take(
        self,
        tokens: np.ndarray[Any, Any],
        logprobs: np.ndarray[Any, Any],
        version: int,
        *,
        are_ends: np.ndarray[Any, Any],
    ) -> list[Finished]:
        """Append a token to every row; returns completions that end with it."""
        if self.is_done.all():
            # The model still computes this request's rows with the rows of open requests.
            return []
        self._tokens[self.members, self.column] = tokens
        self._logprobs[self.members, self.column] = logprobs
        self._versions[self.column] = version
        self.column += 1
        is_end = np.zeros(len(self.is_done), bool)
        is_end[self.members] = are_ends | (self.column == self._tokens.shape[1])
        is_end &= ~self.is_done
        self.is_done |= is_end
        by_token = set(self.members[are_ends].tolist())
        return [self._finished(member, by_token=member in by_token) for member in np.flatnonzero(is_end).tolist()]

    def _finished(self, member: int, *, by_token: bool) -> Finished:
        completion = Completion(
            token_ids=self._tokens[member, : self.column].copy(),
            logprobs=self._logprobs[member, : self.column].copy(),
            finish_reason=FinishReason.EOS if by_token else FinishReason.LENGTH,
            spans=spans_of(self._versions[: self.column].tolist()),
            routed_experts=b"".join(
                own[int(np.searchsorted(members, member))].tobytes() for members, own in self._routed
            ),
        )
        return Finished(key=self.request.key, member=member, completion=completion)


class Computing(Protocol):
    """The part of an engine that rows use."""

    device: torch.device
    recorder: RouterRecorder | None
    vocab_size: int
    end_token_ids: list[int]

    def run(self, **inputs: Any) -> tuple[Any, int]:
        """One pass and its version."""


class Rows:
    """Groups that an engine computes together."""

    def __init__(self, groups: Sequence[Group], engine: Computing) -> None:
        self._groups = list(groups)
        self._engine = engine
        self._ids, self._attention = _left_padded(groups, engine.device)
        self._position = self._attention.cumsum(1).clamp(min=1) - 1
        self._cache: Any = None

    @property
    def num_running(self) -> int:
        return sum(int((~group.is_done).sum()) for group in self._groups)

    @property
    def is_joinable(self) -> bool:
        """Whether others may join: all layers cache whole keys and values only."""
        return _is_made_of(self._cache, sliding=False)

    def step(self) -> list[Finished]:
        """Draw a token for every row; returns completions that end with it."""
        engine = self._engine
        recording: AbstractContextManager[list[Tensor]] = (
            engine.recorder.recording() if engine.recorder else contextlib.nullcontext([])
        )
        with recording as layers:
            output, version = engine.run(
                input_ids=self._ids,
                attention_mask=self._attention,
                position_ids=self._position,
                past_key_values=self._cache,
                use_cache=True,
                logits_to_keep=1,
            )
        if engine.recorder:
            record = engine.recorder.record(layers, num_rows=len(self._ids))
            for group, rows in self._rows_of_groups():
                group.note_routed(record[rows])
        self._cache = output.past_key_values
        noise = torch.cat([group.noise(engine.vocab_size) for group in self._groups])
        drawn, logprobs = self._drawn(output.logits[:, -1], noise.to(engine.device))
        ended = self._take(drawn.cpu().numpy(), logprobs.cpu().numpy(), version)
        self._ids = drawn[:, None]
        self._attention = torch.cat([self._attention, self._attention.new_ones(len(drawn), 1)], 1)
        self._position = self._position[:, -1:] + 1
        # Drop ended rows when half have ended, since each time copies the cache.
        if 0 < self.num_running <= len(drawn) // 2 and _is_made_of(self._cache, sliding=True):
            self._drop_ended()
        return ended

    def join(self, others: Rows) -> None:
        """Add rows that have read their prompts; both must be joinable."""
        self._drop_ended()
        others._drop_ended()
        self._trim()
        others._trim()
        width = max(self._attention.shape[1], others._attention.shape[1])
        parts = (self, others)
        self._attention = torch.cat([_widened(part._attention, width, dim=1) for part in parts])
        self._ids = torch.cat([part._ids for part in parts])
        self._position = torch.cat([part._position for part in parts])
        for mine, theirs in zip(self._cache.layers, others._cache.layers, strict=True):
            # The cache lacks the column of the next token.
            for name in ("keys", "values"):
                both = [_widened(getattr(layer, name), width - 1, dim=-2) for layer in (mine, theirs)]
                setattr(mine, name, torch.cat(both))
        self._groups += others._groups

    def _drawn(self, logits_BV: Tensor, noise_BV: Tensor) -> tuple[Tensor, Tensor]:
        ways = {group.sampling: None for group in self._groups}
        if len(ways) == 1:
            return draw(logits_BV, noise_BV, next(iter(ways)))
        sizes = [len(group.members) for group in self._groups]
        parts = [
            draw(logits, noise, group.sampling)
            for group, logits, noise in zip(self._groups, logits_BV.split(sizes), noise_BV.split(sizes), strict=True)
        ]
        return torch.cat([tokens for tokens, _ in parts]), torch.cat([logprobs for _, logprobs in parts])

    def _take(self, tokens: np.ndarray[Any, Any], logprobs: np.ndarray[Any, Any], version: int) -> list[Finished]:
        are_ends = np.isin(tokens, self._engine.end_token_ids)
        ended = []
        for group, rows in self._rows_of_groups():
            ended += group.take(tokens[rows], logprobs[rows], version, are_ends=are_ends[rows])
        return ended

    def _rows_of_groups(self) -> Iterator[tuple[Group, slice]]:
        start = 0
        for group in self._groups:
            yield group, slice(start, start + len(group.members))
            start += len(group.members)

    def _drop_ended(self) -> None:
        is_running = np.concatenate([~group.is_done[group.members] for group in self._groups])
        if is_running.all():
            return
        keep = torch.from_numpy(np.flatnonzero(is_running)).to(self._engine.device)
        self._cache.batch_select_indices(keep)
        self._ids, self._attention, self._position = self._ids[keep], self._attention[keep], self._position[keep]
        for group in self._groups:
            group.members = group.members[~group.is_done[group.members]]
        self._groups = [group for group in self._groups if len(group.members)]

    def _trim(self) -> None:
        """Drop columns on the left that no row reads."""
        first = int(self._attention.any(0).int().argmax())
        if first:
            self._attention = self._attention[:, first:]
            for layer in self._cache.layers:
                layer.keys, layer.values = layer.keys[..., first:, :], layer.values[..., first:, :]


def _left_padded(groups: Sequence[Group], device: torch.device) -> tuple[Tensor, Tensor]:
    prompts = [group.request.prompt for group in groups]
    width = max(prompt.size for prompt in prompts)
    input_ids = np.zeros((len(prompts), width), np.int64)
    attention = np.zeros((len(prompts), width), np.int64)
    for row, prompt in enumerate(prompts):
        input_ids[row, width - prompt.size :] = prompt
        attention[row, width - prompt.size :] = 1
    repeats = torch.tensor([group.request.num_completions for group in groups])
    return (
        torch.from_numpy(input_ids).repeat_interleave(repeats, 0).to(device),
        torch.from_numpy(attention).repeat_interleave(repeats, 0).to(device),
    )


def _widened(values: Tensor, width: int, *, dim: int) -> Tensor:
    missing = width - values.shape[dim]
    if not missing:
        return values
    shape = list(values.shape)
    shape[dim] = missing
    return torch.cat([values.new_zeros(shape), values], dim)


def _is_made_of(cache: Any, *, sliding: bool) -> bool:
    """Whether all cache layers are known to hold only keys and values."""
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    known = (DynamicLayer, DynamicSlidingWindowLayer) if sliding else (DynamicLayer,)
    return all(type(layer) in known for layer in getattr(cache, "layers", [None]))
