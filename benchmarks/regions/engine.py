"""An engine that ends completions at stated times: tokens are drawn at random, weights are loaded for real.

Each of `max_running` rows needs `seconds_per_token` for a token. A row takes the next completion at the instant at
which its last one ended, so that a busy processor does not make the engine slower. While weights are loaded its clock
stands still, as an engine does between two tokens.
"""

from __future__ import annotations

import heapq
import math
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.regions.arms import MAX_TOKENS, MEDIAN_TOKENS, SPREAD
from heterorl.common.generation.hf_batch import spans_of
from heterorl.common.generation.hf_engine import HfEngine
from heterorl.common.generation.inference_engine import Completion, Finished, Request
from heterorl.common.types.rollout import FinishReason
from heterorl.common.weights.arena import Arena


def length_of(seed: int, member: int) -> int:
    """Tokens of a completion, by its seed alone."""
    drawn = np.random.default_rng([seed, member]).lognormal(math.log(MEDIAN_TOKENS), SPREAD)
    return int(min(MAX_TOKENS, max(2, round(drawn))))


def versions_of(begin: float, num_tokens: int, seconds_per_token: float, loads: Sequence[tuple[float, int]]) -> Any:
    """The version that draws each token; `loads` are instants and versions, the first one before `begin`."""
    drawn_at = begin + seconds_per_token * np.arange(1, num_tokens + 1)
    places = np.searchsorted([at for at, _ in loads], drawn_at, side="left") - 1
    return np.array([version for _, version in loads])[np.maximum(0, places)]


class TimedEngine(HfEngine):
    """Weights, layout and scores of the engine `hf`; completions by the clock."""

    seconds_per_token = 0.02

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._news = threading.Condition()
        self._free = [0.0] * self.max_running
        # End and beginning by the engine's clock, a number against ties, then the work.
        self._running: list[tuple[float, float, int, Request, int]] = []
        self._num_taken = 0
        self._loads: list[tuple[float, int]] = []
        self._paused_s = 0.0
        self._paused_at: float | None = None

    def _now(self) -> float:
        return (time.monotonic() if self._paused_at is None else self._paused_at) - self._paused_s

    def load(self, arena: Arena, version: int) -> None:
        with self._news:
            self._paused_at = time.monotonic()
        try:
            super().load(arena, version)
        finally:
            with self._news:
                assert self._paused_at is not None
                self._paused_s += time.monotonic() - self._paused_at
                self._paused_at = None
                # No completion is longer than all of these.
                self._loads = [*self._loads[-1000:], (self._now(), version)]
                self._news.notify_all()

    def submit(self, request: Request) -> None:
        self._room.check(request.prompt, self._sampling.max_new_tokens)
        with self._news:
            for member in range(request.num_completions):
                begin = max(self._now(), heapq.heappop(self._free))
                end = begin + self.seconds_per_token * length_of(request.seed, member)
                heapq.heappush(self._free, end)
                self._num_taken += 1
                heapq.heappush(self._running, (end, begin, self._num_taken, request, member))
            self._news.notify_all()

    def collect(self) -> list[Finished]:
        with self._news:
            num_cancels = self._num_cancels
            while self._running and self._num_cancels == num_cancels:
                left_s = self._running[0][0] - self._now()
                if left_s <= 0:
                    return self._ended()
                self._news.wait(None if self._paused_at is not None else left_s)
        return []

    def cancel(self) -> None:
        with self._news:
            self._running.clear()
            self._free = [0.0] * self.max_running
            self._num_cancels += 1
            self._news.notify_all()

    def _ended(self) -> list[Finished]:
        ended: list[Finished] = []
        while self._running and self._running[0][0] <= self._now():
            _, begin, _, request, member = heapq.heappop(self._running)
            ended.append(Finished(key=request.key, member=member, completion=self._completion(request, member, begin)))
        return ended

    def _completion(self, request: Request, member: int, begin: float) -> Completion:
        length = length_of(request.seed, member)
        tokens = [token for token in range(self.vocab_size) if token not in self.end_token_ids]
        ids = np.random.default_rng([request.seed, member, 1]).choice(tokens, length).astype(np.int32)
        is_whole = length < self._sampling.max_new_tokens
        if is_whole:
            ids[-1] = self.end_token_ids[0]
        versions = versions_of(begin, length, self.seconds_per_token, self._loads)
        return Completion(
            token_ids=ids,
            logprobs=np.full(length, -math.log(len(tokens)), np.float32),
            finish_reason=FinishReason.EOS if is_whole else FinishReason.LENGTH,
            spans=spans_of(versions.tolist()),
        )
