"""Assignments leased ahead of need, so that neither a round trip nor an outage idles the engine.

    keep  waits for the reserve below three quarters of what it should hold, a version, room in the outbox, and the
          time to ask again; unblocked by generate, sync, deliver, time, the coordinator

Guarantees: generation never waits for an answer while the reserve lasts; assignments are begun in the order in which
they were given; a lease that may have run out is not dropped here: whether its group is still wanted is said when it is
pushed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Sequence

from heterorl.common.process.clock import Bell, Clock, ring_or_time
from heterorl.common.types.rollout import WorkAssignment
from heterorl.sampler.rollout.speed import GroupRate
from heterorl.sampler.rollout.work import Work

FULL_ENOUGH = 0.75
SHORT_ASK_S = 1.0
"""After an answer with less than was asked for: what bounds it passes no sooner."""
UNKNOWN_FILLS = 2
"""Before the site's speed is known it holds so many times what the engine has room for."""


class Reserve:
    """What is leased and not yet begun."""

    def __init__(
        self,
        *,
        work: Work,
        room_groups: int,
        work_ahead_s: Callable[[], float],
        rate: GroupRate,
        clock: Clock,
        news: Bell,
        under_way: Callable[[], Collection[int]],
    ) -> None:
        """Join it to who asks.

        Args:
            work: who asks.
            room_groups: groups that the engine computes at once.
            work_ahead_s: how far ahead to lease, seconds at the site's own speed, as far as the coordinator grants it.
            rate: the site's speed.
            clock: time.
            news: rings when there is more.
            under_way: assignments that are begun.
        """
        self.work = work
        self._work_ahead_s = work_ahead_s
        self._room = room_groups
        self._rate = rate
        self._clock = clock
        self._news = news
        self._under_way = under_way
        self._waiting: deque[WorkAssignment] = deque()
        self._is_low = True

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def target(self) -> int:
        """Assignments that it should hold."""
        ahead_s = self._work_ahead_s()
        if not ahead_s:
            return self._room
        rate = self._rate.per_s
        if rate is None:
            return UNKNOWN_FILLS * self._room
        return max(self._room, math.ceil(rate * ahead_s))

    @property
    def missing(self) -> int:
        """Assignments to ask for now; none until it falls below three quarters, then until it is full."""
        if len(self) >= self.target:
            self._is_low = False
        elif len(self) < FULL_ENOUGH * self.target:
            self._is_low = True
        return self.target - len(self) if self._is_low else 0

    def look(self, count: int) -> list[WorkAssignment]:
        """The next assignments, which stay until `drop`."""
        return [self._waiting[place] for place in range(min(count, len(self)))]

    def drop(self, count: int) -> None:
        """Forget the first assignments: they are begun."""
        for _ in range(min(count, len(self))):
            self._waiting.popleft()

    def put_back(self, work: Sequence[WorkAssignment]) -> None:
        """Take assignments back that were not begun after all: they are the next ones."""
        self._waiting.extendleft(reversed(work))

    def clear(self) -> list[int]:
        """Hold nothing any longer; the assignments that were held."""
        held = [assignment.id for assignment in self._waiting]
        self._waiting.clear()
        return held

    async def ask(self, version: int, count: int) -> int:
        """Ask once, with a version that is loaded; how many assignments came."""
        work = await self.work.lease(version, count)
        if work:
            # One that ran out while its group went on, as over a restart, is the same one.
            begun = set(self._under_way())
            self._waiting += [assignment for assignment in work if assignment.id not in begun]
            self._news.ring()
        return len(work)

    async def keep(self, *, bell: Bell, may_ask: Callable[[], int | None]) -> None:
        """Keep it filled for ever.

        Args:
            bell: rings when a version is loaded, or the outbox has room.
            may_ask: the version to ask with; None while nothing may be generated.
        """
        while True:
            tickets = bell.ticket(), self._news.ticket()
            version, count = may_ask(), self.missing
            if version is None or not count:
                await ring_or_time(*tickets, clock=self._clock, seconds=None)
                continue
            wait_s = self.work.ask_time - self._clock.monotonic()
            if wait_s > 0:
                await ring_or_time(*tickets, clock=self._clock, seconds=wait_s)
                continue
            if 0 < await self.ask(version, count) < count:
                self.work.ask_time = max(self.work.ask_time, self._clock.monotonic() + SHORT_ASK_S)
