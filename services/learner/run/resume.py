"""Resumption from a checkpoint, by the state of its publication.

    the checkpoint's publication      plan        action
    is the head                       CONTINUE    its state becomes the masters, without a publication
    never committed, after the head   REPUBLISH   publishes it; if its groups are refused, tries an older one
    in the lineage, before the head   ROLL_BACK   publishes it again over the head: abandons the versions between
    the same, and one is another's    ADOPT       as without a checkpoint: no other learner's version is abandoned
    never committed, after another    SKIP        tries the next older checkpoint
    the same, of a lost history       SKIP        the same; the coordinator was restored from a backup
    abandoned                         SKIP        the same

    no checkpoint was taken, and
    there is no version               START       publishes version 0; only where there is no checkpoint at all
    there is a head                   ADOPT       takes its published weights, with a new optimizer

A checkpoint that the disk does not give, or that restores to another state than it published, is skipped too.

A fresh start and a restart after any crash take the same path. Afterwards the backend holds the weights of the head,
and the publisher's position is the coordinator's. Its shadow is the state that samplers have. It is a restored
checkpoint whose state root is the head's, or rebuilt from the coordinator.
"""

import enum
import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from heterorl.common.errors import (
    ConfigError,
    CorruptData,
    CorruptStore,
    GroupNotAvailable,
    OperatorError,
    RunFinished,
    StateMismatch,
    UnknownPayload,
    UnknownVersion,
)
from heterorl.common.process.threads import in_thread
from heterorl.common.types.policy import NO_VERSION, Manifest
from heterorl.common.weights.arena import Arena
from heterorl.common.wire.policy_messages import manifest_digest, manifest_from_bytes
from heterorl.learner.backends.train_backend import TrainBackend, Weights
from heterorl.learner.publish.checkpoint_store import (
    BACKEND_DIRECTORY,
    Cursor,
    find_published,
    read_all_scales,
    read_checkpoint,
)
from heterorl.learner.publish.publisher import Publisher, maker_of
from heterorl.learner.publish.version_payloads import PublishedHead, PublishedVersions
from heterorl.learner.run.state_directory import EPOCHS_FILE

_LOG = logging.getLogger(__name__)
NUM_READS = 3
"""Reads of a checkpoint that the disk does not give, before the one before it is taken."""


class ResumePlan(enum.Enum):
    """How to go on."""

    CONTINUE = "continue"
    REPUBLISH = "republish"
    ROLL_BACK = "roll_back"
    SKIP = "skip"
    START = "start"
    ADOPT = "adopt"


def decide(
    cursor: Cursor,
    *,
    head_version: int,
    committed_version: int | None,
    is_in_lineage: bool,
    anothers_version: int | None = None,
    is_lost_history: bool = False,
) -> tuple[ResumePlan, str]:
    """The plan for a checkpoint.

    `committed_version` is the version of its publication; None is final under the newest epoch, since an older epoch's
    publication can no longer arrive. A version in the lineage was not abandoned. `anothers_version` is a later version
    that another learner published, if any. With `is_lost_history` it follows another version of the head's number.
    """
    if committed_version is None and is_lost_history:
        return ResumePlan.SKIP, f"it follows another version {cursor.parent_version} than the coordinator has"
    if committed_version is None:
        if cursor.parent_version == head_version:
            return ResumePlan.REPUBLISH, f"its publication after version {head_version} was never committed"
        return ResumePlan.SKIP, f"it follows version {cursor.parent_version}, the head is version {head_version}"
    if committed_version == head_version:
        return ResumePlan.CONTINUE, f"it is the head, version {head_version}"
    if is_in_lineage and anothers_version is not None:
        where = f"version {anothers_version} is of an epoch that this directory does not know"
        return ResumePlan.ADOPT, f"it is version {committed_version}, {where}"
    if is_in_lineage:
        return ResumePlan.ROLL_BACK, f"it is version {committed_version}, the head is version {head_version}"
    return ResumePlan.SKIP, f"version {committed_version} was abandoned"


