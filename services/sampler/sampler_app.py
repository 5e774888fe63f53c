"""Wires a sampler and runs its loops.

ARCHITECTURE.md lists the loops and what they wait for. Besides, `evaluate` waits for a verified version, work and the
engine.

Every wait ends at a signal. A stop leaves groups with turns on disk to the next process, spools groups that ended,
hands the other assignments back, then cancels the loops. The outbox is durable; the next process pushes it. A drain
takes no more work, finishes groups in flight and empties the outbox. A typed error that no retry changes ends the
process.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from rich.filesize import decimal

from heterorl.common.api import SamplerApi
from heterorl.common.errors import ConfigError, EngineError, EpisodeError, HeterorlError, RewardError
from heterorl.common.evaluation.evaluation_sets import ignored_draws
from heterorl.common.generation.inference_engine import Engine, ScoredText, canary_texts
from heterorl.common.identity.signing import Trust
from heterorl.common.identity.spiffe import names_of
from heterorl.common.model.contract import build_contract
from heterorl.common.model.model_directory import check_model_dir
from heterorl.common.process import metrics, notify, tracing
from heterorl.common.process.backoff import Backoff
from heterorl.common.process.clock import Bell, Clock, steady
from heterorl.common.process.threads import cause_of, num_threads
from heterorl.common.pull.puller import Puller
from heterorl.common.rpc.client import CoordinatorClient
from heterorl.common.tasks.sources.mixture import num_trained_on
from heterorl.common.tasks.task import Task
from heterorl.common.tasks.task_config import build_task
from heterorl.common.text.conversation import Conversations, try_reward, try_task
from heterorl.common.text.prompter import Prompter
from heterorl.common.types.common import Contract, SiteId
from heterorl.common.types.run import Registration
from heterorl.common.weights.arena import Arena
from heterorl.sampler.adoption import adopted
from heterorl.sampler.delay import Visibility, max_delay_s, max_delay_versions, max_group_delay_s
from heterorl.sampler.engines import build_engines, take_variant
from heterorl.sampler.evaluation_loop import EvaluationLoop
from heterorl.sampler.outbox.delivery import Delivery
from heterorl.sampler.outbox.outbox import Outbox
from heterorl.sampler.prompt_evaluator import SiteSet, naming_set, open_set
from heterorl.sampler.rollout.generation_loop import GenerationLoop
from heterorl.sampler.rollout.group_builder import GroupBuilder
from heterorl.sampler.rollout.in_flight_groups import InFlightNote
from heterorl.sampler.sampler_config import SamplerConfig, with_workers
from heterorl.sampler.site_session import Session
from heterorl.sampler.trust_record import TrustRecord, record_name
from heterorl.sampler.weight_sync import WeightSync

_LOG = logging.getLogger(__name__)
OF_PROMPTS = (ConfigError, EngineError, EpisodeError, RewardError)
"""Errors that a prompt in flight may cause: after such an end the prompts count as after a kill."""


async def main(config: SamplerConfig) -> int:
    """Sample until a signal or the run's end; returns the exit code."""
    async with notify.running() as process:
        await _sample(config, process)
    return 0


async def _sample(config: SamplerConfig, process: notify.Process) -> None:
    outbox = await asyncio.to_thread(Outbox, config.state_dir, site=config.site)
    try:
        # From zero: a counter that appears with its first failure shows no increase.
        for reason in ("stale", "died"):
            metrics.ENGINE_FAILURES.labels(reason)
        metrics.watch_disk(config.state_dir)
        tracing.start(config.tracing, service="sampler", name=config.site)
        port = metrics.serve_by(config, service="sampler")
        _LOG.info("site %s calls coordinator %s, metrics on port %d", config.site, config.coordinator, port)
        async with (
            CoordinatorClient.of(config) as api,
            api.pushing("sampler", site=config.site, interval_s=config.metrics_push_s),
        ):
            joined = None
            if config.join is not None:
                process.notifier.ready("asking what the run states")
                joined = await adopted(config, process.clock, process.stop)
                if joined is None:
                    return
                config = joined.config
            sampler = await _built(config, api, outbox, process)
            if sampler is None:
                return
            process.watch.silent_s = sampler.generation.collector.silent_s
            try:
                if joined is not None:
                    joined.check(sampler.session.registration.contract)
                await sampler.run(process.stop, on_ready=lambda: process.notifier.ready(f"site {config.site}"))
                process.notifier.stopping()
            finally:
                await asyncio.to_thread(sampler.close)
    finally:
        outbox.close()


async def _built(config: SamplerConfig, api: SamplerApi, outbox: Outbox, process: notify.Process) -> Sampler | None:
    """The sampler, or None if a stop gives up its engine's start."""
    is_stopped = threading.Event()

    async def watch() -> None:
        await process.stop.wait()
        is_stopped.set()

    watching = asyncio.create_task(watch())
    try:
        return await asyncio.to_thread(build, config, api, outbox, process.clock, is_stopped=is_stopped)
    except EngineError as error:
        if not process.stop.is_set():
            raise
        _LOG.info("the sampler stops before its engine has started: %s", error)
        return None
    finally:
        watching.cancel()


