"""Groups into the outbox, and due ones to the coordinator.

A group leaves the outbox only by its own final outcome; after anything else it is pushed again under the same id.
Outcomes that arrived before a broken link count. A group that the coordinator refuses as invalid is replaced by an
empty one, so that groups behind it do not wait. Steps of the wall clock delay no group.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from heterorl.common.api import SamplerApi
from heterorl.common.errors import DiskFull, InvalidRequest, MessageTooLarge, RemoteError
from heterorl.common.process import metrics
from heterorl.common.process.backoff import Backoff, log_level
from heterorl.common.process.clock import Bell, Clock, ring_or_time, steady
from heterorl.common.process.logs import Rarely
from heterorl.common.process.tracing import TRACER
from heterorl.common.types.common import peer_words
from heterorl.common.types.rollout import Group, PushOutcome, PushStatus, SealedGroup
from heterorl.sampler.delay import DelayConfig, group_delay_s
from heterorl.sampler.outbox.outbox import Outbox

_LOG = logging.getLogger(__name__)
BATCH_GROUPS = 1024
BATCH_BYTES = 16 << 20
"""Bytes in one call, for a link of 150 ms and 1 Gbit/s; a larger group has its own call."""


@dataclass(kw_only=True, eq=False, repr=False)
class Delivery:
    """Delivery loop of an outbox; `now` is the clock of release times."""

    api: SamplerApi
    outbox: Outbox
    clock: Clock
    bell: Bell
    rng: random.Random
    now: Callable[[], float] | None = None

    def __post_init__(self) -> None:
        self._now = self.now or steady(self.clock)
        self._backoff = Backoff(clock=self.clock, rng=self.rng)
        self._said = Rarely(_LOG, self.clock.monotonic)
        # Groups to push one by one: one of them was refused.
        self._num_alone = 0
        # A full coordinator asks for all groups of a call again: the next call is as large as what it took.
        self._most = BATCH_GROUPS
        self._put_aside = 0
        self.num_delivered = 0
        """Groups taken by the coordinator since this process began."""
        self.num_refused = 0
        """Groups with the final outcome DROPPED."""

    async def deliver(self) -> None:
        while True:
            ticket = self.bell.ticket()
            now = self._now()
            limit = 1 if self._num_alone else self._most
            try:
                groups, later = await asyncio.to_thread(self.outbox.due, now, limit=limit, max_bytes=BATCH_BYTES)
            except DiskFull as error:
                _LOG.error("the outbox waits for room, in which it sets a damaged group aside: %s", error)
                await self.clock.sleep(self._backoff.delay_s())
                continue
            if groups:
                await self._push(groups)
            else:
                await ring_or_time(ticket, clock=self.clock, seconds=None if later is None else later - now)

    async def _push(self, groups: Sequence[SealedGroup]) -> None:
        started = self.clock.monotonic()
        try:
            outcomes = await self.api.push_groups(groups)
        except InvalidRequest as error:
            await self._isolate(groups, error)
            return
        except RemoteError as error:
            # The next registration states the coordinator's smaller limit.
            is_too_large = isinstance(error, MessageTooLarge)
            delay_s = self._backoff.delay_s() if is_too_large else self._backoff.next_delay(error)
            _LOG.log(log_level(error), "%d groups wait %.1f s in the outbox: %s", len(groups), delay_s, error)
            await self.clock.sleep(delay_s)
            return
        self._num_alone = max(0, self._num_alone - 1)
        # Outcomes come in order; one that names another group is ignored.
        answered = [
            (group, outcome) for group, outcome in zip(groups, outcomes, strict=False) if outcome.id == group.id
        ]
        settled, asked_s = settle([outcome for _, outcome in answered], self._said)
        lasted_s = self.clock.monotonic() - started
        for group, outcome in answered:
            TRACER.add("push", trace=group.trace, lasted_s=lasted_s, attributes={"status": outcome.status.value})
        if settled:
            try:
                for stay_s in await asyncio.to_thread(self.outbox.delete, settled, now=self._now()):
                    metrics.PUSH_DELAY_SECONDS.observe(stay_s)
                metrics.OUTBOX_GROUPS.set(self.outbox.level().num_groups)
            except DiskFull as error:
                # The coordinator recognises their next push, and they are deleted then.
                _LOG.error("the outbox cannot delete delivered groups and tries again: %s", error)
                await self.clock.sleep(self._backoff.delay_s())
                return
            dropped = sum(outcome.status is PushStatus.DROPPED for _, outcome in answered)
            self.num_refused += dropped
            self.num_delivered += len(settled) - dropped
            self.bell.ring()
        if len(settled) == len(outcomes) == len(answered):
            # A link that broke after some groups is progress: the rest is pushed at once.
            self._backoff.reset()
            self._most = min(BATCH_GROUPS, 2 * self._most)
        else:
            if len(settled) < len(answered):
                self._most = max(1, len(settled))
            await self.clock.sleep(self._backoff.delay_s(asked_s=asked_s))

    async def _isolate(self, groups: Sequence[SealedGroup], error: InvalidRequest) -> None:
        """Find the refused group, and put an empty one in its place.

        Raises InvalidRequest: the coordinator refuses the empty group too, so the group is not the cause.
        """
        sequence = groups[0].id.sequence
        if len(groups) > 1:
            self._num_alone = len(groups)
        elif sequence == self._put_aside:
            raise error
        elif await asyncio.to_thread(self.outbox.put_aside, sequence, peer_words(str(error))):
            self._put_aside, self._num_alone = sequence, 0
        await self.clock.sleep(self._backoff.delay_s())


@dataclass(kw_only=True, eq=False, repr=False)
class OutboxWriter:
    """Writes groups into an outbox; `problem`, if any, is why generation pauses."""

    outbox: Outbox
    delay: DelayConfig
    seed: int
    clock: Clock
    now: Callable[[], float]
    rng: random.Random
    numbering: asyncio.Lock

    def __post_init__(self) -> None:
        self._backoff = Backoff(clock=self.clock, rng=self.rng)
        self._waiting: tuple[Group, ...] = ()
        self._retry_at = 0.0
        self.problem = ""

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def assignments(self) -> list[int]:
        return [group.assignment for group in self._waiting]

    @property
    def retry_s(self) -> float:
        return self._retry_at - self.clock.monotonic()

    def add(self, group: Group) -> None:
        self._waiting += (group,)

    async def retry(self) -> None:
        if self._waiting:
            async with self.numbering:
                await self._put(self._waiting)

    async def _put(self, waiting: Sequence[Group]) -> None:
        first = self.outbox.next_sequence
        groups = [
            dataclasses.replace(group, id=dataclasses.replace(group.id, sequence=first + number))
            for number, group in enumerate(waiting)
        ]
        now = self.now()
        sequences = [group.id.sequence for group in groups]
        release = [now + group_delay_s(self.delay, seed=self.seed, sequence=sequence) for sequence in sequences]
        self.outbox.note_spooled(sequences, now)
        try:
            await asyncio.to_thread(self.outbox.put, groups, release=release)
        except DiskFull as error:
            if not self.problem:
                _LOG.error("GENERATION PAUSES, %d groups wait in memory: %s", len(groups), error)
            self.problem = str(error)
            self._retry_at = self.clock.monotonic() + self._backoff.delay_s()
            return
        if self.problem:
            _LOG.info("the disk has room again: %d groups are spooled, generation goes on", len(groups))
        self.problem, self._waiting = "", self._waiting[len(groups) :]
        self._backoff.reset()


def settle(outcomes: Sequence[PushOutcome], said: Rarely) -> tuple[list[int], float]:
    """Sequences with a final outcome and the asked wait; logs dropped groups."""
    settled: list[int] = []
    asked_s = 0.0
    refused: Counter[str] = Counter()
    first: dict[str, PushOutcome] = {}
    for outcome in outcomes:
        if outcome.status is PushStatus.RETRY:
            asked_s = max(asked_s, outcome.retry_after_s)
            continue
        settled.append(outcome.id.sequence)
        if outcome.status is PushStatus.DROPPED:
            reason = outcome.reason.value if outcome.reason else "unknown"
            refused[reason] += 1
            first.setdefault(reason, outcome)
    for reason, count in refused.items():
        example = first[reason]
        said.warn(
            reason, "the coordinator dropped %d of %d groups (%s), the first is group %d: %s",
            count, len(outcomes), reason, example.id.sequence, peer_words(example.message), count=count,
        )  # fmt: skip
    return settled, asked_s
