"""Publishing a version, in an order that survives a crash between any two lines of it.

    1 stage       weights rounded into an arena that is not the shadow
    2 encode      delta against the shadow (or snapshot), manifest; the same for each flavour
    3 checkpoint  masters, optimizer and this publication's key: from here on a restart can finish the work
    4 upload      payloads by digest, resumable
    5 commit      one compare-and-set at the coordinator, flavours included; a lost answer is asked for by the key
    6 advance     only now: shadow := arena, the head moves

Guarantees: what samplers can have and what the next delta starts from are the same bits. Must never advance the shadow
before the durable answer, nor send new content under a key whose fate is unknown.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path

from heterorl.common.api import LearnerApi
from heterorl.common.errors import DigestMismatch, GroupNotAvailable, PayloadMissing, RemoteError
from heterorl.common.identity.signing import Signer
from heterorl.common.model.quantise import scales_of
from heterorl.common.process.files import make_directory
from heterorl.common.process.patience import Patience, is_transient
from heterorl.common.process.threads import in_thread
from heterorl.common.types.common import StepReport
from heterorl.common.types.policy import NO_VERSION, FlavourVersion, PayloadRef, PublishRequest
from heterorl.common.types.rollout import GroupId
from heterorl.common.weights.arena import Arena, Layout
from heterorl.common.wire.policy import manifest_digest
from heterorl.learner.backends.backend import TrainBackend
from heterorl.learner.observe import observe_version
from heterorl.learner.publish.canary import Canary
from heterorl.learner.publish.checkpoint import CheckpointStore
from heterorl.learner.publish.cursor import Cursor, step_id
from heterorl.learner.publish.encode import Encoded, Position, encode_version
from heterorl.learner.publish.flavours import EncodedFlavour, Flavours
from heterorl.learner.publish.journal import Journal
from heterorl.learner.publish.upload import upload

_LOG = logging.getLogger(__name__)
MAX_REPAIRS = 3
"""Times a payload that uploads begin again because the coordinator says that one is missing or wrong: each answer names
one, and a power cut at the coordinator may have spoiled them all."""


class Publisher:
    """Turns weights into versions; holds the position of the run and the shadow."""

    def __init__(
        self,
        api: LearnerApi,
        *,
        run_id: str,
        epoch: int,
        layout: Layout,
        directory: Path,
        store: CheckpointStore,
        journal: Journal,
        patience: Patience,
        snapshot_every_versions: int,
        checkpoint_every_versions: int,
        signer: Signer | None = None,
        canary: Canary | None = None,
        threads: int = 1,
        flavours: Flavours | None = None,
    ) -> None:
        self.threads = threads
        """Chunks of weights that are coded at once."""
        self._api = api
        self._run_id = run_id
        self._epoch = epoch
        self._layout = layout
        self._directory = directory
        self._store = store
        self._journal = journal
        self._patience = patience
        self._snapshot_every = snapshot_every_versions
        self._checkpoint_every = checkpoint_every_versions
        self._signer = signer
        self._canary = canary
        self.flavours = flavours
        self._spare: Arena | None = None
        self.is_undecided = False
        """Whether a version was sent whose fate is not known here."""
        self.position = Position(head_version=NO_VERSION, lineage_version=NO_VERSION, lineage_digest="", shadow=None)
        make_directory(directory)

    def remove_leftovers(self) -> None:
        """Remove payloads of an earlier process: what it did not publish is encoded again."""
        for path in self._directory.glob("v[0-9]*"):
            path.unlink()
        if self.flavours is not None:
            self.flavours.remove_leftovers()

    async def begin_flavours(self, *, step: int, saved_by: TrainBackend) -> None:
        """Publish the head's weights once more where a flavour has no version: who pulls it would have none to use."""
        if self.flavours is None:
            return
        await self.flavours.align(self.position)
        shadow = self.position.shadow
        if shadow is not None and self.flavours.are_to_begin:
            _LOG.info("version %d repeats the head, so that a flavour begins", self.position.head_version + 1)
            await self.publish(shadow.copy(), step=step, saved_by=saved_by, is_last=True)

    async def stage(self, backend: TrainBackend) -> Arena:
        """Round the masters into an arena of its own; the shadow is not touched."""
        if self._spare is None:
            self._spare = Arena(self._layout)
        await in_thread(backend.store, self._spare, published=self.position.shadow)
        return self._spare

    async def publish(
        self,
        arena: Arena,
        *,
        step: int,
        consumed: Sequence[GroupId] = (),
        reports: Sequence[StepReport] = (),
        saved_by: TrainBackend | None,
        is_last: bool = False,
    ) -> None:
        """Make `arena` the next version.

        Args:
            arena: from `stage`.
            step: optimizer steps in it.
            consumed: every group of these steps.
            reports: the steps since the last version.
            saved_by: writes the checkpoint; None when a checkpoint of this publication exists already.
            is_last: a checkpoint is due whatever the cadence.

        Raises:
            GroupNotAvailable: the steps must be undone; the position has not moved, the checkpoint is discarded.
            ParentNotHead, StaleEpoch: this learner must stop.
        """
        version = self.position.head_version + 1
        with_snapshot = version % self._snapshot_every == 0
        encoded = await in_thread(
            encode_version,
            self.position,
            arena,
            directory=self._directory,
            run_id=self._run_id,
            epoch=self._epoch,
            step=step,
            with_snapshot=with_snapshot,
            threads=self.threads,
        )
        forms = await self._encode_flavours(arena, step=step, with_snapshot=with_snapshot)
        cursor = self._cursor(encoded, consumed, reports)
        is_rollback = cursor.lineage_version != cursor.parent_version
        is_due = is_last or is_rollback or version % self._checkpoint_every == 0
        checkpoint = None
        if saved_by is not None and is_due:
            checkpoint = await in_thread(
                self._store.write,
                cursor,
                backend=saved_by,
                arena=arena,
                snapshot=encoded.snapshot,
                scales={form.flavour: scales_of(form.arena) for form in forms},
            )
        started = time.perf_counter()
        files = [*encoded.files, *(file for form in forms for file in form.encoded.files)]
        await self._upload(files)
        request = await self._request(cursor, arena, forms, encode_s=encoded.encode_s)
        self.is_undecided = True
        try:
            await self._commit(request, files)
        except GroupNotAvailable:
            self.is_undecided = False
            if checkpoint is not None:
                await in_thread(self._store.discard, checkpoint)
            _remove(files)
            raise
        publish_s = time.perf_counter() - started
        self._advance(arena, encoded)
        self.is_undecided = False
        if self.flavours is not None:
            self.flavours.advance(forms)
        _remove(files)
        observe_version(encoded.manifest, encode_s=encoded.encode_s, publish_s=publish_s)
        self._journal.note_version(encoded.manifest, reports, encode_s=encoded.encode_s, publish_s=publish_s)
        _LOG.info(
            "version %d is published: step %d, %d of %d values changed, %d bytes",
            version,
            step,
            encoded.manifest.num_changed,
            encoded.manifest.num_elements,
            sum(payload.num_bytes for payload in encoded.manifest.payloads),
        )

    def _cursor(self, encoded: Encoded, consumed: Sequence[GroupId], reports: Sequence[StepReport]) -> Cursor:
        manifest = encoded.manifest
        parent = self.position.head_version
        key = step_id(run_id=self._run_id, parent_version=parent, step=manifest.step, state_root=manifest.state_root)
        return Cursor(
            run_id=self._run_id,
            step=manifest.step,
            step_id=key,
            version=manifest.version,
            parent_version=parent,
            lineage_version=self.position.lineage_version,
            state_root=manifest.state_root,
            manifest=encoded.manifest_bytes,
            consumed=tuple(consumed),
            reports=tuple(reports),
        )

    async def _encode_flavours(self, arena: Arena, *, step: int, with_snapshot: bool) -> tuple[EncodedFlavour, ...]:
        if self.flavours is None:
            return ()
        await self.flavours.align(self.position)
        return await in_thread(self.flavours.encode, self.position, arena, step=step, with_snapshot=with_snapshot)

    async def _request(
        self, cursor: Cursor, arena: Arena, forms: Sequence[EncodedFlavour], *, encode_s: float
    ) -> PublishRequest:
        flavours: tuple[FlavourVersion, ...] = ()
        if self.flavours is not None:
            flavours = await in_thread(self.flavours.state, forms, signer=self._signer, canary=self._canary)
        return PublishRequest(
            epoch=self._epoch,
            step_id=cursor.step_id,
            parent_version=cursor.parent_version,
            lineage_version=cursor.lineage_version,
            manifest=cursor.manifest,
            consumed=cursor.consumed,
            reports=cursor.reports,
            signature=b"" if self._signer is None else self._signer.sign(cursor.manifest),
            canary=() if self._canary is None else await in_thread(self._canary.score, arena),
            encode_s=encode_s,
            flavours=flavours,
        )

    async def _upload(self, files: Sequence[tuple[PayloadRef, Path]]) -> None:
        for payload, path in files:
            await upload(self._api, payload, path, epoch=self._epoch, patience=self._patience)

    async def _commit(self, request: PublishRequest, files: Sequence[tuple[PayloadRef, Path]]) -> None:
        num_repairs = 0
        while True:
            try:
                await self._api.publish_version(request)
            except (PayloadMissing, DigestMismatch):
                # Wrong is as good as missing: the coordinator removed what it found, and the files are still here.
                num_repairs += 1
                if num_repairs > MAX_REPAIRS * len(files):
                    raise
                await self._upload(files)
            except (RemoteError, TimeoutError) as error:
                if not is_transient(error):
                    raise
                # The answer may be lost while the version is there: ask before anything else.
                known = await self._patience.insist(lambda: self._api.get_step(step_id=request.step_id))
                if known is not None:
                    return
                await self._patience.wait(error)
            else:
                return

    def _advance(self, arena: Arena, encoded: Encoded) -> None:
        old = self.position.shadow
        # The old shadow becomes the next staging arena: two arenas, however many versions.
        self._spare = old if old is not None and old.layout.layout_id == self._layout.layout_id else None
        self.position = Position(
            head_version=encoded.manifest.version,
            lineage_version=encoded.manifest.version,
            lineage_digest=manifest_digest(encoded.manifest_bytes),
            shadow=arena,
        )


def _remove(files: Sequence[tuple[PayloadRef, Path]]) -> None:
    for _, path in files:
        path.unlink(missing_ok=True)
