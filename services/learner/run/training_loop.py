"""The training loop from one position on: take whole groups, step, publish.

    the trainer      steps of n + 1    | stage, evaluate, draft of n + 1 | steps of n + 2
    the publication  encode to advance of n  (waited for)                | encode to advance of n + 1

A step counts staleness from the version that it builds on, also while that one is being published. A refused version
undoes the steps that build on it: the loop ends after the current step, and the groups of its inbox return to the
queue. An order closes the inbox; the publication ends first. A failed publication ends the loop at once.

A step's groups are fresh: as many as the step asked for, or none where the inbox closed. Groups of equal rewards are
among them, except those that `dynamic_sampling` replaces, in the order of arrival; a run whose prompts are all solved,
or all too hard, goes on. The coordinator hears of every other group, with the reason, before the next one is waited
for. Of groups that the version under publication makes too old it hears after that publication. A group that is given
up twice, because an answer was lost, is counted once.
"""

import asyncio
import dataclasses
import enum
import logging
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from heterorl.common.api import LearnerApi
from heterorl.common.errors import GroupNotAvailable, OperatorError, RunFinished
from heterorl.common.process.backoff import Backoff
from heterorl.common.process.metrics import EVALUATION_ACCURACY, STEPS_WITHOUT_SIGNAL
from heterorl.common.process.threads import in_thread, most_serious
from heterorl.common.types.common import LearnerPhase, StepReport
from heterorl.common.types.policy import LeaseGrant
from heterorl.common.types.rollout import DropReason, FinishReason, Group, GroupId, QueuedGroup, without_stale
from heterorl.learner.backends.train_backend import TrainBackend, Weights
from heterorl.learner.evaluate import Evaluation, Evaluator
from heterorl.learner.learner_config import LearnerConfig
from heterorl.learner.publish.publisher import Draft, Publisher
from heterorl.learner.run.inbox import Inbox
from heterorl.learner.sample_notes import SampleNotes
from heterorl.learner.step_metrics import StepTimer, observe_step
from heterorl.learner.train.batch import has_signal

_LOG = logging.getLogger(__name__)
NUM_STEPS = 20
"""Steps in a row without a reward signal before the warning."""


