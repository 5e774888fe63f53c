"""The learner's side of policy: publication and orders to go back. See heterorl.common.api for each call."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import AsyncIterator, Mapping, Sequence

from heterorl.common.errors import (
    CorruptData,
    CorruptStore,
    GroupNotAvailable,
    InvalidRequest,
    PayloadMissing,
    RunFinished,
)
from heterorl.common.types.common import Digest
from heterorl.common.types.policy import Manifest, PayloadRef, PublishRequest, PullPlan
from heterorl.common.types.rollout import GroupId
from heterorl.common.wire.policy import manifest_from_bytes
from heterorl.coordinator import status
from heterorl.coordinator.distribution import Distribution
from heterorl.coordinator.groups import queue
from heterorl.coordinator.learner_lease import Leases
from heterorl.coordinator.sites import audit, canary
from heterorl.coordinator.sites.audit import AuditKind
from heterorl.coordinator.store.database import set_meta
from heterorl.coordinator.versions import flavours as forms
from heterorl.coordinator.versions import lineage, rollback

_LOG = logging.getLogger(__name__)


class Policies(Leases, Distribution):
    """Versions and their weights."""

    # policy: the learner's side

    async def query_upload(self, *, digest: Digest) -> int:
        """Bytes of a payload that are durable."""
        return self.blobs.query(digest)

    async def upload_payload(
        self, *, epoch: int, digest: Digest, num_bytes: int, offset: int, frames: AsyncIterator[bytes]
    ) -> int:
        """Append to a payload under the epoch's fence."""
        self.room.check()
        await self.database.run(lambda connection: lineage.check_epoch(connection, epoch))
        try:
            return await self.blobs.append(digest=digest, num_bytes=num_bytes, offset=offset, frames=frames)
        except CorruptStore as error:
            self.database.fail(str(error))
            raise

    async def publish_version(self, request: PublishRequest) -> int:
        """Commit one version and consume its groups, in one transaction."""
        try:
            manifest = manifest_from_bytes(request.manifest)
            flavours = {entry.flavour: manifest_from_bytes(entry.manifest) for entry in request.flavours}
        except CorruptData as error:
            raise InvalidRequest(f"manifest: {error}") from error
        payloads = [payload for each in (manifest, *flavours.values()) for payload in each.payloads]
        with self.blobs.held(payload.digest for payload in payloads):
            return await self._publish(request, manifest, flavours, payloads)

    async def _publish(
        self,
        request: PublishRequest,
        manifest: Manifest,
        flavours: Mapping[str, Manifest],
        payloads: Sequence[PayloadRef],
    ) -> int:
        for payload in payloads:
            if not await self.blobs.ensure(digest=payload.digest, num_bytes=payload.num_bytes):
                raise PayloadMissing(f"{payload.kind.value} {payload.digest[:12]} is not complete")
        steps = [status.encode(report) for report in request.reports]
        now = self.clock.wall()

        def operation(connection: sqlite3.Connection) -> tuple[int, list[GroupId], str]:
            version = lineage.check_publication(connection, request, manifest, self.config.run_id)
            if version is not None:
                return version, [], ""
            forms.check_publication(connection, request, manifest, flavours)
            if self.config.is_finished(request.parent_version):
                raise RunFinished(f"the run ends with version {self.config.max_versions}")
            refused, why = self.queue.consume(
                connection, request.consumed, version=manifest.version, parent=request.parent_version
            )
            if refused:
                # Returned, not raised: the drops of stale groups must be committed.
                return lineage.NONE, refused, why
            abandoned = lineage.abandon_versions(connection, request)
            queue.abandon_consumed(connection, abandoned)
            queue.drop_abandoned(connection, abandoned)
            lineage.write_version(connection, request, manifest, now=now, reports=steps)
            forms.write_versions(connection, request, flavours)
            canary.write_stated(connection, manifest.version, request)
            set_meta(connection, "encode_s", str(request.encode_s))
            rollback.settle(connection, manifest)
            return manifest.version, [], ""

        version, refused, why = await self.change(operation, is_publication=True)
        if refused:
            raise GroupNotAvailable(why)
        self.composer.poke()
        self.keeper.poke()
        _LOG.debug("version %d published", version)
        return version

    async def get_step(self, *, step_id: str) -> int | None:
        """The version that a step id became."""
        return await self.database.run(lambda connection: lineage.version_of_step(connection, step_id))

    async def rollback(self, *, to_version: int, request_id: str) -> int:
        """Order the learner to publish the content of a version anew, in place of an earlier order."""

        def operation(connection: sqlite3.Connection) -> tuple[tuple[PullPlan, ...], int]:
            is_new = not rollback.is_known(connection, request_id)
            ways = rollback.place(connection, to_version=to_version, request_id=request_id)
            detail = f"to version {to_version}" if to_version >= 0 else "taken back"
            if is_new:
                kind, now = AuditKind.ROLLBACK_ORDER, self.clock.wall()
                audit.append(connection, kind, subject=request_id, detail=detail, now=now)
            return ways, lineage.read_head(connection).version

        ways, head = await self.database.run(operation)
        # What the learner will ask for must not be deleted before it does.
        for way in ways:
            start = lineage.NONE if way.target_version == to_version else to_version
            self.leases.grant(have_version=start, payloads=way.payloads, now=self.clock.monotonic())
        _LOG.warning("operator: %s", f"go back to version {to_version}" if to_version >= 0 else "do not go back")
        return head
