"""Wires the learner: lease, resumption, inbox, training, publication.

    coordinator --stream, by credit--> feed --> Inbox --> Session --groups--> backend (thread)
         ^                                                   |
         +------- checkpoint, payloads, compare-and-set --- Publisher

    loop      waits for                                        unblocked by
    renew     a third of the lease term                        the clock; StaleEpoch ends all, an order the session
    feed      groups of the stream; room in the inbox          the coordinator; Inbox.take; a broken link is re-opened
    session   groups_per_step groups, then its thread, then    Inbox.put; the thread's end; the coordinator's answer,
              upload and commit                                repeated and asked for until it comes
    watchdog  half the service manager's interval              the clock
    main      the session's end, or the stop event             max_steps; SIGTERM or SIGINT

Every wait ends when the lease is lost, because `renew` fails its TaskGroup and that cancels the others. A step runs in
a thread, which nothing can cancel: it is waited for, and what it computed has no effect.

Order of the stop: the session is cancelled (its thread is waited for), the stream closes, the lease is released.
Nothing depends on that order: after SIGKILL the next start does the same work again from the last checkpoint. When
max_steps is reached the last version is published first, then the run drains.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import signal
from collections.abc import Callable
from dataclasses import dataclass

from services.common import metrics, notify
from services.common.api import CoordinatorApi
from services.common.clock import Clock, SystemClock
from services.common.directory import make_directory
from services.common.errors import RemoteError
from services.common.rpc.client import CoordinatorClient
from services.common.signing import Signer
from services.common.trust import Trust
from services.common.types import Contract, LeaseGrant
from services.common.weights.parallel import num_threads
from services.learner.admission import Limits
from services.learner.assembly import assemble
from services.learner.backends.backend import TrainBackend
from services.learner.canary import Canary
from services.learner.checkpoint import CheckpointStore
from services.learner.config import LearnerConfig
from services.learner.directory import hold_directory
from services.learner.evaluate import Evaluator
from services.learner.feed import feed
from services.learner.inbox import Inbox
from services.learner.journal import Journal
from services.learner.lease import acquire, renew
from services.learner.observe import observe_start
from services.learner.patience import Patience
from services.learner.publish import Publisher
from services.learner.resume import Resumption
from services.learner.rollback import Rollback
from services.learner.session import Outcome, Session
from services.learner.threads import in_thread

_LOG = logging.getLogger(__name__)
RELEASE_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """Where a learner left: optimizer steps and newest version; `is_finished` when max_steps is reached."""

    step: int
    version: int
    is_finished: bool


@dataclass(slots=True, kw_only=True)
class _Learner:
    config: LearnerConfig
    api: CoordinatorApi
    backend: TrainBackend
    contract: Contract
    clock: Clock
    rng: random.Random
    evaluator: Evaluator | None
    signer: Signer | None
    canary: Canary | None
    result: RunResult
    inbox: Inbox | None = None
    rollback: Rollback | None = None

    def patience(self) -> Patience:
        return Patience(clock=self.clock, rng=self.rng, base_s=self.config.retry_base_s, cap_s=self.config.retry_cap_s)

    async def lead(self) -> None:
        """Hold the lease and train under it."""
        grant = await acquire(
            self.api,
            holder=self.config.holder,
            contract=self.contract,
            request_id=secrets.token_hex(8),
            patience=self.patience(),
        )
        try:
            async with asyncio.TaskGroup() as tasks:
                renewal = tasks.create_task(
                    renew(self.api, grant=grant, clock=self.clock, patience=self.patience(), on_grant=self.hear)
                )
                await self.train(grant)
                renewal.cancel()
        except asyncio.CancelledError:
            await self.release(grant)
            raise
        await self.release(grant)

    async def hear(self, grant: LeaseGrant) -> None:
        """End the session at its next step boundary when there is an order."""
        if self.rollback and self.inbox and self.rollback.is_due(grant.rollback_to):
            await self.inbox.close()

    async def train(self, grant: LeaseGrant) -> None:
        """Sessions, one after another, until one ends the run."""
        directory = self.config.state_dir
        store = CheckpointStore(directory / "checkpoints")
        journal = Journal(directory)
        publisher = Publisher(
            self.api,
            run_id=self.config.run_id,
            epoch=grant.epoch,
            layout=self.backend.layout,
            directory=directory / "payloads",
            store=store,
            journal=journal,
            patience=self.patience(),
            snapshot_every_versions=self.config.snapshot_every_versions,
            checkpoint_every_versions=self.config.checkpoint_every_versions,
            signer=self.signer,
            canary=self.canary,
            threads=num_threads(self.config.backend.threads),
        )
        resumption = Resumption(
            api=self.api,
            backend=self.backend,
            publisher=publisher,
            store=store,
            journal=journal,
            patience=self.patience(),
            run_id=self.config.run_id,
            epoch=grant.epoch,
            directory=directory / "payloads",
            trust=Trust(() if self.signer is None else (self.signer.public_key, *self.config.trusted_keys)),
        )
        await in_thread(store.remove_unfinished)
        await in_thread(publisher.remove_leftovers)
        self.rollback = Rollback(resumption)
        outcome = Outcome.REFUSED
        while outcome in (Outcome.REFUSED, Outcome.CLOSED):
            step = await self.rollback.resume(is_interrupted=outcome is Outcome.CLOSED)
            self._note(publisher, step)
            self.inbox = Inbox(self.config.groups_per_step * self.config.prefetch_steps)
            # A new inbox holds nothing: whatever the last session held returns to the queue when the stream opens.
            session = Session(
                config=self.config,
                api=self.api,
                backend=self.backend,
                publisher=publisher,
                inbox=self.inbox,
                journal=journal,
                patience=self.patience(),
                evaluator=self.evaluator,
                epoch=grant.epoch,
                step=step,
            )
            outcome = await self._run_session(session)
            self._note(publisher, session.step)
        if outcome is Outcome.FINISHED:
            reason = f"step {session.step} of {self.config.max_steps} is reached"
            _LOG.info("%s", reason)
            await self.patience().insist(lambda: self.api.drain(reason=reason))

    async def _run_session(self, session: Session) -> Outcome:
        limits = Limits(
            group_size=self.config.group_size,
            vocab_size=self.contract.vocab_size,
            max_sequence_tokens=self.config.max_sequence_tokens,
        )
        async with asyncio.TaskGroup() as tasks:
            feeding = tasks.create_task(
                feed(self.api, session.inbox, epoch=session.epoch, limits=limits, patience=self.patience())
            )
            outcome = await session.run()
            await session.inbox.close()
            feeding.cancel()
        return outcome

    def _note(self, publisher: Publisher, step: int) -> None:
        self.result = RunResult(
            step=step, version=publisher.position.head_version, is_finished=step >= self.config.max_steps
        )

    async def release(self, grant: LeaseGrant) -> None:
        """Let another learner in at once; if that fails, the lease runs out by itself."""
        try:
            async with asyncio.timeout(RELEASE_TIMEOUT_S):
                await self.api.release_lease(epoch=grant.epoch)
        except (RemoteError, TimeoutError) as error:
            _LOG.warning("the lease could not be released: %s", error)


async def main(config: LearnerConfig, *, num_ranks: int = 1) -> int:
    """Train on so many processes of this machine until max_steps or a signal; returns the exit code 0."""
    stop = asyncio.Event()
    clock = SystemClock()
    notifier = notify.from_environment()
    notify.on_stop((signal.SIGTERM, signal.SIGINT), notifier=notifier, stop=stop.set)
    async with notify.supervised(notifier, clock):
        await _train(config, num_ranks, clock, stop, notifier)
    return 0


async def _train(
    config: LearnerConfig, num_ranks: int, clock: Clock, stop: asyncio.Event, notifier: notify.Notifier
) -> None:
    parts = await in_thread(assemble, config, num_ranks=num_ranks)
    make_directory(config.state_dir)
    metrics.watch_disk(config.state_dir)
    observe_start()
    metrics_port = metrics.serve(config.metrics_port, service="learner", address=config.metrics_host)
    _LOG.info("run %s: coordinator %s, metrics on port %d", config.run_id, config.coordinator, metrics_port)
    if parts.signer is not None:
        _LOG.info("versions are signed by %s", parts.signer.public_key)
    async with CoordinatorClient(
        config.coordinator,
        tls=config.tls,
        max_message_bytes=config.max_message_bytes,
        bandwidth=config.bandwidth,
    ) as client:
        result = await run(
            config,
            api=client,
            backend=parts.backend,
            contract=parts.contract,
            clock=clock,
            rng=random.Random(),
            evaluator=parts.evaluator,
            signer=parts.signer,
            canary=parts.canary,
            stop=stop,
            on_ready=lambda: notifier.ready(f"run {config.run_id}, holder {config.holder}"),
        )
    notifier.stopping()
    await in_thread(parts.close)
    _LOG.info("stopped at step %d, version %d", result.step, result.version)


async def run(
    config: LearnerConfig,
    *,
    api: CoordinatorApi,
    backend: TrainBackend,
    contract: Contract,
    clock: Clock,
    rng: random.Random,
    evaluator: Evaluator | None = None,
    signer: Signer | None = None,
    canary: Canary | None = None,
    stop: asyncio.Event | None = None,
    on_ready: Callable[[], None] = lambda: None,
) -> RunResult:
    """Train until `max_steps` or until `stop` is set.

    `signer` signs every version and must have signed the head; `canary` is stated with each. `on_ready` is called when
    the lease is asked for.

    Raises:
        UntrustedVersion: the coordinator's head is not signed by this learner nor by a trusted earlier one.
        StaleEpoch: another learner took over; nothing of this one has any further effect.
        ParentNotHead, ContractMismatch: this learner and the run disagree.
        OperatorError: the configuration or the machine must be changed.
    """
    learner = _Learner(
        config=config,
        api=api,
        backend=backend,
        contract=contract,
        clock=clock,
        rng=rng,
        evaluator=evaluator,
        signer=signer,
        canary=canary,
        result=RunResult(step=0, version=-1, is_finished=False),
    )
    stopping = stop or asyncio.Event()
    with hold_directory(config.state_dir):
        try:
            async with asyncio.TaskGroup() as tasks:
                leading = tasks.create_task(learner.lead())
                stopped = tasks.create_task(stopping.wait())
                on_ready()
                await asyncio.wait([leading, stopped], return_when=asyncio.FIRST_COMPLETED)
                leading.cancel()
                stopped.cancel()
        except BaseExceptionGroup as group:
            raise _cause(group) from group
    return learner.result


def _cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The one failure that ended the others."""
    first = group.exceptions[0]
    return _cause(first) if isinstance(first, BaseExceptionGroup) else first
