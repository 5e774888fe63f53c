"""The loop that generates: swap, lease, generate, spool.

    generate  waits for a verified version, work, and room in the outbox; unblocked by sync, the coordinator, deliver

Guarantees: without a verified version nothing is generated, nor with an engine that failed: it is given the version
again, ever more rarely, until a swap succeeds; with `swap = "drain"` weights are swapped only between two batches, so
that a completion never mixes versions, and with `in_flight` a batch whose swap failed gives no group; a group is in the
outbox before its assignment is forgotten; whoever holds the lock `batch` never interrupts a batch under way.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from rich.filesize import decimal

from heterorl.common.api import SamplerApi
from heterorl.common.errors import EngineError, RemoteError, StaleWeights
from heterorl.common.generation.engine import Engine
from heterorl.common.model.canary import ScoredText
from heterorl.common.process import metrics
from heterorl.common.process.clock import Bell, Clock, ring_or_time
from heterorl.common.process.patience import Patience
from heterorl.common.pull.pull import PulledVersion
from heterorl.common.types.common import Digest
from heterorl.common.types.policy import NO_VERSION
from heterorl.common.types.rollout import WorkAssignment
from heterorl.common.types.run import CanaryReport
from heterorl.common.types.standstill import RELEASE
from heterorl.common.types.words import peer_words
from heterorl.sampler.config import SamplerConfig
from heterorl.sampler.outbox.outbox import Outbox
from heterorl.sampler.outbox.spooling import Spooling
from heterorl.sampler.policy.sync import PolicySync
from heterorl.sampler.rollout.maker import Batch, RolloutMaker
from heterorl.sampler.rollout.work import Work
from heterorl.sampler.rollout.work_log import WorkLog
from heterorl.sampler.session import NO_ROOT, Reported, Session

_LOG = logging.getLogger(__name__)
ENGINE_CAP_S = 300.0
"""A new engine process loads the whole model: attempts become this rare."""


class Generation:
    """One loop around one engine."""

    def __init__(
        self,
        *,
        config: SamplerConfig,
        api: SamplerApi,
        engine: Engine,
        canary: Sequence[ScoredText] = (),
        maker: RolloutMaker,
        outbox: Outbox,
        policy: PolicySync,
        session: Session,
        clock: Clock,
        bell: Bell,
        batch: asyncio.Lock,
        rng: random.Random,
        now: Callable[[], float],
    ) -> None:
        self._batch = batch
        self.spooling = Spooling(outbox=outbox, delay=config.delay, seed=config.seed, clock=clock, now=now, rng=rng)
        self._work_log = WorkLog()
        self._config = config
        self._api = api
        self._engine = engine
        self._canary = canary
        self._maker = maker
        self._outbox = outbox
        self._policy = policy
        self._session = session
        self._clock = clock
        self._bell = bell
        self._engine_patience = Patience(clock=clock, rng=rng, cap_s=ENGINE_CAP_S)
        self._swap_time = clock.monotonic()
        self._work = Work(config=config, api=api, session=session, task=maker.task, clock=clock, rng=rng)
        self._state_roots: dict[int, Digest] = {}
        self._reported = Reported()

    def reported(self) -> Reported:
        """What a heartbeat says of this."""
        return replace(self._reported, problem=self.spooling.problem or self._policy.problem)

    async def generate(self) -> None:
        """Generate until the run drains and nothing waits for room on the disk."""
        while not self._session.is_draining or self.spooling.num_waiting:
            ticket = self._bell.ticket()
            if self.spooling.num_waiting:
                await self._make_room(ticket)
                continue
            await self._swap()
            level = await asyncio.to_thread(self._outbox.level)
            metrics.OUTBOX_GROUPS.set(level.num_groups)
            metrics.OUTBOX_BYTES.set(level.num_bytes)
            if self._engine.version < 0 and self._policy.take(NO_VERSION) is not None:
                await ring_or_time(ticket, clock=self._clock, seconds=self._swap_time - self._clock.monotonic())
                continue
            if self._engine.version < 0 or level.num_bytes >= self._config.outbox_bytes:
                await ticket.wait()
                continue
            wait_s = self._work.ask_time - self._clock.monotonic()
            if wait_s > 0:
                await ring_or_time(ticket, clock=self._clock, seconds=wait_s)
                continue
            work = await self._work.lease(self._engine.version)
            if work:
                await self._fill(work)

    async def _make_room(self, ticket: asyncio.Event) -> None:
        if self.spooling.retry_s > 0:
            await ring_or_time(ticket, clock=self._clock, seconds=self.spooling.retry_s)
            return
        async with self._batch:
            await self.spooling.retry()
        self._bell.ring()

    async def empty(self) -> None:
        """Push what is held: a drained run waits for no delay."""
        await asyncio.to_thread(self._outbox.release_all)
        self._bell.ring()
        is_said = False
        while True:
            ticket = self._bell.ticket()
            level = await asyncio.to_thread(self._outbox.level)
            if not level.num_groups:
                return
            if not is_said:
                _LOG.info("draining: %d groups are left to deliver", level.num_groups)
                is_said = True
            await ticket.wait()

    async def _swap(self) -> None:
        pulled = self._due()
        if pulled is None:
            return
        async with self._batch:
            is_loaded = await self._load(pulled)
        if is_loaded:
            await self._compare(pulled.version)

    def _due(self) -> PulledVersion | None:
        is_time = self._clock.monotonic() >= self._swap_time
        return self._policy.take(self._engine.version) if is_time else None

    async def _load(self, pulled: PulledVersion) -> bool:
        started = self._clock.monotonic()
        # Before the engine has it: a batch under way may end with it at once.
        self._state_roots[pulled.version] = pulled.manifest.state_root
        try:
            await asyncio.to_thread(self._engine.load, pulled.arena, pulled.version)
        except EngineError as error:
            self._note_failure(error)
            return False
        except OSError as error:
            # An engine in processes of its own takes weights from files.
            self._note_failure(
                EngineError(
                    f"the weights of version {pulled.version} cannot be written: {error}",
                    action="free space under state_dir or engine.weights_dir",
                )
            )
            return False
        swap_s = self._clock.monotonic() - started
        _LOG.info(
            "version %d is used: %s in %.1f s, applied in %.1f s, swapped in %.1f s",
            pulled.version, decimal(self._policy.fetched_bytes), self._policy.fetch_s, self._policy.apply_s, swap_s,
        )  # fmt: skip
        self._engine_patience.reset()
        metrics.SWAP_SECONDS.observe(swap_s)
        metrics.POLICY_VERSION.set(pulled.version)
        self._note_age("apply")
        self._reported = replace(
            self._reported,
            policy_version=pulled.version,
            state_root=pulled.manifest.state_root,
            apply_s=self._policy.apply_s,
        )
        # What was refused to the old version may be given to the new one.
        self._work.ask_time = self._clock.monotonic()
        return True

    async def _swap_during(self, batch: asyncio.Future[Batch]) -> None:
        """Give the engine every version that is staged until the batch under way ends, or a swap fails."""
        while not batch.done():
            ticket = self._bell.ticket()
            pulled = self._due()
            if pulled is None:
                ring = asyncio.ensure_future(ticket.wait())
                waiting: list[asyncio.Future[Any]] = [batch, ring]
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                ring.cancel()
            elif await self._load(pulled):
                await self._compare(pulled.version)
            else:
                return

    async def _compare(self, version: int) -> None:
        """Let the coordinator compare the engine with the learner before anything is generated with the version."""
        if not self._canary:
            return
        try:
            scores = await asyncio.to_thread(self._engine.score, self._canary)
        except EngineError as error:
            self._note_failure(error)
            return
        if not scores:
            return
        report = CanaryReport(
            site=self._session.registration.site,
            incarnation=self._session.registration.incarnation,
            version=version,
            logprobs=tuple(float(value) for score in scores for value in score),
        )
        try:
            verdict = await self._api.report_canary(report)
        except RemoteError as error:
            # Nothing is generated without a lease either, and most reasons for this refuse that too.
            _LOG.info("no canary of version %d: %s", version, error)
            return
        if verdict.quarantine:
            _LOG.error(
                "this site is in quarantine and gets no work: %s; a version that it scores right ends that, or an"
                " operator: %s",
                peer_words(verdict.quarantine),
                RELEASE,
            )

    def _note_failure(self, error: EngineError) -> None:
        metrics.ENGINE_FAILURES.labels("stale" if isinstance(error, StaleWeights) else "died").inc()
        self._reported = replace(self._reported, policy_version=NO_VERSION, state_root=NO_ROOT)
        self._swap_time = self._clock.monotonic() + self._engine_patience.delay_s()
        _LOG.error("nothing is generated until the engine has loaded a version: %s", error)

    async def _fill(self, work: Sequence[WorkAssignment]) -> None:
        try:
            batch = await self._make(work)
        except EngineError as error:
            # A swap that failed during the batch has been noted.
            if self._reported.policy_version >= 0:
                self._note_failure(error)
            await self._work.abandon(tuple(assignment.id for assignment in work))
            return
        self._bell.ring()
        metrics.GENERATE_SECONDS.observe(batch.generation_s)
        self._note_age("generate", count=len(batch.groups))
        metrics.TOKENS.inc(batch.num_tokens)
        level = await asyncio.to_thread(self._outbox.level)
        self._work_log.note(
            batch,
            now=self._clock.monotonic(),
            version=self._engine.version,
            head=self._policy.head_version,
            level=level,
        )
        tokens_per_s = batch.num_tokens / batch.generation_s if batch.generation_s else 0.0
        self._reported = replace(self._reported, tokens_per_s=tokens_per_s)
        if batch.failed:
            metrics.REWARD_ERRORS.inc(len(batch.failed))
            await self._work.abandon(batch.failed)

    async def _make(self, work: Sequence[WorkAssignment]) -> Batch:
        """Generate and spool; the lock covers both, so that nothing generated is lost to a stop."""
        async with self._batch:
            self._state_roots = {self._engine.version: self._reported.state_root}
            making = asyncio.ensure_future(
                asyncio.to_thread(
                    self._maker.make,
                    work,
                    state_roots=self._state_roots,
                    first_sequence=self._outbox.next_sequence,
                )
            )
            try:
                if self._config.swap == "in_flight":
                    await self._swap_during(making)
            finally:
                await asyncio.wait([making])
            batch = making.result()
            await self.spooling.put(batch.groups)
        return batch

    def _note_age(self, stage: str, *, count: int = 1) -> None:
        age_s = self._policy.age_s(self._engine.version)
        if age_s is not None:
            for _ in range(count):
                metrics.SAMPLER_POLICY_AGE_SECONDS.labels(stage).observe(age_s)