class Outcome(enum.Enum):
    """How a loop ended."""

    FINISHED = "finished"
    REFUSED = "refused"
    """The coordinator did not accept the groups of a version: masters hold steps that must be undone."""
    CLOSED = "closed"
    """An order closed the inbox between two steps: masters may hold steps of no version."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Trained:
    """The steps of one version; none when the run has them all."""

    reports: list[StepReport]
    consumed: list[GroupId]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Ready:
    draft: Draft
    trained: _Trained
    evaluation: Evaluation | None


def split_uniform(groups: Sequence[QueuedGroup], *, room: int) -> tuple[list[QueuedGroup], list[QueuedGroup]]:
    """Groups that stay, and up to `room` of equal rewards that go."""
    kept: list[QueuedGroup] = []
    replaced: list[QueuedGroup] = []
    for queued in groups:
        is_replaced = len(replaced) < room and not has_signal(queued.group)
        (replaced if is_replaced else kept).append(queued)
    return kept, replaced


@dataclass(slots=True)
class RewardSignal:
    """Counts steps in a row without rewards that differ in a group.
    Warns once for each such stretch."""

    num_flat: int = 0

    def note(self, groups: Sequence[QueuedGroup]) -> None:
        if any(has_signal(queued.group) for queued in groups):
            if self.num_flat >= NUM_STEPS:
                _LOG.info("rewards of a step differ again; %d steps before had equal ones", self.num_flat)
            self.num_flat = 0
        else:
            self.num_flat += 1
            if self.num_flat == NUM_STEPS:
                _LOG.warning("%s", _advice(groups))
        STEPS_WITHOUT_SIGNAL.set(self.num_flat)


def _advice(groups: Sequence[QueuedGroup]) -> str:
    rollouts = [rollout for queued in groups for rollout in queued.group.trainable]
    rewards = [rollout.reward for rollout in rollouts]
    num_cut = sum(rollout.finish_reason is FinishReason.LENGTH for rollout in rollouts)
    return (
        f"NO GRADIENT FROM REWARDS in {NUM_STEPS} steps in a row: all rollouts of each group had one reward. In the"
        f" newest step rewards were {min(rewards):g} to {max(rewards):g}, and {num_cut} of {len(rollouts)} completions"
        " were cut at max_new_tokens. If rewards are low: can the model answer such prompts at all (task), does it"
        " see them as it was trained to (use_chat_template), are answers cut off (sampling.max_new_tokens), does the"
        " reward find the answer in the text (task.reward)? If they are high, the task is learnt. A larger"
        " group_size makes differences more likely"
    )


@dataclass(slots=True, kw_only=True)
class TrainingLoop:
    """The training loop between two resumptions."""

    config: LearnerConfig
    backend: TrainBackend
    publisher: Publisher
    inbox: Inbox
    evaluator: Evaluator | None
    progress: StepTimer
    step: int
    api: LearnerApi
    backoff: Backoff
    grant: LeaseGrant
    """The newest answer to a renewal: the coordinator may change its bounds."""
    signal: RewardSignal = field(default_factory=RewardSignal)
    notes: SampleNotes = field(default_factory=SampleNotes)
    num_replaced: int = 0
    """Groups of equal rewards that others replaced in the newest step."""
    num_rejected: int = 0
    num_unpublished: int = 0
    """Steps of `step` that are in no version yet."""
    _parent: tuple[int, Weights] | None = None
    """The version that the next step builds on, and its weights; None: the head."""
    _outgrown: list[Group] = field(default_factory=list)
    """Groups that will be too old when the version under publication is the head."""

    async def run(self) -> Outcome:
        self.progress.begin(self.step)
        if self.step == 0 and self._is_evaluation_due(self.publisher.position.head_version):
            # The baseline; version 0 is published, so no sampler waits.
            version, shadow = self._head()
            self._note(await self._evaluate(shadow, version))
        ready: _Ready | None = None
        while True:
            try:
                trained = await self._train_and_publish(ready)
            except GroupNotAvailable as error:
                _LOG.warning("steps since version %d are undone: %s", self.publisher.position.head_version, error)
                return Outcome.REFUSED
            except RunFinished as error:
                _LOG.info("the last steps are in no version: %s", error)
                self.inbox.is_over = True
                return Outcome.FINISHED
            if trained is None:
                return Outcome.FINISHED if self.inbox.is_over else Outcome.CLOSED
            if not trained.reports:
                return Outcome.FINISHED
            ready = await self._prepare(trained)

    async def _train_and_publish(self, ready: _Ready | None) -> _Trained | None:
        """Publish a version and take the steps of the next one.
        Returns when both have ended."""
        if ready is None:
            return await self._train_version()
        if not self.config.overlap_publication:
            with self.progress.phase(LearnerPhase.PUBLISHING):
                await self._publish(ready)
            return await self._train_version()
        trained, problem = None, None
        try:
            async with asyncio.TaskGroup() as tasks:
                publication = tasks.create_task(self._publish(ready))
                try:
                    trained = await self._train_version()
                except OperatorError as error:
                    # It ends the run after the open publication of the sound version.
                    problem = error
                with self.progress.phase(LearnerPhase.PUBLISHING):
                    await asyncio.wait([publication])
        except BaseExceptionGroup as group:
            raise most_serious(group, mildest=GroupNotAvailable) from group
        if problem is not None:
            raise problem
        return trained

    async def _prepare(self, trained: _Trained) -> _Ready:
        """Round the masters, evaluate them where due, and take a draft."""
        with self.progress.phase(LearnerPhase.PUBLISHING):
            arena = await self.publisher.stage(self.backend)
        version = self.publisher.position.head_version + 1
        evaluation: Evaluation | None = None
        if self._is_evaluation_due(version):
            evaluation = await self._evaluate(arena, version)
            trained.reports[-1] = dataclasses.replace(trained.reports[-1], evaluation_accuracy=evaluation.accuracy)
        is_last = self.step >= self.config.max_steps
        with self.progress.phase(LearnerPhase.PUBLISHING):
            draft = await self.publisher.prepare(arena, step=self.step, saved_by=self.backend, is_last=is_last)
        self._parent = (version, arena)
        return _Ready(draft=draft, trained=trained, evaluation=evaluation)

    async def _publish(self, ready: _Ready) -> None:
        trained = ready.trained
        await self.publisher.carry_out(ready.draft, consumed=trained.consumed, reports=trained.reports)
        if ready.evaluation is not None:
            self._note(ready.evaluation)
        self.num_unpublished -= len(trained.reports)
        self.inbox.settle(trained.consumed)
        self.notes.published(trained.consumed)
        await self.let_go()

    def _head(self) -> tuple[int, Weights]:
        """The version that a step builds on, and its weights.
        It may be under publication."""
        if self._parent is not None:
            return self._parent
        shadow = self.publisher.position.shadow
        assert shadow is not None, "a published version leaves its shadow"
        return self.publisher.position.head_version, shadow

    async def _train_version(self) -> _Trained | None:
        """Take the steps of one version; None when the inbox closed.
        Takes none where all are taken."""
        reports: list[StepReport] = []
        consumed: list[GroupId] = []
        while len(reports) < self.config.steps_per_version and self.step < self.config.max_steps:
            head, _ = self._head()
            groups = await self.take(self.config.groups_per_step, head=head)
            if not groups:
                return None
            with self.progress.phase(LearnerPhase.COMPUTING):
                report = await in_thread(self.backend.train_step, groups, head_version=head, step=self.step + 1)
            times = self.progress.end_step(is_applied=report.is_applied)
            held_s = [self.inbox.held_s(queued.group.id) for queued in groups]
            ages_s = [queued.policy_age_s + held for queued, held in zip(groups, held_s, strict=True)]
            report = dataclasses.replace(
                report, times=times, num_replaced=self.num_replaced, policy_age_p50_s=statistics.median(ages_s),
                # Later steps of a version have moved the learner: their KL is no mismatch of engines.
                kl_token_fresh=None if reports else report.kl_token_fresh,
            )  # fmt: skip
            observe_step(report, groups, head_version=head, held_s=held_s, metrics_of_loss=self.backend.last_metrics)
            if not report.is_applied:
                await self._reject(report, groups)
                continue
            self.num_rejected = 0
            self.step += 1
            self.num_unpublished += 1
            self.signal.note(groups)
            self.notes.trained(groups, self.backend.last_log_ratios)
            reports.append(report)
            consumed += [queued.group.id for queued in groups]
        return _Trained(reports=reports, consumed=consumed)

    async def _reject(self, report: StepReport, groups: list[QueuedGroup]) -> None:
        """Abandon the groups of a step that was not applied.
        A repeated step would not be applied either."""
        ids = [queued.group.id for queued in groups]
        # The loss drops groups of equal rewards, and there were no others.
        is_empty = report.num_tokens == 0
        reason = f"step {report.step} was not finite: loss {report.loss}, gradient norm {report.grad_norm}"
        if is_empty:
            reason = f"step {report.step} has nothing to learn from: the rewards of each group are equal"
        _LOG.warning("%d groups are abandoned: %s", len(ids), reason)
        self.publisher.training_log.note_rejected_step(report)
        counted_as = DropReason.UNIFORM if is_empty else DropReason.LEARNER_ABANDONED
        await self._abandon(ids, reason, counted_as=counted_as)
        self.notes.abandoned(groups)
        if is_empty:
            self.signal.note(groups)
            return
        self.num_rejected += 1
        if self.num_rejected >= self.config.max_rejected_steps:
            raise OperatorError(
                f"{self.num_rejected} steps in a row were not finite; the last version is sound",
                action="lower backend.lr, or look at the rewards",
            )

    def _is_evaluation_due(self, version: int) -> bool:
        every = self.config.evaluation.every_versions
        return self.evaluator is not None and every > 0 and version % every == 0

    async def _evaluate(self, weights: Weights, version: int) -> Evaluation:
        assert self.evaluator is not None, "asked only when one is due"
        with self.progress.phase(LearnerPhase.EVALUATING):
            return await in_thread(self.evaluator.evaluate, await in_thread(weights.whole), version)

    def _note(self, evaluation: Evaluation) -> None:
        """Record the evaluation of a published version."""
        self.notes.evaluated(evaluation.samples)
        self.publisher.training_log.note_evaluation(evaluation.row())
        if evaluation.accuracy is not None:
            EVALUATION_ACCURACY.set(evaluation.accuracy)
            _LOG.info("version %d: held-out reward %.3f", evaluation.version, evaluation.accuracy)

    async def take(self, count: int, *, head: int) -> list[QueuedGroup]:
        """Groups for a step on version `head`; none when the inbox closed.

        `head` may be under publication.
        """
        kept: list[QueuedGroup] = []
        self.num_replaced = 0
        while len(kept) < count:
            with self.progress.waiting():
                arrived = await self.inbox.take(count - len(kept))
            if not arrived:
                return []
            fresh = await self._fresh(arrived, head=head)
            kept += await self._useful(fresh)
        return kept

    async def let_go(self) -> None:
        """Give up groups that are too old for the new head."""
        outgrown, self._outgrown = self._outgrown, []
        await self._give_up_old(outgrown)

    async def _abandon(
        self, ids: list[GroupId], reason: str, *, counted_as: DropReason = DropReason.LEARNER_ABANDONED
    ) -> None:
        """Give groups up without blame."""
        await self.backoff.retry(
            lambda: self.api.abandon_groups(epoch=self.grant.epoch, ids=ids, reason=reason, counted_as=counted_as)
        )
        self.inbox.settle(ids)

    async def _fresh(self, groups: list[QueuedGroup], *, head: int) -> list[QueuedGroup]:
        """Groups that the next version may consume.

        Gives up groups that grew too old in the inbox. One of them in a step would have the coordinator refuse the
        whole version.
        """
        bound = self.grant.max_staleness_versions
        fewest = 0
        if self.grant.masks_stale and bound >= 0:
            fewest = self.config.sampling.members(self.config.group_size)
            groups = [
                dataclasses.replace(each, group=without_stale(each.group, oldest=head - bound)) for each in groups
            ]
        old = [
            queued.group
            for queued in groups
            if 0 <= bound < head - queued.group.oldest_version or len(queued.group.trainable) < fewest
        ]
        if not old:
            return groups
        if self.publisher.position.head_version < head:
            # If that version is refused, they are not too old.
            self._outgrown += old
        else:
            await self._give_up_old(old)
        ids = [group.id for group in old]
        return [queued for queued in groups if queued.group.id not in ids]

    async def _give_up_old(self, groups: list[Group]) -> None:
        if not groups:
            return
        age = self.publisher.position.head_version - min(group.oldest_version for group in groups)
        reason = f"{age} versions old; the bound is {self.grant.max_staleness_versions}"
        _LOG.info("%d groups are abandoned before training: %s", len(groups), reason)
        # Under mask_stale the coordinator knows a group's youngest token only.
        await self._abandon([group.id for group in groups], reason, counted_as=DropReason.STALE_AT_COMMIT)

    async def _useful(self, groups: list[QueuedGroup]) -> list[QueuedGroup]:
        """Groups that are trained on; replaces at most `max_replaced_per_step` of equal rewards."""
        room = self.config.dynamic_sampling.max_replaced_per_step - self.num_replaced
        kept, replaced = split_uniform(groups, room=room)
        if replaced:
            self.num_replaced += len(replaced)
            reason = f"all rewards are equal; step {self.progress.step + 1} takes other groups"
            await self._abandon([queued.group.id for queued in replaced], reason, counted_as=DropReason.UNIFORM)
            self.notes.abandoned(replaced)
        return kept
