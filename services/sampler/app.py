"""Wires a sampler and holds its loops.

    loop       waits for                                    unblocked by
    watch      news of the head                             the coordinator; a broken link (it dials again)
    sync       a version that the delay model lets through  watch, or time
    generate   a verified version; work; room in the outbox sync; the coordinator; delivery
    deliver    a group that is due                          generate, or time
    beat       the heartbeat's interval                     time
    main       SIGTERM, SIGINT, or the order to stop        the operator; a heartbeat's answer

Generation swaps weights only between two batches, so a completion never mixes versions. Order of the stop: generation
ends with its batch, then, when the run drains, the outbox empties; what remains in it is durable and is pushed by the
next process.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from dataclasses import dataclass

import torch

from services.common import metrics
from services.common.api import Command, CoordinatorApi, Heartbeat, Registration
from services.common.bell import Bell
from services.common.clock import Clock, SystemClock
from services.common.contract import build_contract
from services.common.errors import Draining, HeterorlError, NotRegistered, RunFinished, Unreachable
from services.common.generation.engine import Engine
from services.common.generation.hf import HfEngine
from services.common.prompts import Prompter
from services.common.pull import Puller
from services.common.rpc.client import CoordinatorClient
from services.common.tasks.registry import build_task
from services.common.trust import Trust
from services.common.types import Digest, SiteId, WorkAssignment
from services.sampler.config import SamplerConfig
from services.sampler.delay import Visibility, group_delay_s, max_delay_versions
from services.sampler.delivery import Delivery
from services.sampler.outbox import Outbox
from services.sampler.policy_sync import PolicySync
from services.sampler.rollouts import RolloutMaker

_LOG = logging.getLogger(__name__)
RETRY_S = 1.0
NO_ROOT = Digest("")


async def main(config: SamplerConfig) -> int:
    """Sample until a signal or the end of the run; returns the exit code."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    config.state_dir.mkdir(parents=True, exist_ok=True)
    outbox = await asyncio.to_thread(Outbox, config.state_dir)
    _LOG.info("metrics on port %d", metrics.serve(config.metrics_port))
    try:
        async with CoordinatorClient(config.coordinator) as api:
            sampler = await asyncio.to_thread(build, config, api, outbox, SystemClock())
            await sampler.run(stop)
    finally:
        outbox.close()
    return 0


def build(config: SamplerConfig, api: CoordinatorApi, outbox: Outbox, clock: Clock) -> Sampler:
    """Load model, tokenizer and task, and join the parts. Blocking."""
    if config.engine.threads:
        torch.set_num_threads(config.engine.threads)
    task = build_task(config.task)
    prompter = Prompter(config.model_dir, use_chat_template=config.use_chat_template)
    semantics = config.sampling.semantics()
    engine = HfEngine(
        model_dir=config.model_dir,
        published_dtype=config.published_dtype,
        compute_dtype=config.engine.compute_dtype,
        device=config.engine.device,
        sampling=semantics,
        batch_rows=config.engine.batch_rows,
        eos_token_id=prompter.eos_token_id,
    )
    contract = build_contract(
        tokenizer=prompter.tokenizer,
        use_chat_template=config.use_chat_template,
        task=task,
        layout_id=engine.layout.layout_id,
        vocab_size=engine.vocab_size,
        group_size=config.group_size,
        sampling=semantics,
    )
    site = SiteId(config.site)
    bell = Bell()
    return Sampler(
        config=config,
        api=api,
        engine=engine,
        registration=Registration(
            site=site,
            incarnation=outbox.incarnation,
            contract=contract,
            engine=engine.name,
            dtype=engine.dtype,
            max_delay_versions=max_delay_versions(config.delay),
        ),
        maker=RolloutMaker(
            engine=engine,
            task=task,
            prompter=prompter,
            site=site,
            incarnation=outbox.incarnation,
            group_size=config.group_size,
        ),
        outbox=outbox,
        policy=PolicySync(
            api=api,
            puller=Puller(api=api, spool=config.state_dir / "incoming", layout=engine.layout, clock=clock),
            visibility=Visibility(config.delay, seed=config.seed),
            record=config.state_dir / "versions.jsonl",
            clock=clock,
            bell=bell,
            trust=Trust(config.trusted_keys),
        ),
        delivery=Delivery(api=api, outbox=outbox, clock=clock, bell=bell),
        clock=clock,
        bell=bell,
    )


