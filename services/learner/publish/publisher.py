"""Publication of a version, safe against a crash between any two lines.

    1 stage       weights rounded into an arena that is not the shadow; the rest of a `draft`
    2 encode      delta against the shadow (or snapshot), manifest, variants; sharded weights are encoded in the draft
    3 checkpoint  masters, optimizer and this publication's key: from here a restart can finish the work
    4 upload      payloads by digest, resumable
    5 commit      one compare-and-set at the coordinator, variants included; the key finds a lost answer
    6 advance     shadow := arena, the head moves

From 2 on it does not read the backend, so the next step may compute. There are two arenas, so one publication at a
time: the next stage writes into the shadow that this advance frees.

Guarantees: samplers and the next delta have the same bits. The shadow never advances before the durable answer, and no
new content is sent under a key whose result is unknown.
"""

import functools
import logging
import time
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path

from heterorl.common.api import LearnerApi
from heterorl.common.errors import GroupNotAvailable, RunFinished, UnknownVersion
from heterorl.common.identity.signing import Signer
from heterorl.common.model.quantise import scales_of
from heterorl.common.process.backoff import Backoff
from heterorl.common.process.files import make_directory, room
from heterorl.common.process.threads import in_thread
from heterorl.common.types.common import StepReport
from heterorl.common.types.policy import NO_VERSION, PayloadRef, PublishRequest
from heterorl.common.types.rollout import GroupId
from heterorl.common.weights.arena import Arena, Layout
from heterorl.common.wire.policy_messages import manifest_digest
from heterorl.learner.backends.ranks.sharded_backend import ShardedBackend
from heterorl.learner.backends.ranks.sharded_weights import ShardedArena, VersionEngine
from heterorl.learner.backends.train_backend import TrainBackend, Weights
from heterorl.learner.publish.checkpoint_store import CheckpointStore, Cursor, UnfinishedCheckpoint, cursor_of
from heterorl.learner.publish.quantised_variants import EncodedVariant, QuantisedVariant, Variants
from heterorl.learner.publish.version_payloads import Encoded, PublishedHead, commit, encode_version, upload_all
from heterorl.learner.step_metrics import TrainingLog, observe_version
from heterorl.learner.train.model import Canary

_LOG = logging.getLogger(__name__)
_NOWHERE = PublishedHead(head_version=NO_VERSION, lineage_version=NO_VERSION, lineage_digest="", shadow=None)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Draft:
    """The next version as its step left it.

    Later steps do not change it. `arena` has the rounded weights, `forms` their variants, `canary` the log-probs of the
    canary texts, computed now by the trained model, `begun` the checkpoint where one is due. `encoded` is set where all
    ranks have encoded it.
    """

    version: int
    step: int
    arena: Weights
    canary: tuple[float, ...]
    forms: tuple[QuantisedVariant, ...]
    begun: UnfinishedCheckpoint | None
    encoded: Encoded | None = None


