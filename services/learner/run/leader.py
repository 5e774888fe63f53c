"""Leading a run: the lease, its renewal, and the sessions between which versions go back or resume."""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from dataclasses import dataclass, field, replace

from heterorl.common.api import CoordinatorApi
from heterorl.common.errors import ConfigError, RemoteError, StaleEpoch
from heterorl.common.identity.signing import Signer
from heterorl.common.identity.trust import Trust
from heterorl.common.process.clock import Clock
from heterorl.common.process.patience import Patience
from heterorl.common.process.threads import in_thread
from heterorl.common.types.common import Contract
from heterorl.common.types.policy import LeaseGrant
from heterorl.common.weights.parallel import num_threads
from heterorl.learner.backends.backend import TrainBackend
from heterorl.learner.checks.admission import Limits
from heterorl.learner.checks.examiner import Examiner, Yardstick
from heterorl.learner.checks.reward_signal import RewardSignal
from heterorl.learner.checks.versions import RecentVersions
from heterorl.learner.config import LearnerConfig
from heterorl.learner.evaluate import Evaluator
from heterorl.learner.publish.canary import Canary
from heterorl.learner.publish.checkpoint import CheckpointStore
from heterorl.learner.publish.flavours import Flavours
from heterorl.learner.publish.journal import Journal
from heterorl.learner.publish.publish import Publisher
from heterorl.learner.run.feed import feed
from heterorl.learner.run.inbox import Inbox
from heterorl.learner.run.incarnation import read_incarnation
from heterorl.learner.run.lease import acquire, check_messages, renew
from heterorl.learner.run.resume import Resumption
from heterorl.learner.run.rollback import Rollback
from heterorl.learner.run.run_file import describe_run
from heterorl.learner.run.run_result import RunResult
from heterorl.learner.run.session import Outcome, Session

_LOG = logging.getLogger(__name__)
RELEASE_TIMEOUT_S = 5.0