def decide_without(*, head_version: int, num_checkpoints: int, state_dir: Path, run_id: str) -> ResumePlan:
    """The plan where no checkpoint was taken.
    Raises OperatorError if there are checkpoints of a run whose versions the coordinator has lost."""
    if head_version != NO_VERSION:
        return ResumePlan.ADOPT
    if num_checkpoints:
        raise OperatorError(
            f"{state_dir} has checkpoints of run {run_id}, the coordinator has no version of it",
            action="restore the coordinator's data_dir, or choose another state_dir for a new run",
        )
    return ResumePlan.START


def no_checkpoint(state_dir: Path, head: Manifest, *, back: str = "") -> ConfigError:
    """The error of a learner that has only published weights."""
    run = f"run {head.run_id}, which stands at version {head.version}"
    return ConfigError(
        "adopt_without_optimizer",
        f"{state_dir} has no usable checkpoint of {run}, step {head.step}: going on from its published weights discards"
        " the optimizer's state",
        action="start the learner that trained it, or this one with that one's state_dir; where that is lost,"
        f" set adopt_without_optimizer = true for one start{back}",
    )


@dataclass(slots=True, kw_only=True)
class Resumption:
    """Brings backend, publisher and coordinator to the same version."""

    backend: TrainBackend
    publisher: Publisher
    published: PublishedVersions
    state_dir: Path
    adopt_without_optimizer: bool = False
    own_epochs: Sequence[int] = ()
    """Epochs of this state directory's learner, ascending; earlier ones may be its own too."""

    async def run(self) -> int:
        """Resume; returns the number of optimizer steps in the weights.

        Raises OperatorError if the state directory belongs to another run or has no usable checkpoint of it, or if the
        coordinator lost this run.
        """
        publisher = self.publisher
        grant = await publisher.backoff.retry(lambda: publisher.api.renew_lease(epoch=publisher.epoch))
        head = grant.head_version
        paths = await in_thread(publisher.store.paths)
        for path in paths:
            step = await self._try(path, head, order=grant.rollback_to)
            if step is not None:
                return step
        plan = decide_without(
            head_version=head, num_checkpoints=len(paths), state_dir=self.state_dir, run_id=publisher.run_id
        )
        return await (self._start(head) if plan is ResumePlan.START else self._adopt(head))

    async def _try(self, path: Path, head: int, *, order: int) -> int | None:
        """The steps in the weights; None: the checkpoint is skipped.
        `order` is the version of an open rollback order."""
        publisher, cursor = self.publisher, await self.read(path)
        if cursor is None:
            return None
        if cursor.run_id != publisher.run_id:
            raise ConfigError(
                "state_dir",
                f"{path} belongs to run {cursor.run_id}, not {publisher.run_id}",
                action="name an empty directory, or the run_id of this one",
            )
        committed = await publisher.backoff.retry(lambda: publisher.api.get_step(step_id=cursor.step_id))
        plan, reason = decide(
            cursor,
            head_version=head,
            committed_version=committed,
            is_in_lineage=committed is not None and await self._is_in_lineage(committed, cursor.state_root),
            anothers_version=None if committed is None else await self._anothers(committed + 1, head),
            is_lost_history=committed is None and cursor.parent_version == head and await self._is_lost(cursor),
        )
        _LOG.info("checkpoint %s leads to plan %s: %s", path.name, plan.value, reason)
        if plan is ResumePlan.SKIP:
            return None
        if plan is ResumePlan.ADOPT:
            return await self._adopt(head, instead_of=committed)
        if plan is ResumePlan.REPUBLISH and await self._is_withdrawn(cursor, order):
            _LOG.warning("checkpoint %s is discarded: its rollback order was taken back", path.name)
            await in_thread(publisher.store.discard, path)
            return None
        try:
            arena = await self.restore(path, cursor)
        except (CorruptData, OSError) as error:
            _LOG.error(
                "checkpoint %s cannot be restored and is left as it is; the one before it is tried: %s", path, error
            )
            publisher.store.keep_unreadable(path)
            return None
        if plan is ResumePlan.REPUBLISH:
            return await self._republish(path, cursor, arena)
        assert committed is not None, "the other plans are of a committed version"
        if plan is ResumePlan.CONTINUE:
            return await self._continue(cursor, arena, head)
        return await self._roll_back(cursor, arena, committed, head)

    async def _is_lost(self, cursor: Cursor) -> bool:
        before = manifest_from_bytes(cursor.manifest).parent_digest
        return before != await self.published.digest(cursor.lineage_version)

    async def _is_withdrawn(self, cursor: Cursor, order: int) -> bool:
        parent = cursor.parent_version
        if cursor.reports or parent == NO_VERSION or cursor.lineage_version != parent:
            return False
        # Without steps a version repeats the head, or an ordered version.
        own = [cursor.state_root == await self._root(version) for version in {parent, order} - {NO_VERSION}]
        return not any(own)

    async def _root(self, version: int) -> str:
        publisher = self.publisher
        signed = await publisher.backoff.retry(lambda: publisher.api.get_signed_manifest(version=version))
        return manifest_from_bytes(signed.data).state_root

    async def read(self, path: Path) -> Cursor | None:
        """The cursor of a checkpoint; None when it cannot be read."""
        backoff = self.publisher.backoff
        for number in range(NUM_READS):
            if number:
                await backoff.clock.sleep(backoff.base_s)
            try:
                return await in_thread(read_checkpoint, path)
            except CorruptStore as error:
                _LOG.warning("a damaged checkpoint is passed over: %s", error)
                return None
            except OSError as error:
                problem = error
        _LOG.error(
            "CHECKPOINT %s CANNOT BE READ and is left as it is; the one before it is tried: %s (compare its owner and"
            " mode with this process's; an input/output error is the disk's)",
            path,
            problem,
        )
        self.publisher.store.keep_unreadable(path)
        return None

    async def restore(self, path: Path, cursor: Cursor) -> Weights:
        """Restore masters and optimizer of a checkpoint; returns the published weights.

        Raises:
            CorruptData: it restores to another state.
            OSError: the disk does not give it.
        """
        variants = self.publisher.variants
        await in_thread(self.backend.restore, path / BACKEND_DIRECTORY)
        maker = maker_of(self.backend, with_variants=variants is not None)
        if variants is not None:
            variants.offer_scales(await in_thread(read_all_scales, path, variants.layouts))
        published: Weights
        if maker is None:
            published = Arena(self.backend.layout)
            await in_thread(self.backend.store, published)
        else:
            published = await in_thread(maker.stage)
        root = await in_thread(published.state_root)
        if root != cursor.state_root:
            raise CorruptStore(f"{path} restores to state {root[:12]}, not to {cursor.state_root[:12]}")
        return published

    async def _is_in_lineage(self, version: int, state_root: str) -> bool:
        # Planned from itself: an old version stays in the lineage when no payload leads to it any more.
        publisher = self.publisher
        try:
            await publisher.backoff.retry(
                lambda: publisher.api.plan_pull(have_version=version, have_root=state_root, want_version=version)
            )
        except UnknownVersion:
            return False
        return True

    async def _anothers(self, first: int, last: int) -> int | None:
        """The newest of these versions that another learner published."""
        while first <= last and self.own_epochs:
            ask = functools.partial(self.publisher.api.list_manifests, first_version=first, last_version=last)
            page = await self.publisher.backoff.retry(ask)
            for manifest in map(manifest_from_bytes, page):
                if manifest.epoch > self.own_epochs[0] and manifest.epoch not in self.own_epochs:
                    return manifest.version
            last -= max(1, len(page))
        return None

    async def _own_manifest(self, version: int, cursor: Cursor) -> bytes:
        """The manifest of the version that a checkpoint's publication became."""
        data = await self.published.manifest(version)
        if manifest_from_bytes(data).state_root != cursor.state_root:
            raise StateMismatch(
                f"version {version} is not what this learner published under step id {cursor.step_id}",
                action="was the coordinator's data restored from a backup? then start with an empty state_dir",
            )
        return data

    async def _continue(self, cursor: Cursor, arena: Weights, head: int) -> int:
        data = await self._own_manifest(head, cursor)
        self.publisher.position = PublishedHead(
            head_version=head, lineage_version=head, lineage_digest=manifest_digest(data), shadow=arena
        )
        if self.publisher.training_log.last_version < head:
            self.publisher.training_log.note_version(manifest_from_bytes(data), cursor.reports)
        return cursor.step

    async def _republish(self, path: Path, cursor: Cursor, arena: Weights) -> int | None:
        is_rollback = cursor.lineage_version != cursor.parent_version
        shadow = (
            None if is_rollback or cursor.parent_version == NO_VERSION else await self._shadow_of(cursor.parent_version)
        )
        self.publisher.position = PublishedHead(
            head_version=cursor.parent_version,
            lineage_version=cursor.lineage_version,
            lineage_digest=await self.published.digest(cursor.lineage_version),
            shadow=shadow,
        )
        try:
            await self.publisher.publish(
                arena, step=cursor.step, consumed=cursor.consumed, reports=cursor.reports, saved_by=None
            )
        except (GroupNotAvailable, RunFinished) as error:
            _LOG.warning("checkpoint %s is discarded, the one before it is tried: %s", path.name, error)
            await in_thread(self.publisher.store.discard, path)
            return None
        return cursor.step

    async def _roll_back(self, cursor: Cursor, arena: Weights, committed: int, head: int) -> int:
        _LOG.warning(
            "THE LEARNER ROLLS BACK from version %d to version %d, the newest that has a usable checkpoint: versions"
            " %d to %d are abandoned and their groups handed out again",
            head,
            committed,
            committed + 1,
            head,
        )
        self.publisher.position = PublishedHead(
            head_version=head,
            lineage_version=committed,
            lineage_digest=manifest_digest(await self._own_manifest(committed, cursor)),
            shadow=None,
        )
        # At once, without a step: samplers should leave the abandoned versions now.
        await self.publisher.publish(arena, step=cursor.step, saved_by=self.backend)
        return cursor.step

    async def _start(self, head: int) -> int:
        _LOG.info("run %s begins", self.publisher.run_id)
        self.publisher.position = PublishedHead(head_version=head, lineage_version=head, lineage_digest="", shadow=None)
        staged = await self.publisher.stage(self.backend)
        await self.publisher.publish(staged, step=0, saved_by=self.backend)
        return 0

    async def _shadow_of(self, version: int) -> Weights | None:
        """A version's weights for a delta; None if they cannot be rebuilt."""
        data = await self.published.manifest(version)
        root = manifest_from_bytes(data).state_root
        arena = await in_thread(find_published, self.publisher.store.paths(), version, root, self.backend.layout)
        if arena is not None:
            _LOG.info("version %d is taken from its checkpoint", version)
            maker = maker_of(self.backend, with_variants=self.publisher.variants is not None)
            return arena if maker is None else await in_thread(maker.divide, arena)
        try:
            return await self.published.rebuild(data)
        except (UnknownVersion, UnknownPayload, CorruptData) as error:
            _LOG.error("version %d cannot be rebuilt, the next version is a snapshot: %s", version, error)
            return None

    async def _adopt(self, head: int, *, instead_of: int | None = None) -> int:
        """Take the head's published weights.

        `instead_of` is the version of a checkpoint that is not used.
        """
        data = await self.published.manifest(head)
        step = manifest_from_bytes(data).step
        if step and not self.adopt_without_optimizer:
            epochs = self.state_dir / EPOCHS_FILE
            back = "" if instead_of is None else f", or remove {epochs} to go back to {instead_of}"
            raise no_checkpoint(self.state_dir, manifest_from_bytes(data), back=back)
        _LOG.warning(
            "VERSION %d HAS NO USABLE CHECKPOINT: its published weights become the masters; the optimizer is new", head
        )
        arena = await self.published.rebuild(data)
        await in_thread(self.backend.load_published, arena)
        self.publisher.needs_checkpoint = True
        self.publisher.position = PublishedHead(
            head_version=head, lineage_version=head, lineage_digest=manifest_digest(data), shadow=arena
        )
        return step
