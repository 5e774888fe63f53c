"""What a sampler does, in one line a minute: for whoever looks after a site and sees nothing but its log."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

from rich.filesize import decimal

from heterorl.sampler.outbox.outbox import Level
from heterorl.sampler.rollout.maker import Batch

_LOG = logging.getLogger(__name__)
EVERY_S = 60.0


@dataclass(slots=True)
class WorkLog:
    """Sums of the batches since the last line."""

    _said_at: float = -math.inf
    _num_batches: int = 0
    _num_groups: int = 0
    _num_rollouts: int = 0
    _num_failed: int = 0
    _num_tokens: int = 0
    _generation_s: float = 0.0
    _rewards: float = 0.0

    def note(self, batch: Batch, *, now: float, version: int, head: int, level: Level) -> None:
        """Count a batch, and say so when the last line is a minute old; `now` is monotonic."""
        rollouts = [rollout for group in batch.groups for rollout in group.rollouts]
        self._num_batches += 1
        self._num_groups += len(batch.groups)
        self._num_rollouts += len(rollouts)
        self._num_failed += len(batch.failed)
        self._num_tokens += batch.num_tokens
        self._generation_s += batch.generation_s
        self._rewards += sum(rollout.reward for rollout in rollouts)
        if now - self._said_at < EVERY_S:
            return
        _LOG.info("%s", self._line(version=version, head=head, level=level))
        self._said_at = now
        self._num_batches = self._num_groups = self._num_rollouts = self._num_failed = self._num_tokens = 0
        self._generation_s = self._rewards = 0.0

    def _line(self, *, version: int, head: int, level: Level) -> str:
        speed = self._num_tokens / self._generation_s if self._generation_s else 0.0
        reward = f"{self._rewards / self._num_rollouts:.3f}" if self._num_rollouts else "none"
        behind = max(0, head - version)
        batches = "1 batch" if self._num_batches == 1 else f"{self._num_batches} batches"
        failed = f", {self._num_failed} without a reward" if self._num_failed else ""
        return (
            f"{batches}: {self._num_groups} groups, {self._num_rollouts} rollouts{failed}, {speed:,.0f} tokens/s, "
            f"mean reward {reward}; version {version}, {behind} behind the head; "
            f"outbox {level.num_groups} groups, {decimal(level.num_bytes)}"
        )