@dataclass(slots=True, kw_only=True)
class Leader:
    """Holds the run's lease and trains under it, session after session."""

    config: LearnerConfig
    api: CoordinatorApi
    backend: TrainBackend
    contract: Contract
    clock: Clock
    rng: random.Random
    evaluator: Evaluator | None
    signer: Signer | None
    canary: Canary | None
    yardstick: Yardstick | None
    result: RunResult
    session: Session | None = None
    rollback: Rollback | None = None
    max_staleness_versions: int = -1
    signal: RewardSignal = field(default_factory=RewardSignal)

    def patience(self) -> Patience:
        """A fresh row of waits between attempts."""
        return Patience(clock=self.clock, rng=self.rng, base_s=self.config.retry_base_s, cap_s=self.config.retry_cap_s)

    async def lead(self) -> None:
        """Hold the lease and train under it."""
        grant = await acquire(
            self.api,
            holder=self.config.holder,
            contract=self.contract,
            request_id=secrets.token_hex(8),
            patience=self.patience(),
            flavours=self.config.flavours,
            incarnation=await in_thread(read_incarnation, self.config.state_dir),
            groups_per_version=self.config.groups_per_step * self.config.steps_per_version,
        )
        self.max_staleness_versions = grant.max_staleness_versions
        self.result = replace(self.result, version=grant.head_version)
        try:
            check_messages(grant, own_bytes=self.config.max_message_bytes)
        except ConfigError:
            await self.release(grant)
            raise
        try:
            async with asyncio.TaskGroup() as tasks:
                renewal = tasks.create_task(
                    renew(self.api, grant=grant, clock=self.clock, patience=self.patience(), on_grant=self.hear)
                )
                await describe_run(self.api, self.config, epoch=grant.epoch, patience=self.patience())
                await self.train(grant)
                renewal.cancel()
        except BaseException as error:
            # Whatever ended it, this process does nothing more under the lease: the next one need not wait.
            if not is_superseded(error):
                await self.release(grant)
            raise
        await self.release(grant)

    async def hear(self, grant: LeaseGrant) -> None:
        """Note the coordinator's bound; end the session at its next step boundary when there is an order."""
        self.max_staleness_versions = grant.max_staleness_versions
        if self.session is None:
            return
        self.session.max_staleness_versions = grant.max_staleness_versions
        if self.rollback and self.rollback.is_due(grant.rollback_to):
            await self.session.inbox.close()

    async def train(self, grant: LeaseGrant) -> None:
        """Sessions, one after another, until one ends the run."""
        directory = self.config.state_dir
        store = CheckpointStore(directory / "checkpoints")
        journal = Journal(directory)
        trust = Trust(() if self.signer is None else (self.signer.public_key, *self.config.trusted_keys))
        threads = num_threads(self.config.backend.threads)
        flavours = Flavours(
            self.api,
            names=self.config.flavours,
            layout=self.backend.layout,
            run_id=self.config.run_id,
            epoch=grant.epoch,
            directory=directory / "payloads",
            patience=self.patience(),
            trust=trust,
            threads=threads,
        )
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
            threads=threads,
            flavours=flavours if self.config.flavours else None,
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
            trust=trust,
            adopt_without_optimizer=self.config.adopt_without_optimizer,
        )
        examiner = self._examiner(trust)
        await in_thread(store.remove_unfinished)
        await in_thread(publisher.remove_leftovers)
        self.rollback = Rollback(resumption)
        outcome = None
        while outcome is not Outcome.FINISHED:
            step = await self.rollback.resume(is_start=outcome is None)
            # A new inbox holds nothing: whatever the last session held returns to the queue when the stream opens.
            self.session = session = Session(
                config=self.config,
                api=self.api,
                backend=self.backend,
                publisher=publisher,
                inbox=Inbox(self.config.groups_per_step * self.config.prefetch_steps),
                journal=journal,
                patience=self.patience(),
                evaluator=self.evaluator,
                epoch=grant.epoch,
                step=step,
                max_staleness_versions=self.max_staleness_versions,
                signal=self.signal,
            )
            try:
                outcome = await self._run_session(session, examiner)
            finally:
                self._note(publisher, session)
        reason = f"step {session.step} of {self.config.max_steps} is reached"
        _LOG.info("%s", reason)
        await self.patience().insist(lambda: self.api.drain(reason=reason, epoch=grant.epoch))

    def _examiner(self, trust: Trust) -> Examiner | None:
        if self.yardstick is None:
            return None
        versions = None
        if self.yardstick.replayer is not None:
            versions = RecentVersions(
                self.api,
                spool=self.config.state_dir / "checks",
                layout=self.backend.layout,
                patience=self.patience(),
                trust=trust,
                num_kept=self.config.verification.kept_versions,
                threads=num_threads(self.config.backend.threads),
            )
        # Of the operating system: no site may foresee which of its groups are checked.
        return Examiner(yardstick=self.yardstick, versions=versions, rng=secrets.SystemRandom())

    async def _run_session(self, session: Session, examiner: Examiner | None) -> Outcome:
        limits = Limits(
            group_size=self.config.group_size,
            vocab_size=self.contract.vocab_size,
            max_sequence_tokens=self.config.max_sequence_tokens,
            has_unit_rewards=self.config.loss.advantage == "beta",
        )
        async with asyncio.TaskGroup() as tasks:
            feeding = tasks.create_task(
                feed(
                    self.api,
                    session.inbox,
                    epoch=session.epoch,
                    limits=limits,
                    patience=self.patience(),
                    examiner=examiner,
                )
            )
            outcome = await session.run()
            await session.inbox.close()
            feeding.cancel()
        return outcome

    def _note(self, publisher: Publisher, session: Session) -> None:
        self.result = RunResult(
            step=session.step,
            version=publisher.position.head_version,
            is_finished=session.step >= self.config.max_steps,
            num_unpublished=session.num_unpublished,
            is_undecided=publisher.is_undecided,
        )

    async def release(self, grant: LeaseGrant) -> None:
        """Let another learner in at once; if that fails, the lease runs out by itself."""
        try:
            async with asyncio.timeout(RELEASE_TIMEOUT_S):
                await self.api.release_lease(epoch=grant.epoch)
        except (RemoteError, TimeoutError) as error:
            problem = str(error) or f"no answer in {RELEASE_TIMEOUT_S:g} s"
            _LOG.warning("the lease could not be released, it runs out by itself: %s", problem)


def is_superseded(error: BaseException) -> bool:
    """Whether another learner's epoch ended this one."""
    if isinstance(error, BaseExceptionGroup):
        return any(is_superseded(each) for each in error.exceptions)
    return isinstance(error, StaleEpoch)
