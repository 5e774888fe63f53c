"""Training from one position on: take whole groups, step, publish; until the end, or until a step is refused."""

from __future__ import annotations

import dataclasses
import enum
import logging
from dataclasses import dataclass, field

from heterorl.common.api import LearnerApi
from heterorl.common.errors import GroupNotAvailable, OperatorError
from heterorl.common.process.metrics import EVALUATION_ACCURACY
from heterorl.common.process.patience import Patience
from heterorl.common.process.threads import in_thread
from heterorl.common.types.common import StepReport
from heterorl.common.types.rollout import GroupId, QueuedGroup, Rejection
from heterorl.common.weights.arena import Arena
from heterorl.learner.backends.backend import TrainBackend
from heterorl.learner.checks.judge import judge_log_ratios
from heterorl.learner.checks.replay import log_ratios
from heterorl.learner.checks.reward_signal import RewardSignal
from heterorl.learner.config import LearnerConfig
from heterorl.learner.evaluate import Evaluator
from heterorl.learner.observe import observe_step
from heterorl.learner.publish.journal import Journal
from heterorl.learner.publish.publish import Publisher
from heterorl.learner.run.inbox import Inbox

_LOG = logging.getLogger(__name__)


class Outcome(enum.Enum):
    """How a session ended."""

    FINISHED = "finished"
    REFUSED = "refused"
    """The coordinator did not accept the groups of a version: masters hold steps that must be undone."""
    CLOSED = "closed"
    """The inbox was closed between two steps, for an order: masters may hold steps that no version has."""


