"""Work leased ahead of need, sized by the sampler's speed.

A question whose answer was lost is repeated unchanged, so that work is not granted twice. Assignments begin in the
order of the lease. An expired lease is dropped once others are granted; a link that is down drops none.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from heterorl.common.errors import NotRegistered, RemoteError, RunFinished
from heterorl.common.process.backoff import Backoff, is_transient, log_level
from heterorl.common.process.clock import Bell, ring_or_time
from heterorl.common.types.common import peer_seconds, peer_words
from heterorl.common.types.evaluation import EvaluationSet
from heterorl.common.types.rollout import MAX_ASSIGNMENTS, ReturnReason, WorkAssignment, WorkGrant
from heterorl.sampler.site_session import Session

_LOG = logging.getLogger(__name__)
FULL_ENOUGH = 0.75
SHORT_ASK_S = 1.0
"""Wait after an answer with fewer assignments than asked."""
UNKNOWN_FILLS = 2
"""Fills of the engine to hold before the site's speed is known."""
TOKENS_S, GROUPS_S = 60.0, 300.0
"""Time constants of the mean speeds, seconds."""


class WorkClient:
    """Leases and returns a sampler's work; asks next at monotonic `ask_time`."""

    def __init__(self, session: Session, *, name: str = "generate") -> None:
        self.session, self.clock = session, session.clock
        self._backoff = Backoff(clock=self.clock, rng=session.rng)
        self.ask_time = self.clock.monotonic()
        # Unique to this process: groups of an earlier one's work may be in the outbox.
        self._asker = f"{name}/{self.clock.wall():.6f}"
        self._num_answers = 0
        self._asked = 0

    async def ask(
        self, version: int, count: int, *, num_prompts: int, sets: Sequence[EvaluationSet] = ()
    ) -> WorkGrant | None:
        """Lease work for the engine's `version`; without work, `ask_time` is set.

        Assignments of prompts beyond `num_prompts` are left to expire. With `sets`, held-out prompts are leased.
        Returns None if the coordinator did not answer.
        """
        own = self.session.registration
        # Repeated unchanged after a lost answer.
        self._asked = self._asked or min(count, MAX_ASSIGNMENTS)
        try:
            grant = await self.session.api.lease_work(
                site=own.site,
                incarnation=own.incarnation,
                max_groups=self._asked,
                policy_version=version,
                request_id=f"{self._asker}/{self._num_answers}",
                sets=sets,
            )
        except NotRegistered:
            await self.session.register()
            # Without the delay a coordinator that forgets registrations would be asked in a tight loop.
            self.ask_time = self.clock.monotonic() + self._backoff.delay_s()
            return None
        except RunFinished as error:
            _LOG.info("the coordinator gives no work: %s", error)
            self.session.drain("the run has ended")
            return None
        except RemoteError as error:
            # A draining run and a restarting coordinator answer alike; the heartbeat tells which.
            _LOG.log(log_level(error), "the coordinator gives no work: %s", error)
            self.ask_time = self.clock.monotonic() + self._backoff.next_delay(error)
            return None
        # The request id changes only after an answer: a lost answer is not granted twice.
        self._num_answers += 1
        asked, self._asked = self._asked, 0
        self.ask_time = self.clock.monotonic()
        # At most what was asked for, and only prompts of the task; other assignments expire.
        work = tuple(
            assignment for assignment in grant.assignments[:asked] if 0 <= assignment.prompt_index < num_prompts
        )
        if work:
            self._backoff.reset()
        else:
            _LOG.debug("the coordinator gives no work: %s", peer_words(grant.reason))
            self.ask_time += peer_seconds(grant.retry_after_s) or self._backoff.delay_s()
        return dataclasses.replace(grant, assignments=work)

    async def abandon(self, assignments: Sequence[int], reason: ReturnReason | None = None) -> bool:
        """Return assignments with a reason; False: a later call may succeed."""
        own = self.session.registration
        try:
            await self.session.api.abandon_work(
                site=own.site, incarnation=own.incarnation, assignments=assignments, reason=reason
            )
        except RemoteError as error:
            _LOG.log(log_level(error), "%d assignments are not taken back: %s", len(assignments), error)
            return not is_transient(error)
        return True