@dataclass(slots=True, kw_only=True)
class Sampler:
    """The joined parts of one sampler."""

    config: SamplerConfig
    api: CoordinatorApi
    engine: Engine
    registration: Registration
    maker: RolloutMaker
    outbox: Outbox
    policy: PolicySync
    delivery: Delivery
    clock: Clock
    bell: Bell
    state_root: Digest = NO_ROOT
    tokens_per_s: float = 0.0
    is_draining: bool = False

    async def run(self, stop: asyncio.Event) -> None:
        """Run the loops until `stop`, or until the run is drained and the outbox empty."""
        await self._register()
        try:
            async with asyncio.TaskGroup() as tasks:
                loops = [
                    tasks.create_task(loop())
                    for loop in (self.policy.watch, self.policy.sync, self.delivery.deliver, self._beat)
                ]
                halt = tasks.create_task(self._ring_on(stop))
                await self._generate(stop)
                await self._empty(stop)
                for task in (*loops, halt):
                    task.cancel()
        except* HeterorlError as failed:
            raise failed.exceptions[0] from None

    async def _ring_on(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self.bell.ring()

    async def _register(self) -> None:
        while True:
            try:
                answer = await self.api.register(self.registration)
                break
            except (Unreachable, Draining) as error:
                _LOG.info("registering waits: %s", error)
                await self.clock.sleep(max(RETRY_S, error.retry_after_s))
        await asyncio.to_thread(self.outbox.skip_to, answer.next_sequence)
        _LOG.info("registered with run %s at version %d", answer.run_id, answer.head_version)

    async def _generate(self, stop: asyncio.Event) -> None:
        while not stop.is_set() and not self.is_draining:
            ticket = self.bell.ticket()
            await self._swap()
            level = await asyncio.to_thread(self.outbox.level)
            metrics.OUTBOX_GROUPS.set(level.num_groups)
            if self.engine.version < 0 or level.num_bytes >= self.config.outbox_bytes:
                await ticket.wait()
                continue
            work, wait_s = await self._lease()
            if work:
                await self._fill(work)
            elif not self.is_draining:
                await self._pause(ticket, wait_s)

    async def _pause(self, ticket: asyncio.Event, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await ticket.wait()
        except TimeoutError:
            return

    async def _swap(self) -> None:
        pulled = self.policy.take(self.engine.version)
        if pulled is None:
            return
        started = time.perf_counter()
        await asyncio.to_thread(self.engine.load, pulled.arena, pulled.version)
        metrics.SWAP_SECONDS.observe(time.perf_counter() - started)
        metrics.POLICY_VERSION.set(pulled.version)
        self.state_root = pulled.manifest.state_root

    async def _lease(self) -> tuple[tuple[WorkAssignment, ...], float]:
        try:
            grant = await self.api.lease_work(
                site=self.registration.site,
                incarnation=self.registration.incarnation,
                max_groups=self.config.groups_per_batch,
                policy_version=self.engine.version,
            )
        except NotRegistered:
            await self._register()
            return (), 0.0
        except RunFinished:
            self.is_draining = True
            return (), 0.0
        except Draining as error:
            # The run drains, or the coordinator restarts: only a heartbeat tells which.
            _LOG.info("no work: %s", error)
            return (), RETRY_S
        except Unreachable as error:
            _LOG.info("no work: %s", error)
            return (), RETRY_S
        if not grant.assignments:
            _LOG.debug("no work: %s", grant.reason)
        return grant.assignments, grant.retry_after_s

    async def _fill(self, work: tuple[WorkAssignment, ...]) -> None:
        first = self.outbox.next_sequence
        batch = await asyncio.to_thread(self.maker.make, work, state_root=self.state_root, first_sequence=first)
        metrics.GENERATE_SECONDS.observe(batch.generation_s)
        metrics.TOKENS.labels("sampler").inc(batch.num_tokens)
        self.tokens_per_s = batch.num_tokens / batch.generation_s if batch.generation_s else 0.0
        now = self.clock.wall()
        release = [
            now + group_delay_s(self.config.delay, seed=self.config.seed, sequence=group.id.sequence)
            for group in batch.groups
        ]
        await asyncio.to_thread(self.outbox.put, batch.groups, release=release)
        self.bell.ring()
        if batch.failed:
            metrics.REWARD_ERRORS.inc(len(batch.failed))
            await self._abandon(batch.failed)

    async def _abandon(self, assignments: tuple[int, ...]) -> None:
        try:
            await self.api.abandon_work(
                site=self.registration.site, incarnation=self.registration.incarnation, assignments=assignments
            )
        except (Unreachable, Draining) as error:
            _LOG.info("%d assignments are left to expire: %s", len(assignments), error)

    async def _empty(self, stop: asyncio.Event) -> None:
        """A drained run waits for nothing: push what is held, then leave."""
        if not self.is_draining:
            return
        await asyncio.to_thread(self.outbox.release_all)
        self.bell.ring()
        while not stop.is_set():
            ticket = self.bell.ticket()
            if not (await asyncio.to_thread(self.outbox.level)).num_groups:
                return
            await ticket.wait()

    async def _beat(self) -> None:
        while True:
            level = await asyncio.to_thread(self.outbox.level)
            beat = Heartbeat(
                site=self.registration.site,
                incarnation=self.registration.incarnation,
                policy_version=self.engine.version,
                state_root=self.state_root,
                tokens_per_s=self.tokens_per_s,
                outbox_groups=level.num_groups,
            )
            try:
                commands = await self.api.heartbeat(beat)
            except (Unreachable, Draining) as error:
                _LOG.info("no heartbeat: %s", error)
                commands = ()
            if Command.REGISTER in commands:
                await self._register()
            if Command.DRAIN in commands or Command.STOP in commands:
                self.is_draining = True
                self.bell.ring()
            await self.clock.sleep(self.config.heartbeat_s)