@dataclass(slots=True, kw_only=True)
class Session:
    """The training loop between two resumptions."""

    config: LearnerConfig
    api: LearnerApi
    backend: TrainBackend
    publisher: Publisher
    inbox: Inbox
    journal: Journal
    patience: Patience
    evaluator: Evaluator | None
    epoch: int
    step: int
    max_staleness_versions: int = -1
    """The coordinator's bound at the commit of a version; -1 where it is not known."""
    signal: RewardSignal = field(default_factory=RewardSignal)
    num_rejected: int = 0
    num_unpublished: int = 0
    """Steps of `step` that are in no version yet."""

    async def run(self) -> Outcome:
        """Train until `max_steps`, a refusal, or the end of the inbox."""
        if self.step == 0 and self._is_evaluation_due(self.publisher.position.head_version):
            # The baseline; version 0 is out already, so no sampler waits for it.
            shadow = self.publisher.position.shadow
            assert shadow is not None, "a published version leaves its shadow"
            await self._evaluate(shadow, self.publisher.position.head_version)
        while self.step < self.config.max_steps:
            trained = await self._train_version()
            if trained is None:
                return Outcome.CLOSED
            reports, consumed = trained
            arena = await self.publisher.stage(self.backend)
            version = self.publisher.position.head_version + 1
            if self._is_evaluation_due(version):
                accuracy = await self._evaluate(arena, version)
                reports[-1] = dataclasses.replace(reports[-1], evaluation_accuracy=accuracy)
            try:
                await self.publisher.publish(
                    arena,
                    step=self.step,
                    consumed=consumed,
                    reports=reports,
                    saved_by=self.backend,
                    is_last=self.step >= self.config.max_steps,
                )
            except GroupNotAvailable as error:
                _LOG.warning("steps since version %d are undone: %s", version - 1, error)
                return Outcome.REFUSED
            self.num_unpublished = 0
            self.inbox.settle(consumed)
        return Outcome.FINISHED

    async def _train_version(self) -> tuple[list[StepReport], list[GroupId]] | None:
        """Take the steps of one version; None when the inbox closed."""
        reports: list[StepReport] = []
        consumed: list[GroupId] = []
        while len(reports) < self.config.steps_per_version and self.step < self.config.max_steps:
            groups = await self._take(self.config.groups_per_step)
            if not groups:
                return None
            head = self.publisher.position.head_version
            report = await in_thread(self.backend.train_step, groups, head_version=head, step=self.step + 1)
            held_s = [self.inbox.held_s(queued.group.id) for queued in groups]
            observe_step(report, groups, head_version=head, held_s=held_s)
            if not report.is_applied:
                await self._reject(report, groups)
                continue
            self.num_rejected = 0
            self.step += 1
            self.num_unpublished += 1
            self.signal.note(groups)
            reports.append(report)
            consumed += [queued.group.id for queued in groups]
        return reports, consumed

    async def _take(self, count: int) -> list[QueuedGroup]:
        """So many groups within the bound on staleness and the envelope of log-ratios; none when the inbox closed."""
        config = self.config.verification
        kept: list[QueuedGroup] = []
        while len(kept) < count:
            arrived = await self.inbox.take(count - len(kept))
            if not arrived:
                return []
            taken = await self._fresh(arrived)
            if config.max_log_ratio == 0:
                kept += taken
                continue
            groups = [queued.group for queued in taken]
            temperature = self.config.sampling.semantics().logprob_temperature
            shadow = self.publisher.position.shadow
            assert shadow is not None, "a published version leaves its shadow"
            model = self.backend.torch_model
            found = await in_thread(log_ratios, model, groups, weights=shadow, temperature=temperature)
            findings = [judge_log_ratios(ratios, config) for ratios in found]
            kept += [queued for queued, finding in zip(taken, findings, strict=True) if finding.is_sound]
            rejections = [
                Rejection(id=group.id, reason=finding.reason, detail=finding.detail)
                for group, finding in zip(groups, findings, strict=True)
                if finding.reason is not None
            ]
            if rejections:
                await self._tell(rejections)
        return kept

    async def _fresh(self, groups: list[QueuedGroup]) -> list[QueuedGroup]:
        """Those that the version to come may consume; the others, which grew too old in the inbox, are given up.

        One of them in a step would have the coordinator refuse the whole version.
        """
        head, bound = self.publisher.position.head_version, self.max_staleness_versions
        old = [queued.group for queued in groups if 0 <= bound < head - queued.group.oldest_version]
        if not old:
            return groups
        reason = f"{head - min(group.oldest_version for group in old)} versions old; the bound is {bound}"
        ids = [group.id for group in old]
        _LOG.info("%d groups are given up before they are trained on: %s", len(ids), reason)
        await self.patience.insist(lambda: self.api.abandon_groups(epoch=self.epoch, ids=ids, reason=reason))
        self.inbox.settle(ids)
        return [queued for queued in groups if queued.group.id not in ids]

    async def _tell(self, rejections: list[Rejection]) -> None:
        _LOG.warning("%d groups are outside the envelope of log-ratios", len(rejections))
        await self.patience.insist(lambda: self.api.reject_groups(epoch=self.epoch, rejections=rejections))
        self.inbox.settle(rejection.id for rejection in rejections)

    async def _reject(self, report: StepReport, groups: list[QueuedGroup]) -> None:
        """Give up groups that made a loss or gradient that is not finite; they would do so again."""
        ids = [queued.group.id for queued in groups]
        reason = f"step {report.step} was not finite: loss {report.loss}, gradient norm {report.grad_norm}"
        _LOG.warning("%d groups are abandoned: %s", len(ids), reason)
        self.journal.note_rejected_step(report)
        await self.patience.insist(lambda: self.api.abandon_groups(epoch=self.epoch, ids=ids, reason=reason))
        self.inbox.settle(ids)
        self.num_rejected += 1
        if self.num_rejected >= self.config.max_rejected_steps:
            raise OperatorError(
                f"{self.num_rejected} steps in a row were not finite; the last version is sound",
                action="lower backend.lr, or look at the rewards",
            )

    def _is_evaluation_due(self, version: int) -> bool:
        every = self.config.evaluation.every_versions
        return self.evaluator is not None and every > 0 and version % every == 0

    async def _evaluate(self, arena: Arena, version: int) -> float | None:
        assert self.evaluator is not None, "asked only when one is due"
        evaluation = await in_thread(self.evaluator.evaluate, arena, version)
        self.journal.note_evaluation(dataclasses.asdict(evaluation))
        if evaluation.accuracy is not None:
            EVALUATION_ACCURACY.set(evaluation.accuracy)
            _LOG.info("version %d: held-out accuracy %.3f", version, evaluation.accuracy)
        return evaluation.accuracy