@dataclass(kw_only=True, eq=False, repr=False)
class Prefetch:
    """Assignments leased and not begun, for an engine of `room_groups` groups.

    The coordinator limits seconds of work, at the speed of `rate`. `begun` has the assignments that began and are
    neither on disk nor taken back; `spooled` blocks, and has those with groups or turns on disk, or None.
    """

    work: WorkClient
    num_prompts: int
    room_groups: int
    rate: Rate
    news: Bell
    begun: Callable[[], Collection[int]]
    spooled: Callable[[], Collection[int] | None]

    def __post_init__(self) -> None:
        self._waiting: deque[WorkAssignment] = deque()
        self._ends: dict[int, float] = {}
        """When the leases of waiting assignments end, and of those that began."""
        self._is_low = True
        self._skipped: set[int] = set()
        """Granted again while their groups were here, until their end is known."""
        self._asking = asyncio.Lock()
        self._is_over = False

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def target(self) -> int:
        ahead_s = self.work.session.work_ahead_s
        if not ahead_s:
            return self.room_groups
        rate = self.rate.per_s(self.work.clock.monotonic())
        if not rate:
            return UNKNOWN_FILLS * self.room_groups
        return max(self.room_groups, math.ceil(rate * ahead_s))

    @property
    def missing(self) -> int:
        """Assignments to ask for: none above three quarters, then until full."""
        num_leased = len(self) - len(self._expired())
        if num_leased >= self.target:
            self._is_low = False
        elif num_leased < FULL_ENOUGH * self.target:
            self._is_low = True
        return self.target - num_leased if self._is_low else 0

    def _expired(self) -> set[int]:
        """Waiting assignments whose leases ended: others may draw them."""
        now = self.work.clock.monotonic()
        return {each.id for each in self._waiting if self._ends.get(each.id, math.inf) <= now}

    def look(self, count: int) -> list[WorkAssignment]:
        """The next assignments, which stay until `drop`."""
        return [self._waiting[place] for place in range(min(count, len(self)))]

    def drop(self, count: int) -> None:
        for _ in range(min(count, len(self))):
            self._waiting.popleft()

    def put_back(self, work: Sequence[WorkAssignment]) -> None:
        self._waiting.extendleft(reversed(work))
        # One that was granted again meanwhile will be drawn.
        self._skipped -= {assignment.id for assignment in work}

    def clear(self) -> list[int]:
        held = [assignment.id for assignment in self._waiting]
        self._waiting.clear()
        self._ends.clear()
        return held

    async def end(self) -> list[int]:
        """Ask no more; returns what waits, and what has no group here.

        An open question is answered first: what it gets would stay leased.
        """
        self._is_over = True
        async with self._asking:
            over = self._skipped - await self._elsewhere()
        self._skipped -= over
        return [*self.clear(), *sorted(over)]

    async def ask(self, version: int, count: int) -> int:
        """Ask once with the loaded version; returns how many assignments came."""
        async with self._asking:
            before = await self._elsewhere()
            await self._hand_back(before)
            if self._is_over:
                return 0
            grant = await self.work.ask(version, count, num_prompts=self.num_prompts)
            if grant is None or not grant.assignments:
                return 0
            # An expired assignment that waits, is drawn or is on disk, as over an outage, may be granted again. Its
            # group may leave the disk before this answer comes.
            elsewhere = before | await self._elsewhere()
            now, granted = self.work.clock.monotonic(), {assignment.id for assignment in grant.assignments}
            expired = self._expired() - granted
            waiting = [assignment for assignment in self._waiting if assignment.id not in expired]
            known = elsewhere | {assignment.id for assignment in waiting}
            new = [assignment for assignment in grant.assignments if assignment.id not in known]
            self._waiting = deque([*waiting, *new])
            here = {assignment.id for assignment in self._waiting}
            for assignment in grant.assignments:
                if assignment.id in here:
                    self._ends[assignment.id] = now + max(assignment.lease_s, SHORT_ASK_S)
            # One that began comes back where the engine refuses it.
            for number in self._ends.keys() - here - elsewhere:
                del self._ends[number]
            # A coordinator that restarted gave fresh terms to those that expired here.
            self._skipped = (self._skipped | granted & elsewhere | expired) - here
            self.news.ring()
            return len(grant.assignments)

    async def _elsewhere(self) -> set[int]:
        # A group moves from memory to the disk.
        begun = set(self.begun())
        spooled = await asyncio.to_thread(self.spooled)
        return begun | set(spooled or ()) | set(self.begun())

    async def _hand_back(self, elsewhere: set[int]) -> None:
        """Return what was skipped and has no group here any more.

        A group that was dropped, for example as too stale, may have opened it before it was granted again. The others
        are answered, and the coordinator ignores them.
        """
        over = self._skipped - elsewhere
        if over and await self.work.abandon(sorted(over)):
            self._skipped -= over

    async def keep(self, *, bell: Bell, may_ask: Callable[[], int | None]) -> None:
        """Keep it filled forever.

        `bell` rings when a version is loaded or the outbox has room; `may_ask` returns the version to ask with, or
        None.
        """
        clock = self.work.clock
        while True:
            tickets = bell.ticket(), self.news.ticket()
            version, count = may_ask(), self.missing
            if version is None or not count:
                await ring_or_time(*tickets, clock=clock, seconds=None)
                continue
            wait_s = self.work.ask_time - clock.monotonic()
            if wait_s > 0:
                await ring_or_time(*tickets, clock=clock, seconds=wait_s)
                continue
            if 0 < await self.ask(version, count) < count:
                self.work.ask_time = max(self.work.ask_time, clock.monotonic() + SHORT_ASK_S)


class Rate:
    """Units per second of work, an exponential mean without pauses."""

    def __init__(self, memory_s: float) -> None:
        self._memory_s = memory_s
        self._units = self._seconds = 0.0
        self._since: float | None = None

    def work(self, is_busy: bool, now: float) -> None:
        """Note whether work is in flight from now on."""
        self._pass(now)
        self._since = now if is_busy else None

    def add(self, units: int, now: float) -> None:
        self._pass(now)
        self._units += units

    def per_s(self, now: float) -> float:
        self._pass(now)
        return self._units / self._seconds if self._seconds > 0 else 0.0

    def _pass(self, now: float) -> None:
        if self._since is None:
            return
        seconds, self._since = now - self._since, now
        fading = math.exp(-seconds / self._memory_s)
        # Averaged over the fading interval, so that a long one weighs no more than the memory.
        self._units *= fading
        self._seconds = self._seconds * fading + self._memory_s * (1 - fading)
