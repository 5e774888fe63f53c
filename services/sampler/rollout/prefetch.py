"""What a sampler is given to generate: asked for, leased ahead of need, handed back; and its speed, which says how far.

    keep  waits for the reserve below three quarters of what it should hold, a version, room in the outbox, and the
          time to ask again; unblocked by generate, sync, deliver, time, the coordinator

Guarantees: a question whose answer was lost is repeated as it was; neither a round trip nor an outage idles the engine
while the reserve lasts; assignments are begun in the order in which they were given; a lease that may have run out is
not dropped here: whether its group is still wanted is said when it is pushed.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import random
from collections import deque
from collections.abc import Callable, Collection, Sequence

from heterorl.common.api import SamplerApi
from heterorl.common.errors import NotRegistered, RemoteError, RunFinished, Unreachable
from heterorl.common.process.backoff import Backoff
from heterorl.common.process.clock import Bell, Clock, ring_or_time
from heterorl.common.types.common import peer_seconds, peer_words
from heterorl.common.types.evaluation import EvaluationSet
from heterorl.common.types.rollout import ReturnReason, WorkAssignment, WorkGrant
from heterorl.sampler.site_session import Session

_LOG = logging.getLogger(__name__)
MAX_ASKED = 4096
"""Assignments of one call."""
FULL_ENOUGH = 0.75
SHORT_ASK_S = 1.0
"""After an answer with less than was asked for: what bounds it passes no sooner."""
UNKNOWN_FILLS = 2
"""Before the site's speed is known it holds so many times what the engine has room for."""
WINDOW_S = 60.0
MEMORY_S = 300.0
"""Of work: what lies so far back counts e times less."""


class WorkClient:
    """Assignments of one sampler; `ask_time` is when the next question is due, by the monotonic clock."""

    def __init__(
        self, *, api: SamplerApi, session: Session, clock: Clock, rng: random.Random, name: str = "generate"
    ) -> None:
        self._api = api
        self._session = session
        self._clock = clock
        self._backoff = Backoff(clock=clock, rng=rng)
        self.ask_time = clock.monotonic()
        # Of this process alone: what an earlier one was given may be in the outbox already.
        self._asker = f"{name}/{clock.wall():.6f}"
        self._num_answers = 0
        self._asked = 0

    async def ask(
        self, version: int, count: int, *, num_prompts: int, sets: Sequence[EvaluationSet] = ()
    ) -> WorkGrant | None:
        """Work for a version; where there is none, `ask_time` says when to ask again.

        Args:
            version: that the engine has.
            count: largest number of assignments.
            num_prompts: prompts that there are; assignments of others are left to expire.
            sets: with some, held-out prompts of these are asked for.

        Returns:
            None where the coordinator did not say.
        """
        # A question whose answer was lost is repeated as it was.
        self._asked = self._asked or min(count, MAX_ASKED)
        try:
            grant = await self._api.lease_work(
                site=self._session.registration.site,
                incarnation=self._session.registration.incarnation,
                max_groups=self._asked,
                policy_version=version,
                request_id=f"{self._asker}/{self._num_answers}",
                sets=sets,
            )
        except NotRegistered:
            await self._session.register()
            # A coordinator that forgets every registration must not be asked in a circle.
            self.ask_time = self._clock.monotonic() + self._backoff.delay_s()
            return None
        except RunFinished as error:
            _LOG.info("no work: %s", error)
            self._session.drain("the run has ended")
            return None
        except RemoteError as error:
            # A draining run and a restarting coordinator say the same here; a heartbeat tells which.
            _LOG.log(logging.DEBUG if isinstance(error, Unreachable) else logging.INFO, "no work: %s", error)
            self.ask_time = self._clock.monotonic() + self._backoff.next_delay(error)
            return None
        # Until an answer comes the question is the same one: what a lost answer granted is not given out twice.
        self._num_answers += 1
        asked, self._asked = self._asked, 0
        self.ask_time = self._clock.monotonic()
        # No more than was asked for, and nothing that the task does not have: what is left expires.
        work = tuple(
            assignment for assignment in grant.assignments[:asked] if 0 <= assignment.prompt_index < num_prompts
        )
        if work:
            self._backoff.reset()
        else:
            _LOG.debug("no work: %s", peer_words(grant.reason))
            self.ask_time += peer_seconds(grant.retry_after_s) or self._backoff.delay_s()
        return dataclasses.replace(grant, assignments=work)

    async def abandon(self, assignments: Sequence[int], reason: ReturnReason | None = None) -> None:
        """Hand work back, with the reason for which it gives no group; where that fails it expires."""
        for first in range(0, len(assignments), MAX_ASKED):
            some = tuple(assignments[first : first + MAX_ASKED])
            try:
                await self._api.abandon_work(
                    site=self._session.registration.site,
                    incarnation=self._session.registration.incarnation,
                    assignments=some,
                    reason=reason,
                )
            except RemoteError as error:
                _LOG.info("%d assignments are left to expire: %s", len(assignments) - first, error)
                return


