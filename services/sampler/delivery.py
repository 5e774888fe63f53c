"""Pushing the outbox: in order, when due, until every group has a terminal outcome.

deliver  waits for a group that is due; unblocked by the outbox (bell) or by time; goes on through outages
"""

from __future__ import annotations

import asyncio
import logging

from services.common import metrics
from services.common.api import CoordinatorApi
from services.common.bell import Bell
from services.common.clock import Clock
from services.common.errors import Draining, NotRegistered, Unreachable
from services.common.types import Group, PushStatus
from services.sampler.outbox import Outbox

_LOG = logging.getLogger(__name__)
BATCH = 16
RETRY_S = 1.0


class Delivery:
    """One loop over one outbox."""

    def __init__(self, *, api: CoordinatorApi, outbox: Outbox, clock: Clock, bell: Bell) -> None:
        self._api = api
        self._outbox = outbox
        self._clock = clock
        self._bell = bell

    async def deliver(self) -> None:
        """Push for ever."""
        while True:
            ticket = self._bell.ticket()
            groups, later = await asyncio.to_thread(self._outbox.due, self._clock.wall(), limit=BATCH)
            if groups:
                await self._push(groups)
                continue
            timeout = None if later is None else max(0.0, later - self._clock.wall())
            waiter = asyncio.ensure_future(ticket.wait())
            timer = None if timeout is None else asyncio.ensure_future(self._clock.sleep(timeout))
            await asyncio.wait([task for task in (waiter, timer) if task], return_when=asyncio.FIRST_COMPLETED)
            for task in (waiter, timer):
                if task is not None:
                    task.cancel()

    async def _push(self, groups: list[Group]) -> None:
        try:
            outcomes = await self._api.push_groups(groups)
        except (Unreachable, Draining, NotRegistered) as error:
            _LOG.info("%d groups wait in the outbox: %s", len(groups), error)
            await self._clock.sleep(RETRY_S)
            return
        settled = []
        wait_s = 0.0
        for outcome in outcomes:
            if outcome.status is PushStatus.RETRY:
                wait_s = max(wait_s, outcome.retry_after_s)
                continue
            settled.append(outcome.id.sequence)
            if outcome.status is PushStatus.DROPPED:
                reason = outcome.reason.value if outcome.reason else "unknown"
                metrics.OUTBOX_DROPPED.labels(reason).inc()
                _LOG.warning("group %d was not taken (%s): %s", outcome.id.sequence, reason, outcome.message)
        await asyncio.to_thread(self._outbox.delete, settled)
        metrics.OUTBOX_GROUPS.set((await asyncio.to_thread(self._outbox.level)).num_groups)
        self._bell.ring()
        if wait_s:
            await self._clock.sleep(wait_s)
