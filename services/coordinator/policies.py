"""The policy half of the coordinator: lease, publication, distribution. See services.common.api for each call."""

from __future__ import annotations

import functools
import logging
import sqlite3
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

from services.common.api import HeadUpdate, PullPlan
from services.common.errors import (
    CorruptStore,
    Draining,
    GroupNotAvailable,
    PayloadMissing,
    RunFinished,
)
from services.common.types import (
    Digest,
    GroupId,
    Manifest,
    PayloadRef,
    PublishRequest,
    SignedManifest,
)
from services.common.wire import manifest_from_bytes
from services.coordinator import audit, canary, lineage, manifests, plans, queue, reports, rollback
from services.coordinator import flavours as forms
from services.coordinator.audit import AuditKind
from services.coordinator.database import set_meta
from services.coordinator.learner_lease import Leases
from services.coordinator.spans import worth_merging

_LOG = logging.getLogger(__name__)


class Policies(Leases):
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
        manifest = manifest_from_bytes(request.manifest)
        flavours = {entry.flavour: manifest_from_bytes(entry.manifest) for entry in request.flavours}
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
        steps = [reports.encode(report) for report in request.reports]
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

    # policy: everybody's side

    async def watch_head(self, *, after_version: int) -> AsyncIterator[HeadUpdate]:
        """Yield every head that passes the cursor, until the coordinator stops."""
        while not self.is_closing:
            ticket = self.head_bell.ticket()
            head = await self.database.run(lineage.read_head)
            if head.version > after_version:
                after_version = head.version
                yield HeadUpdate(version=head.version, age_s=max(0.0, self.clock.wall() - head.published))
            else:
                await ticket.wait()
        raise Draining("the coordinator is stopping", retry_after_s=1.0)

    async def get_manifest(self, *, version: int) -> bytes:
        """Exact bytes of a manifest."""
        return await self.database.run(lambda connection: manifests.read_manifest(connection, version))

    async def get_signed_manifest(self, *, version: int, flavour: str = "") -> SignedManifest:
        """Exact bytes of a manifest and its signature."""
        return await self.database.run(lambda connection: manifests.read_signed_manifest(connection, version, flavour))

    async def list_manifests(self, *, first_version: int, last_version: int, flavour: str = "") -> tuple[bytes, ...]:
        """Exact bytes of the newest manifests of a range, as many as fit one answer."""

        def operation(connection: sqlite3.Connection) -> tuple[bytes, ...]:
            return manifests.read_manifests(connection, first=first_version, last=last_version, flavour=flavour)

        return await self.database.run(operation)

    async def plan_pull(
        self,
        *,
        have_version: int,
        have_root: str,
        want_version: int,
        accept_merged: bool = False,
        base_root: str = "",
        object_bytes: int = 0,
        flavour: str = "",
    ) -> PullPlan:
        """Plan the cheapest way to a version by what is there; what would be cheaper is made for the next caller."""

        def operation(connection: sqlite3.Connection) -> tuple[PullPlan, int]:
            plan = plans.plan(
                connection,
                have_version=have_version,
                have_root=have_root,
                want_version=want_version,
                base_root=base_root,
                object_bytes=object_bytes,
                flavour=flavour,
                merged_into=functools.partial(self.merges.into, flavour=flavour) if accept_merged else plans.no_merged,
            )
            return plan, lineage.read_head(connection).version

        plan, head = await self._leased(operation, have_version)
        if accept_merged:
            while await self.merges.forget_missing(plan.payloads):
                self.composer.poke()
                plan, head = await self._leased(operation, have_version)
            span = worth_merging(plan.payloads, head=head, flavour=flavour)
            if span is not None:
                self.composer.request(span)
        return plan

    async def _leased(
        self, operation: Callable[[sqlite3.Connection], tuple[PullPlan, int]], have_version: int
    ) -> tuple[PullPlan, int]:
        plan, head = await self.database.run(operation)
        # Nothing is awaited in between: a deletion decided after this plan was made sees its lease.
        self.leases.grant(have_version=have_version, payloads=plan.payloads, now=self.clock.monotonic())
        return plan, head

    async def read_payload(self, *, digest: Digest, offset: int, stop: int | None = None) -> AsyncIterator[bytes]:
        """Yield frames of a payload that still has the bytes of its name."""
        merged = self.merges.find(digest)
        path = self.blobs.path(digest) if merged is None else merged
        with self.leases.reading(digest):
            self.leases.touch(digest, self.clock.monotonic())
            async for frame in self.reading.read(digest, path, offset=offset, stop=stop):
                self.leases.touch(digest, self.clock.monotonic())
                yield frame
