"""What a sampler does, in one line a minute: for whoever looks after a site and sees nothing but its log."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.filesize import decimal

from heterorl.common.types.rollout import Group
from heterorl.sampler.outbox.level import Level

_LOG = logging.getLogger(__name__)
EVERY_S = 60.0


@dataclass(slots=True)
class WorkLog:
    """Sums of the groups since the last line."""

    _said_at: float = -math.inf
    _num_groups: int = 0
    _num_rollouts: int = 0
    _num_failed: int = 0
    _rewards: float = 0.0

    def note_failed(self) -> None:
        """Count a group whose reward could not be computed."""
        self._num_failed += 1

    def note(self, groups: Sequence[Group]) -> None:
        """Count groups that were made."""
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        self._num_groups += len(groups)
        self._num_rollouts += len(rollouts)
        self._rewards += sum(rollout.reward for rollout in rollouts)

    def say(self, *, tokens_per_s: float, now: float, version: int, head: int, level: Level, num_ahead: int) -> None:
        """Say so when there is something and the last line is a minute old.

        Args:
            tokens_per_s: of the last minute.
            now: an instant of the monotonic clock.
            version: that is generated with.
            head: the newest version.
            level: of the outbox.
            num_ahead: assignments of the reserve.
        """
        if now - self._said_at < EVERY_S or not (self._num_groups or self._num_failed):
            return
        reward = f"{self._rewards / self._num_rollouts:.3f}" if self._num_rollouts else "none"
        failed = f", {self._num_failed} without a reward" if self._num_failed else ""
        _LOG.info(
            "%d groups, %d rollouts%s, %s tokens/s, mean reward %s; version %d, %d behind the head; %d assignments "
            "ahead; outbox %d groups, %s",
            self._num_groups, self._num_rollouts, failed, f"{tokens_per_s:,.0f}", reward, version,
            max(0, head - version), num_ahead, level.num_groups, decimal(level.num_bytes),
        )  # fmt: skip
        self._said_at = now
        self._num_groups = self._num_rollouts = self._num_failed = 0
        self._rewards = 0.0