class Prefetch:
    """What is leased and not yet begun."""

    def __init__(
        self,
        *,
        work: WorkClient,
        num_prompts: int,
        room_groups: int,
        work_ahead_s: Callable[[], float],
        rate: GroupRate,
        clock: Clock,
        news: Bell,
        in_flight: Callable[[], Collection[int]],
    ) -> None:
        """Lease ahead for an engine that computes `room_groups` at once.

        `work_ahead_s` is how far the coordinator lets this site go, at the speed of `rate`; `under_way` has the
        assignments that are begun.
        """
        self.work = work
        self._num_prompts = num_prompts
        self._work_ahead_s = work_ahead_s
        self._room = room_groups
        self._rate = rate
        self._clock = clock
        self._news = news
        self._in_flight = in_flight
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
        grant = await self.work.ask(version, count, num_prompts=self._num_prompts)
        if grant is None or not grant.assignments:
            return 0
        # One that ran out while its group went on, as over a restart, is the same one.
        begun = set(self._in_flight())
        self._waiting += [assignment for assignment in grant.assignments if assignment.id not in begun]
        self._news.ring()
        return len(grant.assignments)

    async def keep(self, *, bell: Bell, may_ask: Callable[[], int | None]) -> None:
        """Keep it filled for ever.

        `bell` rings when a version is loaded or the outbox has room; `may_ask` is the version to ask with, None while
        nothing may be generated.
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


class TokenRate:
    """Tokens a second over the last minute."""

    def __init__(self) -> None:
        self._ends: deque[tuple[float, int]] = deque()
        self._total = 0
        self._began_at: float | None = None

    def begin(self, now: float) -> None:
        """Note that something is under way: until a minute has passed, the rate is over the time since then."""
        if self._began_at is None:
            self._began_at = now

    def add(self, tokens: int, now: float) -> None:
        """Count the tokens of what ended."""
        self.begin(now)
        self._ends.append((now, tokens))
        self._total += tokens

    def per_s(self, now: float) -> float:
        """Tokens a second."""
        while self._ends and self._ends[0][0] <= now - WINDOW_S:
            self._total -= self._ends.popleft()[1]
        span_s = min(WINDOW_S, now - self._began_at) if self._began_at is not None else 0.0
        return self._total / span_s if span_s > 0 else 0.0


class GroupRate:
    """Groups a second of work, an exponential mean: a pause of the engine changes nothing."""

    def __init__(self) -> None:
        self._groups = self._seconds = 0.0
        self._since: float | None = None

    def work(self, is_busy: bool, now: float) -> None:
        """Note whether anything is under way from now on."""
        self._pass(now)
        self._since = now if is_busy else None

    def add(self, groups: int, now: float) -> None:
        """Count groups that ended."""
        self._pass(now)
        self._groups += groups

    @property
    def per_s(self) -> float | None:
        """Groups a second; None before the first."""
        return self._groups / self._seconds if self._groups and self._seconds > 0 else None

    def _pass(self, now: float) -> None:
        if self._since is None:
            return
        seconds, self._since = now - self._since, now
        fading = math.exp(-seconds / MEMORY_S)
        # The mean of what fades within the time itself, so that a long interval does not weigh beyond its memory.
        self._groups *= fading
        self._seconds = self._seconds * fading + MEMORY_S * (1 - fading)
