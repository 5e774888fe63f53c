"""Rows that the engine `hf` computes together.

ids, attention     padding on the left, so that all rows end in the same column
cache              keys and values of the columns so far
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from heterorl.common.generation.inference_engine import Completion, Finished, Request
from heterorl.common.model.logprobs import draw, gumbel, gumbel_noise
from heterorl.common.model.router_replay import RouterRecorder
from heterorl.common.types.common import Int32Array, SamplingSemantics
from heterorl.common.types.rollout import FinishReason, Span


def spans_of(versions: Sequence[int]) -> tuple[Span, ...]:
    """Runs of equal versions, from one version for each token."""
    starts = [place for place, version in enumerate(versions) if place == 0 or version != versions[place - 1]]
    return tuple(
        Span(version=int(versions[start]), start=start, end=end)
        for start, end in zip(starts, [*starts[1:], len(versions)], strict=True)
    )


KEPT_BYTES = 1 << 30
"""Keys and values of all kept turns, on the engine's device."""
KEPT_A_ROW = 8
"""Kept turns for each row of the engine: tools may take several times as long as a turn."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeptTurn:
    """Keys and values of each layer, [heads, tokens, width]."""

    size: int
    layers: Sequence[tuple[Tensor, Tensor]]
    num_bytes: int


class KeptTurns:
    """Kept turns of the loaded weights, for the thread that collects.

    At most `most` of them and KEPT_BYTES stay; the oldest leave first.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        # By the bytes of their token ids, oldest first.
        self._turns: dict[bytes, KeptTurn] = {}
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._turns)

    def keep(self, token_ids: Int32Array, turn: KeptTurn) -> None:
        self._drop(token_ids.tobytes())
        self._turns[token_ids.tobytes()] = turn
        self._num_bytes += turn.num_bytes
        while len(self) > self._most or self._num_bytes > KEPT_BYTES:
            self._drop(next(iter(self._turns)))

    def take(self, prompt: Int32Array) -> KeptTurn | None:
        """Remove the longest turn that is the beginning of `prompt`."""
        found = self._find(prompt)
        return self._drop(found) if found is not None else None

    def has(self, prompt: Int32Array) -> bool:
        """Whether `take` would find a turn."""
        return self._find(prompt) is not None

    def _find(self, prompt: Int32Array) -> bytes | None:
        sizes = {turn.size for turn in self._turns.values() if turn.size < prompt.size}
        keys = (prompt[:size].tobytes() for size in sorted(sizes, reverse=True))
        return next((key for key in keys if key in self._turns), None)

    def _drop(self, key: bytes) -> KeptTurn | None:
        turn = self._turns.pop(key, None)
        self._num_bytes -= turn.num_bytes if turn else 0
        return turn


class Group:
    """Completions of one request; `members` are those that still have rows."""

    def __init__(self, request: Request, *, sampling: SamplingSemantics, is_seeded: bool, device: torch.device) -> None:
        num = request.num_completions
        self.request = request
        self.sampling = request.sampling or sampling
        limit = self.sampling.max_new_tokens
        self.members = np.arange(num)
        self.kept_turns: KeptTurns | None = None
        """The kept turns of the weights that read its prompt."""
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

    def read_by(self, member: int) -> Int32Array:
        """Ids of the prompt and of the drawn tokens but the last."""
        return np.concatenate([self.request.prompt, self._tokens[member, : self.column - 1]])

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
    kept_turns: KeptTurns
    vocab_size: int
    end_token_ids: list[int]

    def run(self, inputs: Callable[[], dict[str, Any]]) -> tuple[Any, int]:
        """One pass and its version; no weights change during `inputs`."""


