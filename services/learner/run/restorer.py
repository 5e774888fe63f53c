"""Restoring a checkpoint of the disk, and versions that the run has published."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path

from heterorl.common.api import LearnerApi
from heterorl.common.errors import CorruptStore, StateMismatch
from heterorl.common.identity.signing import Trust
from heterorl.common.process.backoff import Backoff
from heterorl.common.process.threads import in_thread
from heterorl.common.pull.puller import TrustedPuller
from heterorl.common.types.policy import NO_VERSION
from heterorl.common.weights.arena import Arena, Layout
from heterorl.common.wire.policy import manifest_digest, manifest_from_bytes
from heterorl.learner.backends.train_backend import TrainBackend
from heterorl.learner.backends.version_weights import Weights, maker_of, read_snapshot
from heterorl.learner.publish.checkpoint_store import (
    PUBLISHED_FILE,
    CheckpointStore,
    Cursor,
    read_all_scales,
    read_checkpoint,
)
from heterorl.learner.publish.quantised_variants import Variants

_LOG = logging.getLogger(__name__)
NUM_READS = 3
"""Reads of a checkpoint that the disk does not give, before the one before it is taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restorer:
    """Fills a backend from a store of checkpoints, and the variants with their scales."""

    backend: TrainBackend
    store: CheckpointStore
    backoff: Backoff
    variants: Variants | None = None

    async def read(self, path: Path) -> Cursor | None:
        """The cursor of a checkpoint; None when it is damaged, or the disk does not give it."""
        for number in range(NUM_READS):
            if number:
                await self.backoff.clock.sleep(self.backoff.base_s)
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

    async def restore(self, path: Path, cursor: Cursor) -> Weights:
        """Restore masters and optimizer of a checkpoint; returns the published weights.

        Raises:
            CorruptData: it restores to another state.
            OSError: the disk does not give it.
        """
        await in_thread(self.backend.restore, self.store.backend_directory(path))
        maker = maker_of(self.backend, with_variants=self.variants is not None)
        published = await in_thread(read_snapshot, path / PUBLISHED_FILE, self.backend.layout, maker)
        if self.variants is not None:
            self.variants.offer_scales(await in_thread(read_all_scales, path, self.variants.layouts))
        # On top of what was published, or a dead band could not be told from damage.
        if isinstance(published, Arena):
            await in_thread(self.backend.store, published, published=published)
        elif maker is not None:
            published = await in_thread(maker.stage, published=published)
        root = await in_thread(published.state_root)
        if root != cursor.state_root:
            raise CorruptStore(f"{path} restores to state {root[:12]}, not to {cursor.state_root[:12]}")
        return published


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedVersions:
    """Versions from the coordinator; fetched payloads lie in `spool`, which is its own."""

    api: LearnerApi
    layout: Layout
    spool: Path
    backoff: Backoff
    trust: Trust = field(default_factory=Trust)
    threads: int = 1

    async def manifest(self, version: int) -> bytes:
        """The manifest of a version, which the next one will name as its parent.

        Raises:
            UntrustedVersion: no trusted key signed it.
            StateMismatch: it is another version's.
        """
        signed = await self.backoff.retry(lambda: self.api.get_signed_manifest(version=version))
        self.trust.check(signed.data, signed.signature, version=version)
        stated = manifest_from_bytes(signed.data).version
        if stated != version:
            raise StateMismatch(f"the manifest of version {version} is that of version {stated}")
        return signed.data

    async def digest(self, version: int) -> str:
        """Digest of a version's manifest; empty for NO_VERSION."""
        return "" if version == NO_VERSION else manifest_digest(await self.manifest(version))

    async def rebuild(self, data: bytes) -> Arena:
        """The weights of a version as samplers have them, from the coordinator only; `data` is its manifest.

        Raises:
            StateMismatch: the coordinator leads to another signed version of this number.
        """
        version = manifest_from_bytes(data).version
        _LOG.info("rebuilding version %d from nothing", version)
        puller = TrustedPuller(
            api=self.api,
            spool=self.spool,
            layout=self.layout,
            backoff=self.backoff,
            trust=self.trust,
            threads=self.threads,
        )
        pulled = await puller.pull(version)
        # A key may have signed two histories: the next delta starts from these weights and names this manifest.
        if pulled.manifest_digest != manifest_digest(data):
            raise StateMismatch(f"version {version} was rebuilt with another manifest than was shown")
        return pulled.arena
