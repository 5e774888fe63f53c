"""The sampler as the coordinator knows it: who it is, what it reports, what it was ordered to do.

    register  waits for a coordinator whose learner has stated the contract; unblocked by the coordinator
    beat      waits for the heartbeat's interval; unblocked by time

Orders: REGISTER registers again; DRAIN finishes and pushes what is under way, then ends; STOP gives up what is under
way, and what remains in the outbox is durable. A heartbeat that fails is forgotten: the next one is the next attempt.
One that is refused for who this node is ends the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from heterorl.common.api import SamplerApi
from heterorl.common.errors import (
    CorruptData,
    NotRegistered,
    PermissionDenied,
    RemoteError,
    Unauthenticated,
    Unreachable,
)
from heterorl.common.process import metrics
from heterorl.common.process.backoff import Backoff
from heterorl.common.process.clock import Bell, Clock
from heterorl.common.types.common import Digest, peer_words
from heterorl.common.types.policy import NO_VERSION
from heterorl.common.types.rollout import ReturnReason
from heterorl.common.types.run import Command, Heartbeat, Registration
from heterorl.sampler.outbox.outbox import Outbox
from heterorl.sampler.trust_record import TrustRecord, check_head

_LOG = logging.getLogger(__name__)
NO_ROOT = Digest("")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported:
    """What a heartbeat says of generation; `policy_version` is NO_VERSION while nothing can be generated with."""

    policy_version: int = NO_VERSION
    state_root: Digest = NO_ROOT
    tokens_per_s: float = 0.0
    apply_s: float = 0.0
    problem: str = ""
    """Why nothing is generated, or the newest version is not used; empty while all is well."""


class Session:
    """Registration, heartbeats and orders."""

    def __init__(
        self,
        *,
        api: SamplerApi,
        registration: Registration,
        outbox: Outbox,
        record: TrustRecord,
        heartbeat_s: float,
        clock: Clock,
        bell: Bell,
        numbering: asyncio.Lock,
        rng: random.Random,
        left: Sequence[int] = (),
    ) -> None:
        """Join it; `left` is what an earlier process had under way when it was killed."""
        self.registration = registration
        self.is_draining = False
        self.stopped = asyncio.Event()
        self._api = api
        self._outbox = outbox
        self._record = record
        self._heartbeat_s = heartbeat_s
        self._clock = clock
        self._bell = bell
        self._numbering = numbering
        self._rng = rng
        self.work_ahead_s = registration.work_ahead_s
        """How far ahead the coordinator lets this site lease, seconds; until it says so, what the site declares."""
        # What an earlier process leased and did not spool nobody will answer; said once, this process leases its own.
        self._is_new = True
        self._left = tuple(left)

    async def register(self) -> None:
        """Register, however long it takes.

        Raises:
            ContractMismatch: this node disagrees with the run.
            RunReplaced: the run has lost versions that this sampler verified.
        """
        _LOG.info("registering site %s, incarnation %s", self.registration.site, self.registration.incarnation)
        backoff = Backoff(clock=self._clock, rng=self._rng)
        while True:
            # Read before asking: while the answer is under way, newer versions may be verified here.
            seen_version = self._record.highest_version
            # What lies below is settled for good, so a coordinator that knows less of it need not wait for it.
            lowest = await asyncio.to_thread(self._outbox.lowest_sequence)
            try:
                held = await asyncio.to_thread(self._outbox.assignments) if self._is_new else None
                if held is not None:
                    await self._return_left(held)
                answer = await self._api.register(
                    dataclasses.replace(self.registration, lowest_sequence=lowest, held=held)
                )
                check_head(answer.head_version, seen_version=seen_version)
                await self._skip_to(answer.next_sequence)
                self._is_new = False
                self.work_ahead_s = min(self.registration.work_ahead_s, answer.work_ahead_s)
                break
            except (RemoteError, CorruptData) as error:
                delay_s = backoff.delay_s() if isinstance(error, CorruptData) else backoff.next_delay(error)
                # The link says when nobody answers, and when somebody does again.
                level = logging.DEBUG if isinstance(error, Unreachable) else logging.INFO
                _LOG.log(level, "registering waits %.1f s: %s", delay_s, error)
                await self._clock.sleep(delay_s)
        _LOG.info("registered with run %s at version %d", peer_words(answer.run_id), answer.head_version)

    async def _return_left(self, spooled: Sequence[int]) -> None:
        """Return, before the rest is opened, what a process that was killed had under way: one row may be why."""
        lost = sorted(set(self._left) - set(spooled))
        if lost:
            # Of a coordinator that lost the registration, nothing is held.
            with contextlib.suppress(NotRegistered):
                await self._api.abandon_work(
                    site=self.registration.site, incarnation=self.registration.incarnation, assignments=lost,
                    reason=ReturnReason.ENGINE_FAILED,
                )  # fmt: skip
                _LOG.warning(
                    "the last process here was killed: the %d prompts that it had under way wait behind others;"
                    " after three such ends a prompt is given up",
                    len(lost),
                )
        self._left = ()

    async def _skip_to(self, sequence: int) -> None:
        if sequence > self._outbox.next_sequence:
            # Groups that are being written have their sequences already.
            async with self._numbering:
                await asyncio.to_thread(self._outbox.skip_to, sequence)

    async def beat(self, reported: Callable[[], Reported]) -> None:
        """Report and obey for ever; `reported` is asked at each heartbeat.

        Raises:
            PermissionDenied, Unauthenticated: no call of this node is taken any more; nothing else would notice while
                there is no version to generate with.
        """
        while True:
            level = self._outbox.level()
            state = reported()
            report = Heartbeat(
                site=self.registration.site,
                incarnation=self.registration.incarnation,
                policy_version=state.policy_version,
                state_root=state.state_root,
                tokens_per_s=state.tokens_per_s,
                outbox_groups=level.num_groups,
                apply_s=state.apply_s,
                problem=state.problem,
            )
            sent = self._clock.monotonic()
            try:
                commands = await self._api.heartbeat(report)
                metrics.RTT_SECONDS.observe(self._clock.monotonic() - sent)
            except (RemoteError, CorruptData) as error:
                if isinstance(error, (PermissionDenied, Unauthenticated)) and not error.is_transient:
                    raise
                _LOG.log(logging.DEBUG if isinstance(error, Unreachable) else logging.INFO, "no heartbeat: %s", error)
                commands = ()
            await self._obey(commands)
            await self._clock.sleep(self._heartbeat_s)

    async def _obey(self, commands: Sequence[Command]) -> None:
        if Command.STOP in commands:
            _LOG.info("stopping: the coordinator asks for it")
            self.stopped.set()
        if Command.DRAIN in commands:
            self.drain("the coordinator asks for it")
        if Command.REGISTER in commands:
            await self.register()

    def drain(self, reason: str) -> None:
        """Take no more work."""
        if self.is_draining:
            return
        self.is_draining = True
        _LOG.info("draining: %s", reason)
        self._bell.ring()