@dataclass(frozen=True, slots=True, kw_only=True)
class Components:
    """Arguments of `join`, without coordinator and outbox."""

    engine: Engine
    task: Task
    prompter: Prompter
    contract: Contract
    base: Callable[[], Arena | None] = lambda: None
    """Weights of model_dir in the published type, until the engine loads others."""
    canary: tuple[ScoredText, ...] = ()
    """Texts on which the coordinator compares the engine with the learner; empty: no comparison."""
    sets: tuple[SiteSet, ...] = ()
    conversations: Conversations | None = None
    """Environments of the task; None if no prompt has one."""
    close: Callable[[], None] = lambda: None
    """Ends the reward processes and the engine's processes."""


def load_components(config: SamplerConfig, *, is_stopped: threading.Event | None = None) -> Components:
    """Load model, tokenizer and task.

    `is_stopped` gives up the start of an engine's process.

    Raises ConfigError: one of them cannot be loaded; DependencyMissing: the engine's package is not installed;
    EngineDied: the engine's own process does not start.
    """
    check_model_dir(config.model_dir)
    if config.engine.threads:
        torch.set_num_threads(config.engine.threads)
    prompter = Prompter.of(config)
    task = build_task(with_workers(config.task), measure=prompter.num_tokens)
    # Before the model is loaded and before the coordinator counts on this site.
    conversations = try_task(config, task, prompter)
    if ignored := ignored_draws(config.evaluation):
        _LOG.warning(ignored)
    opened = []
    for each in config.evaluation:
        with naming_set(each.name):
            opened.append(open_set(each, measure=prompter.num_tokens).played(prompter))
            try_reward(opened[-1].task, prompter)
        if num_known := num_trained_on(task, opened[-1].task):
            _LOG.warning(
                "evaluation.%s: the run trains on %d of its %d held-out prompts; name these in task.evaluation_path or"
                " evaluation_split at every node of the run",
                each.name, num_known, opened[-1].task.num_evaluation_prompts,
            )  # fmt: skip
    sets = tuple(opened)
    engines = build_engines(config, end_token_ids=prompter.end_token_ids, is_stopped=is_stopped)
    # The contract states the trained weights; a variant is another form of them.
    taken = take_variant(engines, config.variant)
    contract = build_contract(
        config,
        text=prompter.digests,
        task=task,
        layout_id=engines.engine.layout.layout_id,
        vocab_size=engines.vocab_size,
        end_token_ids=prompter.end_token_ids,
        lora=engines.lora,
        routed_token_bytes=engines.routed_token_bytes,
    )

    def close() -> None:
        for each in (task, *(one.task for one in sets)):
            each.close()
        engines.close()

    return Components(
        engine=taken.engine,
        task=task,
        prompter=prompter,
        contract=contract,
        conversations=conversations,
        base=taken.base,
        canary=canary_texts(task, prompter),
        sets=sets,
        close=close,
    )


def build(
    config: SamplerConfig,
    api: SamplerApi,
    outbox: Outbox,
    clock: Clock,
    rng: random.Random | None = None,
    is_stopped: threading.Event | None = None,
) -> Sampler:
    """Load and connect a sampler, blocking; the caller closes the outbox.
    `is_stopped` gives up the start of an engine."""
    # Before the model is loaded: a problem of state_dir is reported at once.
    record = TrustRecord(config.state_dir / record_name(config.variant))
    parts = load_components(config, is_stopped=is_stopped)
    return join(config, parts, api=api, outbox=outbox, record=record, clock=clock, rng=rng or random.Random())


