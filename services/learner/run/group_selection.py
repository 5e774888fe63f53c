"""The choice of a step's groups: fresh, with a reward signal, within the envelope.

Guarantees: the step has as many groups as it asked for, or none where the inbox closed. The coordinator hears of every
other group, with the reason, before the next one is waited for. A group that is given up twice, because an answer was
lost, is counted once.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace

from heterorl.common.api import LearnerApi
from heterorl.common.process.backoff import Backoff
from heterorl.common.process.threads import in_thread
from heterorl.common.types.common import LearnerPhase
from heterorl.common.types.rollout import DropReason, Group, GroupId, QueuedGroup, Rejection
from heterorl.common.types.trajectory import without_stale
from heterorl.learner.backends.train_backend import TrainBackend
from heterorl.learner.backends.version_weights import Weights, whole_of
from heterorl.learner.checks.findings import judge_log_ratios
from heterorl.learner.checks.replay import log_ratios
from heterorl.learner.checks.reward_signal import split_uniform
from heterorl.learner.learner_config import LearnerConfig
from heterorl.learner.publish.publisher import Publisher
from heterorl.learner.run.inbox import Inbox
from heterorl.learner.sample_notes import SampleNotes
from heterorl.learner.step_timing import StepTimer

_LOG = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class GroupSelection:
    """Takes groups out of the inbox, and gives up those that are not trained on."""

    config: LearnerConfig
    api: LearnerApi
    backend: TrainBackend
    publisher: Publisher
    inbox: Inbox
    backoff: Backoff
    progress: StepTimer
    epoch: int
    max_staleness_versions: int = -1
    """The coordinator's bound at the commit of a version; -1 where it is not known."""
    masks_stale: bool = False
    """Whether tokens beyond that bound become context, and the others are trained."""
    notes: SampleNotes = field(default_factory=SampleNotes)
    num_replaced: int = 0
    """Groups of equal rewards that others replaced in the newest step."""
    _outgrown: list[Group] = field(default_factory=list)
    """Groups that will be too old when the version under publication is the head."""

    async def take(self, count: int, *, head: int, weights: Weights) -> list[QueuedGroup]:
        """Groups for a step on the version `head`, which may be under publication; none when the inbox closed.

        Groups of equal rewards go first: their log-ratios need no look.
        """
        kept: list[QueuedGroup] = []
        self.num_replaced = 0
        while len(kept) < count:
            with self.progress.waiting():
                arrived = await self.inbox.take(count - len(kept))
            if not arrived:
                return []
            fresh = await self._fresh(arrived, head=head)
            kept += await self._enveloped(await self._useful(fresh), weights)
        return kept

    async def published(self) -> None:
        """Give up groups that are too old for the new head."""
        outgrown, self._outgrown = self._outgrown, []
        await self._give_up_old(outgrown)

    async def abandon(
        self, ids: list[GroupId], reason: str, *, counted_as: DropReason = DropReason.LEARNER_ABANDONED
    ) -> None:
        """Give groups up without blame."""
        await self.backoff.retry(
            lambda: self.api.abandon_groups(epoch=self.epoch, ids=ids, reason=reason, counted_as=counted_as)
        )
        self.inbox.settle(ids)

    async def _fresh(self, groups: list[QueuedGroup], *, head: int) -> list[QueuedGroup]:
        """Groups that the next version may consume; gives up those that grew too old in the inbox.

        One of them in a step would have the coordinator refuse the whole version.
        """
        bound = self.max_staleness_versions
        fewest = 0
        if self.masks_stale and bound >= 0:
            fewest = self.config.sampling.members(self.config.group_size)
            groups = [replace(each, group=without_stale(each.group, oldest=head - bound)) for each in groups]
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
        reason = f"{age} versions old; the bound is {self.max_staleness_versions}"
        _LOG.info("abandoned %d groups before training: %s", len(groups), reason)
        await self.abandon([group.id for group in groups], reason)

    async def _useful(self, groups: list[QueuedGroup]) -> list[QueuedGroup]:
        """Groups that are trained on; replaces at most `max_replaced_per_step` of equal rewards."""
        room = self.config.dynamic_sampling.max_replaced_per_step - self.num_replaced
        kept, replaced = split_uniform(groups, room=room)
        if replaced:
            self.num_replaced += len(replaced)
            reason = f"all rewards are equal; step {self.progress.step + 1} takes other groups"
            await self.abandon([queued.group.id for queued in replaced], reason, counted_as=DropReason.UNIFORM)
            self.notes.abandoned(replaced)
        return kept

    async def _enveloped(self, groups: list[QueuedGroup], weights: Weights) -> list[QueuedGroup]:
        """Groups whose log-ratios under the weights that a step builds on are inside the envelope."""
        config = self.config.verification
        if config.max_log_ratio == 0 or not groups:
            return groups
        temperature = self.config.sampling.semantics().logprob_temperature
        model = self.backend.torch_model
        with self.progress.phase(LearnerPhase.EXAMINING):
            whole = await in_thread(whole_of, weights)
            found = await in_thread(
                log_ratios, model, [queued.group for queued in groups], weights=whole, temperature=temperature
            )
        findings = [judge_log_ratios(ratios, config) for ratios in found]
        rejected = {
            queued.group.id: Rejection(id=queued.group.id, reason=finding.reason, detail=finding.detail)
            for queued, finding in zip(groups, findings, strict=True)
            if finding.reason is not None
        }
        if rejected:
            _LOG.warning("rejected %d groups outside the envelope of log-ratios", len(rejected))
            rejections = list(rejected.values())
            await self.backoff.retry(lambda: self.api.reject_groups(epoch=self.epoch, rejections=rejections))
            self.inbox.settle(rejected)
            self.notes.rejected(queued.group for queued in groups if queued.group.id in rejected)
        return [queued for queued, finding in zip(groups, findings, strict=True) if finding.is_sound]
