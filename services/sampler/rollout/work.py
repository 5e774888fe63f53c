"""What a sampler is given to generate: asked for, asked for again when the answer was lost, handed back."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence

from heterorl.common.api import SamplerApi
from heterorl.common.errors import NotRegistered, RemoteError, RunFinished, Unreachable
from heterorl.common.process.clock import Clock
from heterorl.common.process.patience import Patience
from heterorl.common.tasks.task import Task
from heterorl.common.types.common import peer_seconds, peer_words
from heterorl.common.types.rollout import ReturnReason, WorkAssignment
from heterorl.sampler.session import Session

_LOG = logging.getLogger(__name__)
MAX_ASKED = 4096
"""Assignments of one call."""


class Work:
    """Assignments of one sampler; `ask_time` is when the next question is due, by the monotonic clock."""

    def __init__(self, *, api: SamplerApi, session: Session, task: Task, clock: Clock, rng: random.Random) -> None:
        self._api = api
        self._session = session
        self._task = task
        self._clock = clock
        self._patience = Patience(clock=clock, rng=rng)
        self.ask_time = clock.monotonic()
        # Of this process alone: what an earlier one was given may be in the outbox already.
        self._asker = f"{clock.wall():.6f}"
        self._num_answers = 0
        self._asked = 0

    async def lease(self, version: int, count: int) -> tuple[WorkAssignment, ...]:
        """Work for a version, at most so many assignments; where there is none, `ask_time` says when to ask again."""
        # A question whose answer was lost is repeated as it was.
        self._asked = self._asked or min(count, MAX_ASKED)
        try:
            grant = await self._api.lease_work(
                site=self._session.registration.site,
                incarnation=self._session.registration.incarnation,
                max_groups=self._asked,
                policy_version=version,
                request_id=f"{self._asker}/{self._num_answers}",
            )
        except NotRegistered:
            await self._session.register()
            # A coordinator that forgets every registration must not be asked in a circle.
            self.ask_time = self._clock.monotonic() + self._patience.delay_s()
            return ()
        except RunFinished as error:
            _LOG.info("no work: %s", error)
            self._session.drain("the run has ended")
            return ()
        except RemoteError as error:
            # A draining run and a restarting coordinator say the same here; a heartbeat tells which.
            _LOG.log(logging.DEBUG if isinstance(error, Unreachable) else logging.INFO, "no work: %s", error)
            self.ask_time = self._clock.monotonic() + self._patience.next_delay(error)
            return ()
        # Until an answer comes the question is the same one: what a lost answer granted is not given out twice.
        self._num_answers += 1
        asked, self._asked = self._asked, 0
        self.ask_time = self._clock.monotonic()
        # No more than was asked for, and nothing that the task does not have: what is left expires.
        work = tuple(
            assignment
            for assignment in grant.assignments[:asked]
            if 0 <= assignment.prompt_index < self._task.num_prompts
        )
        if work:
            self._patience.reset()
        else:
            _LOG.debug("no work: %s", peer_words(grant.reason))
            self.ask_time += peer_seconds(grant.retry_after_s) or self._patience.delay_s()
        return work

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
