"""Pushing the outbox: in order, when due, until every group has a terminal outcome.

    deliver  waits for a group that is due; unblocked by the outbox (bell) or by time; goes on through outages

Guarantees: a group leaves the outbox only by a terminal outcome of its own; whatever else happens, it is pushed again
under the same id.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence

from services.common import metrics
from services.common.api import CoordinatorApi
from services.common.bell import Bell
from services.common.clock import Clock
from services.common.errors import RemoteError
from services.common.tracing import TRACER
from services.common.types import Group, PushOutcome, PushStatus
from services.sampler.outbox import Outbox
from services.sampler.waiting import Patience, ring_or_time

_LOG = logging.getLogger(__name__)
BATCH_GROUPS = 16
BATCH_BYTES = 4 << 20
"""Pushed in one call (a larger group travels alone), so that a slow link finishes a call before its deadline."""


class Delivery:
    """One loop over one outbox."""

    def __init__(self, *, api: CoordinatorApi, outbox: Outbox, clock: Clock, bell: Bell, rng: random.Random) -> None:
        self._api = api
        self._outbox = outbox
        self._clock = clock
        self._bell = bell
        self._patience = Patience(rng=rng)

    async def deliver(self) -> None:
        """Push for ever."""
        while True:
            ticket = self._bell.ticket()
            now = self._clock.wall()
            groups, later = await asyncio.to_thread(self._outbox.due, now, limit=BATCH_GROUPS, max_bytes=BATCH_BYTES)
            if groups:
                await self._push(groups)
            else:
                await ring_or_time(ticket, clock=self._clock, seconds=None if later is None else later - now)

    async def _push(self, groups: Sequence[Group]) -> None:
        started = self._clock.monotonic()
        try:
            outcomes = await self._api.push_groups(groups)
        except RemoteError as error:
            delay_s = self._patience.after(error)
            _LOG.info("%d groups wait %.1f s in the outbox: %s", len(groups), delay_s, error)
            await self._clock.sleep(delay_s)
            return
        settled, asked_s = settle(outcomes)
        for group, outcome in zip(groups, outcomes, strict=True):
            TRACER.add(
                "push",
                trace=group.trace,
                lasted_s=self._clock.monotonic() - started,
                attributes={"status": outcome.status.value},
            )
        if settled:
            for stay_s in await asyncio.to_thread(self._outbox.delete, settled, now=self._clock.wall()):
                metrics.PUSH_DELAY_SECONDS.observe(stay_s)
            level = await asyncio.to_thread(self._outbox.level)
            metrics.OUTBOX_GROUPS.set(level.num_groups)
            metrics.OUTBOX_BYTES.set(level.num_bytes)
            self._bell.ring()
        if len(settled) == len(outcomes):
            self._patience.reset()
        else:
            await self._clock.sleep(self._patience.delay_s(asked_s=asked_s))


def settle(outcomes: Sequence[PushOutcome]) -> tuple[list[int], float]:
    """(sequences that are done with, seconds that the coordinator asks to wait); counts what was not taken."""
    settled: list[int] = []
    asked_s = 0.0
    for outcome in outcomes:
        if outcome.status is PushStatus.RETRY:
            asked_s = max(asked_s, outcome.retry_after_s)
            continue
        settled.append(outcome.id.sequence)
        if outcome.status is PushStatus.DROPPED:
            reason = outcome.reason.value if outcome.reason else "unknown"
            metrics.OUTBOX_DROPPED.labels(reason).inc()
            _LOG.warning("group %d was not taken (%s): %s", outcome.id.sequence, reason, outcome.message)
    return settled, asked_s
