"""The sampler's session with the coordinator: registration, heartbeats and orders.

REGISTER registers again. DRAIN finishes and pushes groups in flight, then ends. STOP gives up groups in flight; the
outbox stays durable. A heartbeat that fails is not retried before the next interval. A final refusal of this node ends
the process.
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
from heterorl.common.errors import CorruptData, NotRegistered, PermissionDenied, RemoteError, Unauthenticated
from heterorl.common.process.backoff import Backoff, log_level
from heterorl.common.process.clock import Bell, Clock, ends_within
from heterorl.common.types.common import peer_words
from heterorl.common.types.policy import version_words
from heterorl.common.types.rollout import ReturnReason
from heterorl.common.types.run import Command, Heartbeat, Registration
from heterorl.sampler.outbox.outbox import Outbox
from heterorl.sampler.trust_record import TrustRecord, check_head

_LOG = logging.getLogger(__name__)
LAST_REPORT_S = 3.0
"""Time for the last report of a sampler that stops."""
MAX_HELD = 1 << 16
"""Assignments stated at a registration; with more, the coordinator waits for their groups or their leases' ends."""
MAX_PROBLEM = 1000
"""Characters of a stated problem; a coordinator refuses the heartbeat with a much longer one."""


@dataclass(kw_only=True, eq=False, repr=False)
class Session:
    """Registration, heartbeats and orders.
    `left` are a killed process's assignments until they are returned."""

    api: SamplerApi
    registration: Registration
    outbox: Outbox
    record: TrustRecord
    heartbeat_s: float
    clock: Clock
    bell: Bell
    rng: random.Random
    left: Sequence[int] = ()

    def __post_init__(self) -> None:
        self.is_draining = False
        self.numbering = asyncio.Lock()
        """Held while groups get their sequences."""
        self.stopped = asyncio.Event()
        self.work_ahead_s = self.registration.work_ahead_s
        """Seconds of work that the coordinator lets this site lease ahead; at first the site's own value."""
        # No process will answer what an earlier one leased and did not spool: the first registration says so.
        self._is_new = True

    async def register(self) -> None:
        """Register; retries without limit.

        Raises ContractMismatch: this node disagrees with the run; RunReplaced: the run has lost versions that this
        sampler verified.
        """
        _LOG.info("site %s registers as incarnation %s", self.registration.site, self.registration.incarnation)
        backoff = Backoff(clock=self.clock, rng=self.rng)
        while True:
            # Read before asking: newer versions may be verified here before the answer comes.
            seen_version = self.record.highest_version
            # All below is settled, so a coordinator that knows less of it need not wait.
            lowest = await asyncio.to_thread(self.outbox.lowest_sequence)
            try:
                held = await asyncio.to_thread(self.outbox.assignments) if self._is_new else None
                if held is not None:
                    await self._return_left(held)
                    held = held if len(held) <= MAX_HELD else None
                answer = await self.api.register(
                    dataclasses.replace(self.registration, lowest_sequence=lowest, held=held)
                )
                check_head(answer.head_version, seen_version=seen_version)
                # Groups that are being written have their sequences.
                async with self.numbering:
                    await asyncio.to_thread(self.outbox.skip_to, answer.next_sequence)
                self._is_new = False
                self.work_ahead_s = min(self.registration.work_ahead_s, answer.work_ahead_s)
                break
            except (RemoteError, CorruptData) as error:
                delay_s = backoff.delay_s() if isinstance(error, CorruptData) else backoff.next_delay(error)
                _LOG.log(log_level(error), "the sampler registers again in %.1f s: %s", delay_s, error)
                await self.clock.sleep(delay_s)
        run = peer_words(answer.run_id)
        _LOG.info("the sampler is registered with run %s, at %s", run, version_words(answer.head_version))

    async def _return_left(self, spooled: Sequence[int]) -> None:
        """Return a killed process's assignments first: one may have killed it."""
        lost = sorted(set(self.left) - set(spooled))
        if lost:
            # A coordinator that lost the registration holds no assignments.
            with contextlib.suppress(NotRegistered):
                await self.api.abandon_work(
                    site=self.registration.site, incarnation=self.registration.incarnation, assignments=lost,
                    reason=ReturnReason.ENGINE_FAILED,
                )  # fmt: skip
                _LOG.warning(
                    "the last process of this site was killed: its %d prompts in flight wait behind others;"
                    " after three such ends a prompt is given up",
                    len(lost),
                )
        self.left = ()

    async def beat(self, reported: Callable[[], Heartbeat]) -> None:
        """Report and obey forever; `reported` is called for each heartbeat.

        Raises PermissionDenied, Unauthenticated: the coordinator refuses this node for good.
        """
        while True:
            report = _sendable(reported())
            try:
                commands = await self.api.heartbeat(report)
            except (RemoteError, CorruptData) as error:
                if isinstance(error, (PermissionDenied, Unauthenticated)) and not error.is_transient:
                    raise
                _LOG.log(log_level(error), "the heartbeat failed: %s", error)
                commands = ()
            await self._obey(commands)
            await self.clock.sleep(self.heartbeat_s)

    async def say_stopped(self, reported: Heartbeat) -> None:
        """Report once that this sampler stops in order.

        A site that stopped does not count as silent.
        """
        report = dataclasses.replace(_sendable(reported), is_stopped=True)
        with contextlib.suppress(RemoteError, CorruptData):
            await ends_within(self.api.heartbeat(report), clock=self.clock, seconds=LAST_REPORT_S)

    async def _obey(self, commands: Sequence[Command]) -> None:
        if Command.STOP in commands:
            _LOG.info("the sampler stops: the coordinator asks for it")
            self.stopped.set()
        if Command.DRAIN in commands:
            more = "raise max_steps, start the learner, and samplers when it holds the lease"
            self.drain(f"the run is complete (to go on: {more})")
        if Command.REGISTER in commands:
            await self.register()

    def drain(self, reason: str) -> None:
        if self.is_draining:
            return
        self.is_draining = True
        _LOG.info("the sampler drains: %s", reason)
        self.bell.ring()


def _sendable(report: Heartbeat) -> Heartbeat:
    return dataclasses.replace(report, problem=peer_words(report.problem, most=MAX_PROBLEM))
