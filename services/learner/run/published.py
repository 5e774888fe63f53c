"""What the run has published, as far as this learner trusts it: manifests, and weights rebuilt from nothing."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path

from heterorl.common.api import LearnerApi
from heterorl.common.errors import StateMismatch
from heterorl.common.identity.signing import Trust
from heterorl.common.process.patience import Patience
from heterorl.common.pull.pull import TrustedPuller
from heterorl.common.types.policy import NO_VERSION
from heterorl.common.weights.arena import Arena, Layout
from heterorl.common.wire.policy import manifest_digest, manifest_from_bytes

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedVersions:
    """Asks the coordinator; `spool` is for payloads that are fetched, and is its own."""

    api: LearnerApi
    layout: Layout
    spool: Path
    patience: Patience
    trust: Trust = field(default_factory=Trust)
    threads: int = 1

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

    async def digest(self, version: int) -> str:
        """Digest of a version's manifest; empty for NO_VERSION."""
        return "" if version == NO_VERSION else manifest_digest(await self.manifest(version))

    async def rebuild(self, data: bytes) -> Arena:
        """The weights of a version as samplers have them, from the coordinator alone; `data` is its manifest.

        Raises:
            StateMismatch: the coordinator leads to another signed version of this number.
        """
        version = manifest_from_bytes(data).version
        _LOG.info("rebuilding version %d from nothing", version)
        puller = TrustedPuller(
            api=self.api,
            spool=self.spool,
            layout=self.layout,
            patience=self.patience,
            trust=self.trust,
            threads=self.threads,
        )
        pulled = await puller.pull(version)
        # A key may have signed two histories: the next delta starts from these weights and names this manifest.
        if pulled.manifest_digest != manifest_digest(data):
            raise StateMismatch(f"version {version} was rebuilt with another manifest than was shown")
        return pulled.arena