def join(
    config: SamplerConfig,
    parts: Components,
    *,
    api: SamplerApi,
    outbox: Outbox,
    record: TrustRecord,
    clock: Clock,
    rng: random.Random,
) -> Sampler:
    """Connect loaded components; see `build`."""
    site = SiteId(config.site)
    bell, now = Bell(), steady(clock)
    # A wrong clock of an earlier process must not hold a group longer than the delay model would.
    outbox.release_by(now() + max_group_delay_s(config.delay))
    backoff = Backoff(clock=clock, rng=rng)
    puller = Puller(
        api=api,
        spool=config.state_dir / "incoming",
        layout=parts.engine.layout,
        clock=clock,
        base=parts.base,
        num_streams=config.pull_streams,
        threads=num_threads(config.engine.threads),
        variant=config.variant,
        # While bytes arrive the link works: the backoff restarts.
        on_frame=backoff.reset,
    )
    policy = WeightSync(
        api=api,
        puller=puller,
        visibility=Visibility(config.delay, seed=config.delay_seed),
        record=record,
        trust=Trust(config.trusted_keys),
        clock=clock,
        bell=bell,
        rng=rng,
        backoff=backoff,
        run=names_of(config.tls.cert)[0],
    )
    registration = Registration(
        site=site, incarnation=outbox.incarnation, contract=parts.contract, engine=parts.engine.name,
        dtype=parts.engine.dtype, max_delay_versions=max_delay_versions(config.delay),
        max_delay_s=max_delay_s(config.delay), variant=config.variant, work_ahead_s=config.work_ahead_s,
    )  # fmt: skip
    in_flight = InFlightNote(config.state_dir)
    # Before the first registration, which states what this process can still answer.
    # The contract states no time where trajectories have one turn.
    longest_s = max(config.task.trajectory_s_of_all, parts.contract.trajectory_s)
    left = outbox.turns.take(since=now() - longest_s)
    session = Session(
        api=api, registration=registration, outbox=outbox, record=record, heartbeat_s=config.heartbeat_s, clock=clock,
        bell=bell, rng=rng, left=in_flight.left,
    )  # fmt: skip
    builder = GroupBuilder(
        task=parts.task, prompter=parts.prompter, site=site, incarnation=outbox.incarnation,
        group_size=config.group_size, clock=clock, is_seeded=config.seeded_sampling,
        min_members=parts.contract.min_members, max_new_tokens=parts.contract.sampling.max_new_tokens,
        max_trajectory_tokens=parts.contract.max_trajectory_tokens, conversations=parts.conversations,
    )  # fmt: skip
    generation = GenerationLoop(
        config=config,
        engine=parts.engine,
        canary=parts.canary,
        builder=builder,
        policy=policy,
        session=session,
        now=now,
        in_flight=in_flight,
        left=left,
    )
    evaluation = EvaluationLoop(config, parts.sets, generation) if parts.sets else None
    delivery = Delivery(api=api, outbox=outbox, clock=clock, bell=bell, rng=rng, now=now)
    return Sampler(
        session=session, policy=policy, generation=generation, delivery=delivery, outbox=outbox, evaluation=evaluation,
        in_flight=in_flight, close=parts.close,
    )  # fmt: skip


@dataclass(slots=True, kw_only=True)
class Sampler:
    """The connected components of one sampler."""

    session: Session
    policy: WeightSync
    generation: GenerationLoop
    delivery: Delivery
    outbox: Outbox
    evaluation: EvaluationLoop | None
    in_flight: InFlightNote
    close: Callable[[], None]

    async def run(self, stop: asyncio.Event, *, on_ready: Callable[[], None] = lambda: None) -> None:
        """Run until `stop`, a coordinator's order, or a drain's end.

        `on_ready` is called when the loops run; the first one may wait long for a coordinator.

        Raises ContractMismatch: this node disagrees with the run; RunReplaced: the run contradicts what this sampler
        verified before; OperatorError: the configuration or the machine must be changed.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                ends: list[asyncio.Task[Any]] = [
                    tasks.create_task(self._lead()),
                    tasks.create_task(stop.wait()),
                    tasks.create_task(self.session.stopped.wait()),
                ]
                on_ready()
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                if self.generation.num_in_flight:
                    _LOG.info("the sampler stops with %d groups in flight", self.generation.num_in_flight)
                if not ends[0].done():
                    if self.evaluation is not None:
                        self.evaluation.stop()
                    await self.generation.stop()
                    if self.evaluation is not None:
                        await self.evaluation.hand_back()
                for task in ends:
                    task.cancel()
        except BaseExceptionGroup as group:
            error = cause_of(group)
            if isinstance(error, HeterorlError) and not isinstance(error, OF_PROMPTS) and not self.session.left:
                # The next process returns the prompts in flight as after a stop.
                self.in_flight.clear()
            raise error from group
        if not self.session.left:
            self.in_flight.clear()
        await self.session.say_stopped(self.generation.reported())
        await self._say_end()

    async def _say_end(self) -> None:
        level = self.outbox.level()
        # Without a problem they are still being written.
        if self.generation.outbox_writer.problem:
            _LOG.error(
                "%d groups are lost, there was no room to spool them: %s; their prompts are handed out again",
                self.generation.outbox_writer.num_waiting, self.generation.outbox_writer.problem,
            )  # fmt: skip
        left = f"{level.num_groups} groups ({decimal(level.num_bytes)}) are spooled, the next start delivers them"
        _LOG.info(
            "the sampler has %s: %d groups delivered since the start, %d not taken; %s",
            "drained" if self.session.is_draining and not level.num_groups else "stopped",
            self.delivery.num_delivered, self.delivery.num_refused, left if level.num_groups else "nothing is spooled",
        )  # fmt: skip

    async def _lead(self) -> None:
        await self.session.register()
        async with asyncio.TaskGroup() as tasks:
            loops = [
                tasks.create_task(loop)
                for loop in (
                    self.policy.watch(),
                    self.policy.sync(),
                    self.delivery.deliver(),
                    self.session.beat(self.generation.reported),
                )
            ]
            if self.evaluation is not None:
                loops.append(tasks.create_task(self.evaluation.run()))
            await self.generation.generate()
            await self.generation.empty()
            for task in loops:
                task.cancel()
