"""One learner's run: lease, renewal, training loops, rollbacks, result."""

import asyncio
import contextlib
import functools
import logging
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

from heterorl.common.api import LearnerApi
from heterorl.common.errors import ConfigError, LeaseHeld, RemoteError, RunFinished, StaleEpoch
from heterorl.common.model.router_replay import routing_shape
from heterorl.common.process.backoff import Backoff
from heterorl.common.process.clock import Clock
from heterorl.common.process.threads import cause_of, in_thread
from heterorl.common.types.common import Contract, LearnerPhase
from heterorl.common.types.policy import NO_VERSION, LeaseGrant, version_words
from heterorl.common.types.run import step_words
from heterorl.common.wire.policy_messages import manifest_from_bytes
from heterorl.learner.backends.train_backend import TrainBackend
from heterorl.learner.checks.verifier import Limits, Verifier
from heterorl.learner.evaluate import Evaluator
from heterorl.learner.learner_config import LearnerConfig
from heterorl.learner.publish.checkpoint_store import CheckpointStore
from heterorl.learner.publish.publisher import Publisher
from heterorl.learner.run.inbox import Inbox, feed
from heterorl.learner.run.resume import no_checkpoint
from heterorl.learner.run.rollback import Rollback
from heterorl.learner.run.state_directory import (
    check_groups,
    check_messages,
    describe_run,
    hold_directory,
    note_epoch,
    read_incarnation,
    renew,
    write_run_file,
)
from heterorl.learner.run.training_loop import Outcome, RewardSignal, TrainingLoop
from heterorl.learner.sample_notes import NoteReader, SampleNotes
from heterorl.learner.step_metrics import StepTimer

_LOG = logging.getLogger(__name__)
RELEASE_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """The learner's state at its end.

    `step` optimizer steps are in its weights, of which `num_unpublished` are in no version; `version` is the newest
    known to be committed (-1: none), and the next one may be when `is_undecided`. `is_finished` when max_steps is
    reached; `has_begun` once it held the weights of `version`.
    """

    step: int
    version: int
    is_finished: bool
    num_unpublished: int = 0
    is_undecided: bool = False
    has_begun: bool = True

    def __str__(self) -> str:
        if not self.has_begun:
            where = "before it began" if self.version < 0 else f"before it went on from version {self.version}"
            return f"stopped {where}"
        text = f"stopped at step {self.step - self.num_unpublished}, version {self.version}"
        if self.is_undecided:
            text += f"; version {self.version + 1} was on its way, the next start asks whether it arrived"
        elif self.num_unpublished:
            steps = f"{self.num_unpublished} step" + "s" * (self.num_unpublished > 1)
            text += f"; {steps} after it not yet published: the groups return to the queue"
        return text


