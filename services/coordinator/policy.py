"""The column of policy: versions, their weights and the way to them. See heterorl.common.api for each call.

Who may publish is heterorl.coordinator.lease's to say.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

from heterorl.common.api import PieceFrames
from heterorl.common.errors import (
    Busy,
    CorruptData,
    CorruptStore,
    DigestMismatch,
    Draining,
    GroupNotAvailable,
    InvalidRequest,
    PayloadMissing,
    RunFinished,
)
from heterorl.common.pull.payload_reader import DamagedFile
from heterorl.common.types.common import Digest
from heterorl.common.types.policy import (
    NO_PLACE,
    HeadUpdate,
    Manifest,
    PayloadRef,
    PublishRequest,
    PullPlan,
    PutPlace,
    SignedManifest,
    version_or_none,
)
from heterorl.common.wire.policy import manifest_from_bytes
from heterorl.coordinator import evaluation_jobs as evaluations
from heterorl.coordinator import status
from heterorl.coordinator.groups import queue
from heterorl.coordinator.parts import Parts
from heterorl.coordinator.payloads.merges import worth_merging
from heterorl.coordinator.sites import quarantine
from heterorl.coordinator.store.database import set_meta
from heterorl.coordinator.store.engine import Connection
from heterorl.coordinator.versions import lineage, plans, rollback, variants
from heterorl.coordinator.versions.chain import Chain

_LOG = logging.getLogger(__name__)


class PolicyColumn:
    """Publication, and distribution to whoever needs weights."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    # the learner's side

    async def query_upload(self, *, digest: Digest) -> int:
        return self._parts.blobs.query(digest)

    async def upload_payload(
        self, *, epoch: int, digest: Digest, num_bytes: int, offset: int, frames: AsyncIterator[bytes]
    ) -> int:
        await self._parts.database.run(lambda connection: lineage.check_epoch(connection, epoch))
        if num_bytes <= self._parts.config.max_payload_bytes:
            self._parts.room.check_payload(num_bytes - self._parts.blobs.query(digest))
        try:
            return await self._parts.blobs.append(digest=digest, num_bytes=num_bytes, offset=offset, frames=frames)
        except CorruptStore as error:
            self._parts.database.fail(str(error))
            raise

    async def put_place(self, *, epoch: int, digest: Digest, num_bytes: int) -> PutPlace:
        """Where the epoch's learner may put the next piece of a payload; nowhere where it is to be streamed."""
        await self._parts.database.run(lambda connection: lineage.check_epoch(connection, epoch))
        if self._parts.blobs.query(digest):
            return NO_PLACE
        try:
            return await self._parts.incoming.place(digest, num_bytes)
        except Busy:
            return NO_PLACE

    async def put_payload(self, *, epoch: int, digest: Digest, num_bytes: int, frames: PieceFrames) -> bool:  # noqa: ARG002 - see heterorl.common.api
        """Nothing is put from within this process: its caller streams."""
        return False

    async def take_payload(self, *, epoch: int, digest: Digest, num_bytes: int) -> int:
        """Verify what was put and make it a payload, as if it had been streamed, from where an earlier call ended."""
        have = self._parts.blobs.query(digest)
        frames = self._parts.incoming.frames(digest, num_bytes, offset=have)
        try:
            taken = await self.upload_payload(
                epoch=epoch, digest=digest, num_bytes=num_bytes, offset=have, frames=frames
            )
        except DigestMismatch:
            await self._parts.incoming.drop(digest)
            raise
        if taken == num_bytes:
            await self._parts.incoming.drop(digest)
        return taken

    async def publish_version(self, request: PublishRequest) -> int:
        try:
            manifest = manifest_from_bytes(request.manifest)
            parsed = {entry.variant: manifest_from_bytes(entry.manifest) for entry in request.variants}
        except CorruptData as error:
            raise InvalidRequest(f"manifest: {error}") from error
        payloads = [payload for each in (manifest, *parsed.values()) for payload in each.payloads]
        with self._parts.blobs.held(payload.digest for payload in payloads):
            return await self._publish(request, manifest, parsed, payloads)

    async def _publish(
        self,
        request: PublishRequest,
        manifest: Manifest,
        parsed: Mapping[str, Manifest],
        payloads: Sequence[PayloadRef],
    ) -> int:
        for payload in payloads:
            if not await self._parts.blobs.ensure(digest=payload.digest, num_bytes=payload.num_bytes):
                raise PayloadMissing(f"{payload.kind.value} {payload.digest[:12]} is not complete")
        steps = [status.encode(report) for report in request.reports]
        now = self._parts.clock.wall()

        def operation(connection: Connection) -> tuple[int | None, str]:
            version = lineage.check_publication(connection, request, manifest, self._parts.config.run_id)
            if version is not None:
                return version, ""
            variants.check_publication(connection, request, manifest, parsed)
            if self._parts.config.is_finished(request.parent_version):
                raise RunFinished(f"the run ends with version {self._parts.config.max_versions}")
            refused, why = self._parts.queue.consume(
                connection, request.consumed, version=manifest.version, parent=request.parent_version
            )
            if refused:
                # Returned, not raised: the drops of stale groups must be committed.
                return None, why
            abandoned = lineage.abandon_versions(connection, request)
            queue.abandon_consumed(connection, abandoned)
            self._parts.queue.drop_abandoned(connection, abandoned)
            lineage.write_version(connection, request, manifest, now=now, reports=steps)
            variants.write_versions(connection, request, parsed)
            quarantine.write_canary(connection, manifest.version, request)
            set_meta(connection, "encode_s", str(request.encode_s))
            rollback.settle(connection, manifest)
            config = self._parts.config
            evaluations.drop(connection, abandoned)
            evaluations.plan(
                connection,
                config.evaluation,
                version=manifest.version,
                now=now,
                is_last=config.is_finished(manifest.version),
            )
            return manifest.version, ""

        version, why = await self._parts.change(operation, is_publication=True)
        if version is None:
            raise GroupNotAvailable(why)
        self._parts.composer.poke()
        self._parts.keeper.poke()
        _LOG.debug("version %d published", version)
        return version

    async def get_step(self, *, step_id: str) -> int | None:
        return await self._parts.database.run(lambda connection: lineage.version_of_step(connection, step_id))

    # everybody's side

    async def watch_head(self, *, after_version: int) -> AsyncIterator[HeadUpdate]:
        while not self._parts.closing.is_set():
            ticket = self._parts.head_bell.ticket()
            head = await self._parts.database.run(lineage.read_head)
            if head is not None and head.version > after_version:
                after_version = head.version
                yield HeadUpdate(version=head.version, age_s=max(0.0, self._parts.clock.wall() - head.published))
            else:
                await ticket.wait()
        raise Draining("the coordinator is stopping", retry_after_s=1.0)

    async def get_signed_manifest(self, *, version: int, variant: str = "") -> SignedManifest:
        return await self._parts.database.run(lambda connection: Chain(connection, variant).signed_manifest(version))

    async def list_manifests(self, *, first_version: int, last_version: int, variant: str = "") -> tuple[bytes, ...]:

        def operation(connection: Connection) -> tuple[bytes, ...]:
            return Chain(connection, variant).manifests(first=first_version, last=last_version)

        return await self._parts.database.run(operation)

    async def plan_pull(
        self,
        *,
        have_version: int,
        have_root: str,
        want_version: int,
        accept_merged: bool = False,
        base_root: str = "",
        object_bytes: int = 0,
        variant: str = "",
    ) -> PullPlan:
        """Plan the cheapest way to a version by what is there; what would be cheaper is made for the next caller."""
        merges, have = self._parts.merges, version_or_none(have_version)
        merged_into = functools.partial(merges.into, variant=variant) if accept_merged else plans.no_merged

        def operation(connection: Connection) -> tuple[PullPlan, int | None]:
            plan = plans.plan(
                Chain(connection, variant),
                have_version=have,
                have_root=have_root,
                want_version=version_or_none(want_version),
                base_root=base_root,
                object_bytes=object_bytes,
                merged_into=merged_into,
            )
            return plan, lineage.head_version(connection)

        plan, head = await self._leased(operation, have)
        if accept_merged:
            while await merges.forget_missing(plan.payloads):
                self._parts.composer.poke()
                plan, head = await self._leased(operation, have)
            span = worth_merging(plan.payloads, head=head, variant=variant)
            if span is not None:
                self._parts.composer.request(span)
        return plan

    async def payload_urls(self, plan: PullPlan) -> list[str]:
        """For each payload of a plan an address from which its caller may read it for a while; empty where none is."""
        try:
            return await self._parts.home.urls([payload.digest for payload in plan.payloads])
        except Busy:
            # The coordinator has them too.
            return []

    async def _leased(
        self, operation: Callable[[Connection], tuple[PullPlan, int | None]], have_version: int | None
    ) -> tuple[PullPlan, int | None]:
        plan, head = await self._parts.database.run(operation)
        # Nothing is awaited in between: a deletion decided after this plan was made sees its lease.
        self._parts.leases.grant(have_version=have_version, payloads=plan.payloads, now=self._parts.clock.monotonic())
        return plan, head

    async def read_payload(self, *, digest: Digest, offset: int, stop: int | None = None) -> AsyncIterator[bytes]:
        """Yield frames of a payload that still has the bytes of its name."""
        merged = self._parts.merges.find(digest)
        path = self._parts.blobs.path(digest) if merged is None else merged
        with self._parts.leases.reading(digest):
            self._parts.leases.touch(digest, self._parts.clock.monotonic())
            try:
                async with self._parts.copies.at_hand([digest] if merged is None else []):
                    async for frame in self._parts.reader.read(digest, path, offset=offset, stop=stop):
                        self._parts.leases.touch(digest, self._parts.clock.monotonic())
                        yield frame
            except (OSError, DamagedFile) as error:
                raise await self._parts.damage.of_read(digest, error) from error
            self._parts.damage.note_read(digest)