class Rows:
    """Groups that an engine computes together."""

    def __init__(self, groups: Sequence[Group], engine: Computing) -> None:
        self._groups = list(groups)
        self._engine = engine
        self._cache: Any = None
        self._kept_turns: KeptTurns
        self._ids: Tensor
        self._attention: Tensor
        self._position: Tensor

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
            output, version = engine.run(self._inputs)
        if engine.recorder:
            record = engine.recorder.record(layers, num_rows=len(self._ids))
            for group, rows in self._rows_of_groups():
                group.note_routed(record[rows])
        self._cache = output.past_key_values
        noise = torch.cat([group.noise(engine.vocab_size) for group in self._groups])
        drawn, logprobs = self._drawn(output.logits[:, -1], noise.to(engine.device))
        ended = self._take(drawn.cpu().numpy(), logprobs.cpu().numpy(), version)
        self._keep(ended)
        self._ids = drawn[:, None]
        self._attention = torch.cat([self._attention, self._attention.new_ones(len(drawn), 1)], 1)
        self._position = self._position[:, -1:] + 1
        # Drop ended rows when half have ended, since each time copies the cache.
        if 0 < self.num_running <= len(drawn) // 2 and _is_made_of(self._cache, sliding=True):
            self._drop_ended()
        return ended

    def _inputs(self) -> dict[str, Any]:
        """The model's inputs of the next pass."""
        self._kept_turns = self._engine.kept_turns
        if self._cache is None:
            self._begin()
        return {
            "input_ids": self._ids, "attention_mask": self._attention, "position_ids": self._position,
            "past_key_values": self._cache, "use_cache": True, "logits_to_keep": 1,
        }  # fmt: skip

    def _begin(self) -> None:
        """Lay out the prompts, or what came since where turns are kept."""
        prompts = [group.request.prompt for group in self._groups]
        for group in self._groups:
            group.kept_turns = self._kept_turns
        kept = [self._kept_turns.take(prompt) for prompt in prompts]
        # All rows read as many tokens, and padding stays on the left.
        num_new = max(prompt.size - (turn.size if turn else 0) for prompt, turn in zip(prompts, kept, strict=True))
        sizes = [max(0, prompt.size - num_new) if turn else 0 for prompt, turn in zip(prompts, kept, strict=True)]
        repeats = torch.tensor([group.request.num_completions for group in self._groups])
        ids, attention = _left_padded(prompts)
        first = ids.shape[1] - num_new
        self._ids, self._attention = (
            rows.repeat_interleave(repeats, 0).to(self._engine.device) for rows in (ids[:, first:], attention)
        )
        self._position = (self._attention.cumsum(1).clamp(min=1) - 1)[:, first:]
        if any(sizes):
            self._cache = _cache_of(kept, sizes, repeats, width=first)

    def _keep(self, ended: Sequence[Finished]) -> None:
        """Keep ended completions that a later prompt may begin with."""
        if not ended or self._engine.recorder or not self.is_joinable:
            return
        keys = {(one.key, one.member) for one in ended}
        for group, rows in self._rows_of_groups():
            # Other weights may have read a part of it.
            if not group.request.may_continue or group.kept_turns is not self._kept_turns:
                continue
            for row, member in zip(range(rows.start, rows.stop), group.members.tolist(), strict=True):
                if (group.request.key, member) in keys:
                    ids = group.read_by(member)
                    self._kept_turns.keep(ids, self._turn_of(row, ids.size))

    def _turn_of(self, row: int, size: int) -> KeptTurn:
        # Padding is on the left only; a copy, so that the whole batch does not stay.
        layers = [
            (layer.keys[row, :, -size:].clone(), layer.values[row, :, -size:].clone()) for layer in self._cache.layers
        ]
        return KeptTurn(size=size, layers=layers, num_bytes=sum(each.nbytes for layer in layers for each in layer))

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


def _left_padded(rows: Sequence[np.ndarray[Any, Any]]) -> tuple[Tensor, Tensor]:
    """Ids and attention [rows, longest]."""
    width = max(row.size for row in rows)
    ids = np.zeros((len(rows), width), np.int64)
    attention = np.zeros((len(rows), width), np.int64)
    for place, row in enumerate(rows):
        ids[place, width - row.size :] = row
        attention[place, width - row.size :] = 1
    return torch.from_numpy(ids), torch.from_numpy(attention)


def _cache_of(kept: Sequence[KeptTurn | None], sizes: Sequence[int], repeats: Tensor, *, width: int) -> Any:
    """The first `sizes` tokens of each kept turn, padded to `width` columns."""
    from transformers.cache_utils import DynamicCache

    cache = DynamicCache()
    like = next(turn for turn in kept if turn)
    for number, alike in enumerate(like.layers):
        both = []
        for place in range(len(alike)):
            rows = [
                (turn.layers[number] if turn else alike)[place][:, :size]
                for turn, size in zip(kept, sizes, strict=True)
            ]
            wide = torch.stack([_widened(row, width, dim=-2) for row in rows])
            both.append(wide.repeat_interleave(repeats.to(wide.device), 0))
        keys, values = both
        cache.update(keys, values, number)
    return cache


def _widened(values: Tensor, width: int, *, dim: int) -> Tensor:
    missing = width - values.shape[dim]
    if not missing:
        return values
    shape = list(values.shape)
    shape[dim] = missing
    return torch.cat([values.new_zeros(shape), values], dim)


def _is_made_of(cache: Any, *, sliding: bool) -> bool:
    """Whether a cache is known to hold only keys and values."""
    from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

    known = (DynamicLayer, DynamicSlidingWindowLayer) if sliding else (DynamicLayer,)
    # A model's own cache may hold a recurrent state next to its layers.
    return type(cache) is DynamicCache and all(type(layer) in known for layer in cache.layers)