@dataclass(slots=True, kw_only=True)
class TrainingRun:
    """Holds the run's lease and trains under it, loop after loop.

    One process at a time may use the state directory.
    `backoff` makes a fresh sequence of waits between attempts; `begin` makes the parts that work under a granted lease.
    """

    config: LearnerConfig
    api: LearnerApi
    contract: Contract
    clock: Clock
    backoff: Callable[[], Backoff]
    backend: TrainBackend
    evaluator: Evaluator | None
    verifier: Verifier | None
    begin: Callable[[LeaseGrant], Rollback]
    progress: StepTimer
    reader: NoteReader | None = None
    """Makes text of the groups that are kept as samples; None: they have none."""
    result: RunResult = field(
        default_factory=lambda: RunResult(step=0, version=NO_VERSION, is_finished=False, has_begun=False)
    )
    statement: bytes = b""
    """Statement of the configuration behind the contract."""
    signal: RewardSignal = field(default_factory=RewardSignal)
    _grant: LeaseGrant | None = None
    _loop: TrainingLoop | None = None
    _rollback: Rollback | None = None

    async def run(self, stop: asyncio.Event, *, on_ready: Callable[[], None] = lambda: None) -> RunResult:
        """Train until `max_steps` or until `stop` is set.
        `on_ready` is called when the lease is asked for.

        Raises:
            UntrustedVersion: the coordinator's head is not signed by this learner nor by a trusted earlier one.
            StaleEpoch: another learner took over; later calls of this one have no effect.
            ParentNotHead, ContractMismatch: this learner and the run disagree.
            OperatorError: the configuration or the machine must be changed.
        """
        with hold_directory(self.config.state_dir):
            try:
                async with asyncio.TaskGroup() as tasks:
                    training = tasks.create_task(self.lead())
                    stopped = tasks.create_task(stop.wait())
                    on_ready()
                    await asyncio.wait([training, stopped], return_when=asyncio.FIRST_COMPLETED)
                    training.cancel()
                    stopped.cancel()
            except BaseExceptionGroup as group:
                raise cause_of(group) from group
        return self.result

    async def lead(self) -> None:
        """Hold the lease and train under it."""
        groups_per_version = self.config.groups_per_step * self.config.steps_per_version
        incarnation = await in_thread(read_incarnation, self.config.state_dir)
        # One id a process: a repeated request is one request.
        request_id = secrets.token_hex(8)
        ask = functools.partial(
            self.api.acquire_lease,
            holder=self.config.holder,
            contract=self.contract,
            request_id=request_id,
            variants=self.config.variants,
            incarnation=incarnation,
            groups_per_version=groups_per_version,
            statement=self.statement,
        )
        grant = await self.backoff().retry(functools.partial(self._acquire, ask))
        _LOG.info("the learner holds the lease of epoch %d, at %s", grant.epoch, version_words(grant.head_version))
        self.result = replace(self.result, version=grant.head_version)
        try:
            self._check(grant)
        except ConfigError:
            await self.release(grant)
            raise
        try:
            async with asyncio.TaskGroup() as tasks:
                renewal = tasks.create_task(
                    renew(
                        self.api,
                        grant=grant,
                        clock=self.clock,
                        backoff=self.backoff(),
                        on_grant=self.hear,
                        progress=self.progress,
                    )
                )
                # Before its first version: a later start must know these as its own.
                await in_thread(note_epoch, self.config.state_dir, grant.epoch)
                await self.train(grant)
                renewal.cancel()
        except BaseException as error:
            # This process has ended its work under the lease: the next learner need not wait.
            if not is_superseded(error):
                await self.release(grant)
            raise
        await self.release(grant)

    async def _acquire(self, ask: Callable[[], Awaitable[LeaseGrant]]) -> LeaseGrant:
        """Ask for the lease; refuses a wait that would be useless."""
        try:
            return await ask()
        except LeaseHeld:
            directory = self.config.state_dir
            paths = await in_thread(lambda: CheckpointStore(directory / "checkpoints").paths())
            if not (paths or self.config.adopt_without_optimizer):
                # No version is there yet, or no answer: it waits.
                with contextlib.suppress(RemoteError):
                    plan = await self.api.plan_pull(have_version=NO_VERSION, have_root="", want_version=NO_VERSION)
                    head = manifest_from_bytes(plan.manifests[-1])
                    if head.step:
                        raise no_checkpoint(directory, head) from None
            raise

    def _check(self, grant: LeaseGrant) -> None:
        check_messages(grant, own_bytes=self.config.max_message_bytes)
        check_groups(grant, groups_per_version=self.config.groups_per_step * self.config.steps_per_version)

    async def hear(self, grant: LeaseGrant) -> None:
        """Note the coordinator's bound, and a rollback order.
        An order ends the loop at its next step boundary. So does a lost head while groups are waited for: no sampler
        could get weights for them. Raises ConfigError: a new limit makes versions impossible."""
        # A coordinator that starts again may have another configuration.
        self._check(grant)
        self._grant = grant
        loop = self._loop
        if loop is None or self._rollback is None:
            return
        loop.grant = grant
        current = self.progress.now
        is_waiting = current is not None and current.phase is LearnerPhase.WAITING
        publisher = self._rollback.resumption.publisher
        if self._rollback.is_due(grant) or (is_waiting and await publisher.is_head_lost()):
            await loop.inbox.close()

    async def train(self, grant: LeaseGrant) -> None:
        """Training loops, one after another, until one ends the run."""
        self._rollback = rollback = self.begin(grant)
        term = rollback.resumption
        await in_thread(term.publisher.store.remove_unfinished)
        await in_thread(term.publisher.remove_leftovers)
        notes = SampleNotes(
            api=self.api, epoch=grant.epoch, reader=self.reader, limit_bytes=self.config.max_message_bytes // 2
        )
        outcome = None
        step_of_head: int | None = None
        while outcome is not Outcome.FINISHED:
            try:
                step = await rollback.resume(is_start=outcome is None, step_of_head=step_of_head)
            except RunFinished as error:
                # A restart, variant or order that needs one more version.
                _LOG.warning("no further version is published: %s", error)
                return
            if outcome is None:
                # A start that is refused before has changed nothing.
                await in_thread(write_run_file, self.config)
                await describe_run(self.api, self.config, epoch=grant.epoch, backoff=self.backoff())
            # A new inbox is empty: groups of the last loop return to the queue when the stream opens.
            self._loop = loop = TrainingLoop(
                config=self.config,
                api=self.api,
                backend=self.backend,
                publisher=term.publisher,
                progress=self.progress,
                inbox=Inbox(self.config.groups_per_step * self.config.prefetch_steps),
                backoff=self.backoff(),
                grant=self._grant or grant,
                evaluator=self.evaluator,
                step=step,
                signal=self.signal,
                notes=notes,
            )
            notes.begin()
            try:
                outcome = await self._run_loop(loop)
                step_of_head = None if loop.num_unpublished else loop.step
            finally:
                self._note(term.publisher, loop)
        if loop.inbox.is_over:
            return
        try:
            # An order that came after the last step began: no other step meets it.
            await rollback.run()
        except RunFinished as error:
            _LOG.warning("no further version is published: %s", error)
        self._note(term.publisher, loop)
        reason = f"step {step_words(loop.step, self.config.max_steps)} is reached"
        _LOG.info("the learner drains the run: %s", reason)
        await self.backoff().retry(lambda: self.api.drain(reason=reason, epoch=grant.epoch))

    async def _run_loop(self, loop: TrainingLoop) -> Outcome:
        limits = Limits(
            group_size=self.config.group_size,
            min_members=self.contract.min_members,
            vocab_size=self.contract.vocab_size,
            max_sequence_tokens=self.config.max_sequence_tokens,
            has_unit_rewards=self.config.loss.advantage == "beta",
            routing=routing_shape(self.backend.torch_model) if self.contract.routed_token_bytes else None,
        )
        async with asyncio.TaskGroup() as tasks:
            feeding = tasks.create_task(
                feed(
                    self.api,
                    loop.inbox,
                    epoch=loop.grant.epoch,
                    limits=limits,
                    backoff=self.backoff(),
                    verifier=self.verifier,
                    notes=loop.notes,
                )
            )
            noting = tasks.create_task(loop.notes.run())
            outcome = await loop.run()
            await loop.inbox.close()
            feeding.cancel()
            if outcome is Outcome.FINISHED:
                await loop.notes.finish()
            noting.cancel()
        return outcome

    def _note(self, publisher: Publisher, loop: TrainingLoop) -> None:
        self.result = RunResult(
            step=loop.step,
            version=publisher.position.head_version,
            is_finished=loop.step >= self.config.max_steps,
            num_unpublished=loop.num_unpublished,
            is_undecided=publisher.is_undecided,
        )

    async def release(self, grant: LeaseGrant) -> None:
        """Let another learner in at once; if that fails, the lease expires."""
        try:
            async with asyncio.timeout(RELEASE_TIMEOUT_S):
                await self.api.release_lease(epoch=grant.epoch)
        except (RemoteError, TimeoutError) as error:
            problem = str(error) or f"no answer in {RELEASE_TIMEOUT_S:g} s"
            _LOG.warning("the lease of epoch %d could not be released, it will expire: %s", grant.epoch, problem)


def is_superseded(error: BaseException) -> bool:
    """Whether another learner's epoch ended this one."""
    if isinstance(error, BaseExceptionGroup):
        return any(is_superseded(each) for each in error.exceptions)
    return isinstance(error, StaleEpoch)
