"""Where to go on: from the checkpoints on disk and what the coordinator has committed.

One path serves a fresh start, a restart after any crash, and a refused step. Afterwards the backend holds the weights
of the head, and the publisher's shadow is what samplers have: a checkpoint with the head's root, or rebuilt.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass, field
from pathlib import Path

from heterorl.common.api import CoordinatorApi
from heterorl.common.errors import (
    ConfigError,
    CorruptData,
    CorruptStore,
    GroupNotAvailable,
    OperatorError,
    StateMismatch,
    UnknownPayload,
    UnknownVersion,
)
from heterorl.common.identity.trust import Trust
from heterorl.common.process.patience import Patience
from heterorl.common.process.threads import in_thread
from heterorl.common.pull.pull import Puller
from heterorl.common.types.policy import PullPlan
from heterorl.common.weights.arena import Arena
from heterorl.common.wire.policy import manifest_digest, manifest_from_bytes
from heterorl.learner.backends.backend import TrainBackend
from heterorl.learner.publish.checkpoint import (
    CheckpointStore,
    find_published,
    read_all_scales,
    read_checkpoint,
    read_published,
)
from heterorl.learner.publish.cursor import Cursor
from heterorl.learner.publish.encode import Position
from heterorl.learner.publish.journal import Journal
from heterorl.learner.publish.publish import Publisher
from heterorl.learner.run.fate import Action, decide, not_adopted

_LOG = logging.getLogger(__name__)
NUM_READS = 3
"""Times that a checkpoint is read which the disk does not give, before the one before it is taken."""


@dataclass(slots=True, kw_only=True)
class Resumption:
    """Brings backend, publisher and coordinator to the same version."""

    api: CoordinatorApi
    backend: TrainBackend
    publisher: Publisher
    store: CheckpointStore
    journal: Journal
    patience: Patience
    run_id: str
    epoch: int
    directory: Path
    trust: Trust = field(default_factory=Trust)
    adopt_without_optimizer: bool = False

    async def run(self) -> int:
        """Return the number of optimizer steps in the weights.

        Raises:
            OperatorError: the state directory belongs to another run or has no usable checkpoint of it, or the
                coordinator lost this run.
        """
        step = await self._resume()
        await self.publisher.begin_flavours(step=step, saved_by=self.backend)
        return step

    async def _resume(self) -> int:
        head = (await self.patience.insist(lambda: self.api.renew_lease(epoch=self.epoch))).head_version
        paths = await in_thread(self.store.paths)
        for path in paths:
            step = await self._try(path, head)
            if step is not None:
                return step
        if head == -1:
            if paths:
                raise OperatorError(
                    f"{self.directory} has checkpoints of run {self.run_id}, the coordinator has no version of it",
                    action="restore the coordinator's data_dir, or choose another state_dir to start anew",
                )
            return await self._start()
        return await self._adopt(head)

    async def read(self, path: Path) -> Cursor | None:
        """The cursor of a checkpoint; None when it is damaged, or the disk does not give it."""
        for number in range(NUM_READS):
            if number:
                await self.patience.clock.sleep(self.patience.base_s)
            try:
                return await in_thread(read_checkpoint, path)
            except CorruptStore as error:
                _LOG.warning("%s", error)
                return None
            except OSError as error:
                problem = error
        _LOG.error(
            "CHECKPOINT %s CANNOT BE READ and is left as it is; the one before it is tried: %s (compare its owner and"
            " mode with this process's; an input/output error is the disk's)",
            path,
            problem,
        )
        self.store.keep_unreadable(path)
        return None

    async def _try(self, path: Path, head: int) -> int | None:
        cursor = await self.read(path)
        if cursor is None:
            return None
        if cursor.run_id != self.run_id:
            raise ConfigError("state_dir", f"{path} belongs to run {cursor.run_id}, not {self.run_id}")
        committed = await self.patience.insist(lambda: self.api.get_step(step_id=cursor.step_id))
        action, reason = decide(
            cursor,
            head_version=head,
            committed_version=committed,
            is_in_lineage=committed is not None and await self._is_in_lineage(committed, cursor.state_root),
        )
        _LOG.info("checkpoint %s: %s, %s", path.name, action.value, reason)
        if action is Action.SKIP:
            return None
        try:
            arena = await self.restore(path, cursor)
        except (CorruptData, OSError) as error:
            _LOG.error("%s cannot be restored and is left as it is: %s", path, error)
            self.store.keep_unreadable(path)
            return None
        if action is Action.CONTINUE:
            return await self._continue(cursor, arena, head)
        if action is Action.REPUBLISH:
            return await self._republish(path, cursor, arena)
        assert committed is not None, "only a committed version is rolled back to"
        return await self._roll_back(cursor, arena, committed, head)

    async def _is_in_lineage(self, version: int, state_root: str) -> bool:
        # Planned from itself: an old version is in the lineage also when nothing leads to it any more.
        try:
            await self.patience.insist(
                lambda: self.api.plan_pull(have_version=version, have_root=state_root, want_version=version)
            )
        except UnknownVersion:
            return False
        return True

    async def restore(self, path: Path, cursor: Cursor) -> Arena:
        """Take a checkpoint's masters and optimizer; returns what was published.

        Raises:
            CorruptData: it restores to another state.
            OSError: the disk does not give it.
        """
        await in_thread(self.backend.restore, self.store.backend_directory(path))
        arena = Arena(self.backend.layout)
        await in_thread(read_published, path, arena)
        if self.publisher.flavours is not None:
            self.publisher.flavours.offer_scales(
                await in_thread(read_all_scales, path, self.publisher.flavours.layouts)
            )
        # On top of what was published, or a dead band could not be told from damage.
        await in_thread(self.backend.store, arena, published=arena)
        root = await in_thread(arena.state_root)
        if root != cursor.state_root:
            raise CorruptStore(f"{path} restores to state {root[:12]}, not to {cursor.state_root[:12]}")
        return arena

    async def manifest(self, version: int) -> bytes:
        """What the next version will name as its parent, so it must be this run's.

        Raises:
            UntrustedVersion: no trusted key signed it.
            StateMismatch: it is another version's.
        """
        signed = await self.patience.insist(lambda: self.api.get_signed_manifest(version=version))
        self.trust.check(signed.data, signed.signature, version=version)
        stated = manifest_from_bytes(signed.data).version
        if stated != version:
            raise StateMismatch(f"the manifest of version {version} is that of version {stated}")
        return signed.data

    async def _own_manifest(self, version: int, cursor: Cursor) -> bytes:
        """The manifest of a version that is said to have come of a checkpoint's publication."""
        data = await self.manifest(version)
        if manifest_from_bytes(data).state_root != cursor.state_root:
            raise StateMismatch(
                f"version {version} is not what this learner published under step id {cursor.step_id}",
                action="was the coordinator's data restored from a backup? then start with an empty state_dir",
            )
        return data

    async def _digest(self, version: int) -> str:
        return "" if version == -1 else manifest_digest(await self.manifest(version))

    async def _continue(self, cursor: Cursor, arena: Arena, head: int) -> int:
        data = await self._own_manifest(head, cursor)
        self.publisher.position = Position(
            head_version=head, lineage_version=head, lineage_digest=manifest_digest(data), shadow=arena
        )
        if self.journal.last_version < head:
            self.journal.note_version(manifest_from_bytes(data), cursor.reports)
        return cursor.step

    async def _republish(self, path: Path, cursor: Cursor, arena: Arena) -> int | None:
        is_rollback = cursor.lineage_version != cursor.parent_version
        shadow = None if is_rollback or cursor.parent_version == -1 else await self._published(cursor.parent_version)
        self.publisher.position = Position(
            head_version=cursor.parent_version,
            lineage_version=cursor.lineage_version,
            lineage_digest=await self._digest(cursor.lineage_version),
            shadow=shadow,
        )
        try:
            await self.publisher.publish(
                arena, step=cursor.step, consumed=cursor.consumed, reports=cursor.reports, saved_by=None
            )
        except GroupNotAvailable as error:
            _LOG.warning("checkpoint %s is discarded: %s", path.name, error)
            await in_thread(self.store.discard, path)
            return None
        return cursor.step

    async def _roll_back(self, cursor: Cursor, arena: Arena, committed: int, head: int) -> int:
        _LOG.warning(
            "ROLLING BACK from version %d to version %d, the newest that has a usable checkpoint: versions %d to %d are"
            " abandoned and their groups handed out again",
            head,
            committed,
            committed + 1,
            head,
        )
        self.publisher.position = Position(
            head_version=head,
            lineage_version=committed,
            lineage_digest=manifest_digest(await self._own_manifest(committed, cursor)),
            shadow=None,
        )
        # At once, without a step: samplers are to leave the abandoned versions now.
        await self.publisher.publish(arena, step=cursor.step, saved_by=self.backend)
        return cursor.step

    async def _start(self) -> int:
        _LOG.info("run %s begins", self.run_id)
        self.publisher.position = Position(head_version=-1, lineage_version=-1, lineage_digest="", shadow=None)
        staged = await self.publisher.stage(self.backend)
        await self.publisher.publish(staged, step=0, saved_by=self.backend)
        return 0

    async def _published(self, version: int) -> Arena | None:
        """What samplers have at a version, so that a delta may start from it; None when nobody has it any more."""
        root = manifest_from_bytes(await self.manifest(version)).state_root
        arena = await in_thread(find_published, self.store.paths(), version, root, self.backend.layout)
        if arena is not None:
            _LOG.info("version %d is taken from its checkpoint", version)
            return arena
        try:
            return await self.rebuild(version)
        except (UnknownVersion, UnknownPayload, CorruptData) as error:
            _LOG.error("version %d cannot be rebuilt, the next version is a snapshot: %s", version, error)
            return None

    async def _adopt(self, head: int) -> int:
        data = await self.manifest(head)
        step = manifest_from_bytes(data).step
        if step and not self.adopt_without_optimizer:
            raise not_adopted(self.directory.parent, self.run_id, version=head, step=step)
        _LOG.warning(
            "NO USABLE CHECKPOINT for version %d: its published weights become the masters, the optimizer starts anew",
            head,
        )
        arena = await self.rebuild(head)
        await in_thread(self.backend.load_published, arena)
        self.publisher.position = Position(
            head_version=head, lineage_version=head, lineage_digest=manifest_digest(data), shadow=arena
        )
        return step

    async def rebuild(self, version: int) -> Arena:
        """The weights of a version as samplers have them, from the coordinator alone."""
        _LOG.info("rebuilding version %d from nothing", version)
        puller = Puller(
            api=self.api,
            spool=self.directory / "incoming",
            layout=self.backend.layout,
            clock=self.patience.clock,
            threads=self.publisher.threads,
        )
        puller.fetcher.on_frame = self.patience.reset
        pull = functools.partial(puller.pull, held=None, want_version=version, admit=self._admit)
        return (await self.patience.insist(pull)).arena

    async def _admit(self, plan: PullPlan) -> None:
        self.trust.check(plan.manifests[-1], plan.signature, version=plan.target_version)
