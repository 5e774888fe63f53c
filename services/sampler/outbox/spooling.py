"""From groups to the outbox, over a disk that may be full: what has no room stays in memory and is tried again.

Guarantees: a group that was made is spooled or waits; its sequence is given when it is written and not before, and
whoever holds `numbering` changes the outbox's next sequence alone.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import random
from collections.abc import Callable, Sequence

from heterorl.common.errors import DiskFull
from heterorl.common.process.clock import Clock
from heterorl.common.process.patience import Patience
from heterorl.common.types.rollout import Group
from heterorl.sampler.outbox.outbox import Outbox
from heterorl.sampler.policy.delay import group_delay_s
from heterorl.sampler.policy.delay_models import DelayConfig

_LOG = logging.getLogger(__name__)


class Spooling:
    """One outbox's way in; `problem` is why nothing is generated, empty while all is well."""

    def __init__(
        self,
        *,
        outbox: Outbox,
        delay: DelayConfig,
        seed: int,
        clock: Clock,
        now: Callable[[], float],
        rng: random.Random,
        numbering: asyncio.Lock,
    ) -> None:
        self._outbox = outbox
        self._delay = delay
        self._seed = seed
        self._clock = clock
        self._now = now
        self._numbering = numbering
        self._patience = Patience(clock=clock, rng=rng)
        self._waiting: tuple[Group, ...] = ()
        self._retry_at = 0.0
        self.problem = ""

    @property
    def num_waiting(self) -> int:
        """Groups that have no room on the disk."""
        return len(self._waiting)

    @property
    def retry_s(self) -> float:
        """Seconds until the next attempt; at most 0: now."""
        return self._retry_at - self._clock.monotonic()

    def add(self, groups: Sequence[Group]) -> None:
        """Take groups in; `retry` spools them."""
        self._waiting += tuple(groups)

    async def retry(self) -> None:
        """Spool what waits."""
        if self._waiting:
            async with self._numbering:
                await self._put(self._waiting)

    async def _put(self, waiting: Sequence[Group]) -> None:
        first = self._outbox.next_sequence
        groups = [
            dataclasses.replace(group, id=dataclasses.replace(group.id, sequence=first + number))
            for number, group in enumerate(waiting)
        ]
        now = self._now()
        sequences = [group.id.sequence for group in groups]
        release = [now + group_delay_s(self._delay, seed=self._seed, sequence=sequence) for sequence in sequences]
        self._outbox.note_spooled(sequences, now)
        try:
            await asyncio.to_thread(self._outbox.put, groups, release=release)
        except DiskFull as error:
            if not self.problem:
                _LOG.error("GENERATION PAUSES, %d groups wait in memory: %s", len(groups), error)
            self.problem = str(error)
            self._retry_at = self._clock.monotonic() + self._patience.delay_s()
            return
        if self.problem:
            _LOG.info("the disk has room again: %d groups are spooled, generation goes on", len(groups))
        self.problem, self._waiting = "", self._waiting[len(groups) :]
        self._patience.reset()