@dataclass(slots=True, eq=False)
class Publisher:
    """Turns weights into versions; holds the run's position and the shadow."""

    api: LearnerApi
    _: KW_ONLY
    run_id: str
    epoch: int
    layout: Layout
    directory: Path
    store: CheckpointStore
    training_log: TrainingLog
    backoff: Backoff
    snapshot_every_versions: int
    checkpoint_every_versions: int
    signer: Signer | None = None
    canary: Canary | None = None
    threads: int = 1
    """Chunks of weights that are coded at once."""
    variants: Variants | None = None
    position: PublishedHead = _NOWHERE
    is_undecided: bool = False
    """Whether a version was sent whose commit is not known."""
    needs_checkpoint: bool = False
    """Whether no checkpoint leads to the head: the next version has one at any cadence."""
    _spare: Arena | None = None

    def __post_init__(self) -> None:
        make_directory(self.directory)

    def remove_leftovers(self) -> None:
        """Remove an earlier process's payloads; unpublished versions are encoded again."""
        for path in self.directory.glob("v[0-9]*"):
            path.unlink()
        if self.variants is not None:
            self.variants.remove_leftovers()

    async def repeat_head(self, *, step: int, saved_by: TrainBackend) -> None:
        """Publish the head's weights again where new samplers cannot get them.
        A variant has no version, or no payloads lead to the head."""
        shadow, why = self.position.shadow, ""
        if self.variants is not None:
            await self.variants.align(self.position)
            why = "to start a variant" if self.variants.are_to_begin else ""
        if shadow is None or not (why or await self.is_head_lost()):
            return
        _LOG.info("version %d repeats the head, %s", self.position.head_version + 1, why or "as a snapshot")
        await self.publish((await in_thread(shadow.whole)).copy(), step=step, saved_by=saved_by, is_last=True)

    async def stage(self, backend: TrainBackend) -> Weights:
        """Round the masters into weights of their own; the shadow stays.
        They are sharded where all ranks make a version."""
        shadow, maker = self.position.shadow, maker_of(backend, with_variants=self.variants is not None)
        if maker is not None:
            if isinstance(shadow, Arena):
                shadow = await in_thread(maker.divide, shadow)
                self.position = replace(self.position, shadow=shadow)
            return await in_thread(maker.stage)
        assert not isinstance(shadow, ShardedArena), "one process has all of the shadow"
        # Given away: an open publication still reads its own arena.
        arena, self._spare = self._spare or Arena(self.layout), None
        await in_thread(backend.store, arena)
        return arena

    async def publish(
        self,
        arena: Weights,
        *,
        step: int,
        consumed: Sequence[GroupId] = (),
        reports: Sequence[StepReport] = (),
        saved_by: TrainBackend | None,
        is_last: bool = False,
    ) -> None:
        """Make `arena` the next version: `prepare` and `carry_out`."""
        draft = await self.prepare(arena, step=step, saved_by=saved_by, is_last=is_last)
        await self.carry_out(draft, consumed=consumed, reports=reports)

    async def prepare(
        self, arena: Weights, *, step: int, saved_by: TrainBackend | None, is_last: bool = False
    ) -> Draft:
        """Take from the backend all that the next version needs.

        The backend may go on afterwards. `arena` is from `stage`. Without `saved_by` a checkpoint of this publication
        exists already; `is_last` writes one at any cadence. Raises DiskFull if there is no room for a payload or
        checkpoint; the position is unchanged.
        """
        position = self.position
        version = position.head_version + 1
        forms: tuple[QuantisedVariant, ...] = ()
        if self.variants is not None:
            await self.variants.align(position)
            forms = await in_thread(self.variants.quantise, arena.whole(), canary=self.canary)
        is_rollback = position.lineage_version != position.head_version
        is_due = is_last or is_rollback or self.needs_checkpoint or version % self.checkpoint_every_versions == 0
        begun = None
        if saved_by is not None and is_due:
            begun = await in_thread(self.store.begin, version, saved_by)
        scorer = self.canary
        canary = () if scorer is None else await in_thread(lambda: scorer.score(arena.whole()))
        encoded = None
        if isinstance(arena, ShardedArena):
            # All ranks take part, so before the next step begins.
            encoded = await in_thread(self._encode, arena, step, await self._is_snapshot_due())
            if begun is not None and encoded.snapshot is None:
                await in_thread(self.store.write_published, begun, arena)
        return Draft(version=version, step=step, arena=arena, canary=canary, forms=forms, begun=begun, encoded=encoded)

    async def carry_out(
        self, draft: Draft, *, consumed: Sequence[GroupId] = (), reports: Sequence[StepReport] = ()
    ) -> None:
        """Publish a draft; one at a time, without the backend.

        `consumed` are all groups of its steps, `reports` the steps since the last version.

        Raises:
            GroupNotAvailable: the steps must be undone; the position has not moved, the checkpoint is discarded.
            RunFinished: the same, and no version comes after the head.
            ParentNotHead, StaleEpoch: this learner must stop.
            DiskFull: there is no room for a payload or checkpoint; the upload has not begun.
        """
        assert draft.version == self.position.head_version + 1, "a draft is of the version after the head"
        encoded = draft.encoded
        with_snapshot = encoded is None and await self._is_snapshot_due()
        if encoded is None:
            encoded = await in_thread(self._encode, draft.arena, draft.step, with_snapshot)
        forms: tuple[EncodedVariant, ...] = ()
        if self.variants is not None:
            encode = functools.partial(self.variants.encode, step=draft.step, with_snapshot=with_snapshot)
            with room(self.directory):
                forms = await in_thread(encode, self.position, draft.forms)
        cursor = cursor_of(encoded, self.position, consumed=consumed, reports=reports)
        checkpoint = None
        if draft.begun is not None:
            checkpoint = await in_thread(
                self.store.write,
                cursor,
                begun=draft.begun,
                arena=draft.arena,
                snapshot=encoded.snapshot,
                scales={form.variant: scales_of(form.arena) for form in forms},
            )
        started = time.perf_counter()
        files = [*encoded.files, *(file for form in forms for file in form.encoded.files)]
        await upload_all(self.api, files, epoch=self.epoch, backoff=self.backoff)
        request = self._request(cursor, draft, forms, encode_s=encoded.encode_s)
        self.is_undecided = True
        try:
            await commit(self.api, request, files, backoff=self.backoff)
        except (GroupNotAvailable, RunFinished):
            self.is_undecided = False
            if checkpoint is not None:
                await in_thread(self.store.discard, checkpoint)
            _remove(files)
            raise
        publish_s = time.perf_counter() - started
        self._advance(draft.arena, encoded)
        self.is_undecided = False
        if checkpoint is not None:
            self.needs_checkpoint = False
        if self.variants is not None:
            self.variants.advance(forms)
        _remove(files)
        observe_version(encoded.manifest, encode_s=encoded.encode_s, publish_s=publish_s)
        self.training_log.note_version(encoded.manifest, reports, encode_s=encoded.encode_s, publish_s=publish_s)
        _LOG.info(
            "version %d is published%s: step %d, %d of %d values changed, %d bytes",
            draft.version,
            "" if checkpoint is None else " with a checkpoint",
            draft.step,
            encoded.manifest.num_changed,
            encoded.manifest.num_elements,
            sum(payload.num_bytes for payload in encoded.manifest.payloads),
        )

    async def _is_snapshot_due(self) -> bool:
        is_at_cadence = (self.position.head_version + 1) % self.snapshot_every_versions == 0
        # Without a shadow it is a snapshot in any case.
        return is_at_cadence or (self.position.shadow is not None and await self.is_head_lost())

    async def is_head_lost(self) -> bool:
        """Whether no payloads lead a new sampler to the head's variants.
        The coordinator puts damaged payloads aside; further deltas would help no new sampler."""
        plan = functools.partial(
            self.api.plan_pull, have_version=NO_VERSION, have_root="", want_version=self.position.head_version
        )
        try:
            for variant in ("", *(() if self.variants is None else self.variants.begun)):
                await self.backoff.retry(functools.partial(plan, variant=variant))
        except UnknownVersion as error:
            _LOG.warning("the next version is a snapshot, for new samplers: %s", error.args[0])
            return True
        return False

    def _encode(self, arena: Weights, step: int, with_snapshot: bool) -> Encoded:
        with room(self.directory):
            return encode_version(
                self.position,
                arena,
                directory=self.directory,
                run_id=self.run_id,
                epoch=self.epoch,
                step=step,
                with_snapshot=with_snapshot,
                threads=self.threads,
            )

    def _request(
        self, cursor: Cursor, draft: Draft, forms: Sequence[EncodedVariant], *, encode_s: float
    ) -> PublishRequest:
        variants = () if self.variants is None else self.variants.state(forms, signer=self.signer)
        return PublishRequest(
            epoch=self.epoch,
            step_id=cursor.step_id,
            parent_version=cursor.parent_version,
            lineage_version=cursor.lineage_version,
            manifest=cursor.manifest,
            consumed=cursor.consumed,
            reports=cursor.reports,
            signature=b"" if self.signer is None else self.signer.sign(cursor.manifest),
            canary=draft.canary,
            encode_s=encode_s,
            variants=variants,
        )

    def _advance(self, arena: Weights, encoded: Encoded) -> None:
        old = self.position.shadow
        # The old shadow becomes the next staging arena: two arenas, however many versions.
        self._spare = old if isinstance(old, Arena) and old.layout.layout_id == self.layout.layout_id else None
        self.position = PublishedHead(
            head_version=encoded.manifest.version,
            lineage_version=encoded.manifest.version,
            lineage_digest=manifest_digest(encoded.manifest_bytes),
            shadow=arena,
        )


def _remove(files: Sequence[tuple[PayloadRef, Path]]) -> None:
    for _, path in files:
        path.unlink(missing_ok=True)


def maker_of(backend: TrainBackend, *, with_variants: bool) -> VersionEngine | None:
    """The engine with which several ranks make versions; else None.
    Rank 0 makes them otherwise, as it does variants."""
    if with_variants or not isinstance(backend, ShardedBackend) or not backend.is_divided:
        return None
    return backend.versions
