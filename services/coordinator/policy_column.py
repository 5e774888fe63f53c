"""Versions: publication, payload uploads, pull plans, downloads. heterorl.common.api describes the calls."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
from collections.abc import AsyncIterator, Callable, Mapping

from heterorl.common.errors import (
    Busy,
    CorruptData,
    Draining,
    GroupNotAvailable,
    InvalidRequest,
    PayloadMissing,
    RunFinished,
)
from heterorl.common.pull.payload_reader import DamagedFile
from heterorl.common.types.common import Digest
from heterorl.common.types.policy import (
    HeadUpdate,
    Manifest,
    PayloadRef,
    PublishRequest,
    PullPlan,
    SignedManifest,
    version_or_none,
)
from heterorl.common.wire.policy_messages import manifest_from_bytes
from heterorl.coordinator import evaluation_jobs as evaluations
from heterorl.coordinator import status_report
from heterorl.coordinator.context import CoordinatorContext
from heterorl.coordinator.groups import queue
from heterorl.coordinator.payloads.merged_deltas import worth_merging
from heterorl.coordinator.sites import quarantine
from heterorl.coordinator.store.database import Connection, set_meta
from heterorl.coordinator.versions import lineage, published_variants, pull_plans, rollback_order
from heterorl.coordinator.versions.chain import MAX_MANIFEST_BYTES, Chain

_LOG = logging.getLogger(__name__)


class PolicyColumn:
    """Publication and distribution of versions."""

    def __init__(self, context: CoordinatorContext) -> None:
        self._context = context
        self._head: asyncio.Future[lineage.Head | None] | None = None
        self._read_at = -1

    async def query_upload(self, *, digest: Digest) -> int:
        return self._context.blobs.query(digest)

    async def upload_payload(
        self, *, epoch: int, digest: Digest, num_bytes: int, offset: int, frames: AsyncIterator[bytes]
    ) -> int:
        await self._context.database.run(lambda connection: lineage.check_epoch(connection, epoch))
        if num_bytes <= self._context.config.max_payload_bytes:
            self._context.disk.check_payload(num_bytes - self._context.blobs.query(digest))
        return await self._context.blobs.append(digest=digest, num_bytes=num_bytes, offset=offset, frames=frames)

    async def publish_version(self, request: PublishRequest) -> int:
        try:
            manifest = manifest_from_bytes(request.manifest)
            parsed = {entry.variant: manifest_from_bytes(entry.manifest) for entry in request.variants}
        except CorruptData as error:
            raise InvalidRequest(f"manifest: {error}") from error
        payloads = [payload for each in (manifest, *parsed.values()) for payload in each.payloads]
        with self._context.blobs.held(payload.digest for payload in payloads):
            return await self._publish(request, manifest, parsed, payloads)

    async def _publish(
        self, request: PublishRequest, manifest: Manifest, parsed: Mapping[str, Manifest], payloads: list[PayloadRef]
    ) -> int:
        for payload in payloads:
            if not await self._context.blobs.ensure(digest=payload.digest, num_bytes=payload.num_bytes):
                raise PayloadMissing(f"{payload.kind.value} {payload.digest[:12]} is not complete")
        now = self._context.clock.wall()
        steps = [status_report.encode(dataclasses.replace(report, published_time=now)) for report in request.reports]

        def operation(connection: Connection) -> tuple[int | None, str]:
            version = lineage.check_publication(connection, request, manifest, self._context.config.run_id)
            if version is not None:
                return version, ""
            published_variants.check_publication(connection, request, manifest, parsed)
            if self._context.config.is_finished(request.parent_version):
                raise RunFinished(f"the run ends with version {self._context.config.max_versions}")
            refused, why = self._context.queue.consume(
                connection, request.consumed, version=manifest.version, parent=request.parent_version
            )
            if refused:
                # Not raised: the drops of stale groups must be committed.
                return None, why
            abandoned = lineage.abandon_versions(connection, request)
            queue.abandon_consumed(connection, abandoned)
            self._context.queue.drop_abandoned(connection, abandoned)
            lineage.write_version(connection, request, manifest, now=now, reports=steps)
            published_variants.write_versions(connection, request, parsed)
            quarantine.write_canary(connection, manifest.version, request)
            set_meta(connection, "encode_s", str(request.encode_s))
            rollback_order.settle(connection, manifest)
            config = self._context.config
            evaluations.drop(connection, abandoned)
            is_last = config.is_finished(manifest.version)
            evaluations.plan(connection, config.evaluation, version=manifest.version, now=now, is_last=is_last)
            return manifest.version, ""

        version, why = await self._context.change(operation, is_publication=True)
        if version is None:
            raise GroupNotAvailable(why)
        self._context.merger.poke()
        self._context.collector.poke()
        _LOG.debug("version %d is published", version)
        return version

    async def get_step(self, *, step_id: str) -> int | None:
        return await self._context.database.run(lambda connection: lineage.version_of_step(connection, step_id))

    async def watch_head(self, *, after_version: int) -> AsyncIterator[HeadUpdate]:
        while not self._context.closing.is_set():
            with self._context.head_bell.ticket() as ticket:
                head = await self._newest()
                if head is None or head.version <= after_version:
                    await ticket
                    continue
            after_version = head.version
            yield HeadUpdate(version=head.version, age_s=max(0.0, self._context.clock.wall() - head.published))
        raise Draining("the coordinator is stopping", retry_after_s=1.0)

    async def _newest(self) -> lineage.Head | None:
        """The head; one read for all who ask between two rings."""
        rings = self._context.head_bell.num_rings
        if self._head is None or rings != self._read_at or (self._head.done() and self._head.exception()):
            self._head, self._read_at = self._context.database.submit(lineage.read_head), rings
        return await asyncio.shield(self._head)

    async def get_signed_manifest(self, *, version: int, variant: str = "") -> SignedManifest:
        return await self._context.database.run(lambda connection: Chain(connection, variant).signed_manifest(version))

    async def list_manifests(self, *, first_version: int, last_version: int, variant: str = "") -> tuple[bytes, ...]:
        most = min(MAX_MANIFEST_BYTES, self._context.config.max_group_bytes)
        return await self._context.database.run(
            lambda connection: Chain(connection, variant).manifests(
                first=first_version, last=last_version, max_bytes=most
            )
        )

    async def plan_pull(
        self,
        *,
        have_version: int,
        have_root: str,
        want_version: int,
        accept_merged: bool = False,
        base_root: str = "",
        variant: str = "",
    ) -> PullPlan:
        """Plan the cheapest pull.
        A merged delta that would be cheaper is requested for later callers."""
        merges, have = self._context.merges, version_or_none(have_version)
        merged_into = functools.partial(merges.into, variant=variant) if accept_merged else pull_plans.no_merged

        def operation(connection: Connection) -> tuple[PullPlan, int | None]:
            plan = pull_plans.plan(
                Chain(connection, variant),
                have_version=have,
                have_root=have_root,
                want_version=version_or_none(want_version),
                base_root=base_root,
                merged_into=merged_into,
            )
            return plan, lineage.head_version(connection)

        plan, head = await self._leased(operation)
        if accept_merged:
            while await merges.forget_missing(plan.payloads):
                self._context.merger.poke()
                plan, head = await self._leased(operation)
            span = worth_merging(plan.payloads, head=head, variant=variant)
            if span is not None:
                self._context.merger.request(span)
        return plan

    async def payload_urls(self, plan: PullPlan) -> list[str]:
        """Presigned URLs of a plan's payloads, none while the bucket is busy."""
        try:
            return await self._context.storage.urls([payload.digest for payload in plan.payloads])
        except Busy:
            # The caller reads from the coordinator.
            return []

    async def _leased(
        self, operation: Callable[[Connection], tuple[PullPlan, int | None]]
    ) -> tuple[PullPlan, int | None]:
        plan, head = await self._context.database.run(operation)
        # The version that the plan starts from: the one that the caller states may be anything.
        start = version_or_none(plan.payloads[0].from_version) if plan.payloads else None
        # No await before the grant: a deletion that is decided after the plan sees its lease.
        self._context.leases.grant(have_version=start, payloads=plan.payloads, now=self._context.clock.monotonic())
        return plan, head

    async def read_payload(self, *, digest: Digest, offset: int, stop: int | None = None) -> AsyncIterator[bytes]:
        """Yield frames of a payload; damage is found and reported."""
        merged = self._context.merges.find(digest)
        path = self._context.blobs.path(digest) if merged is None else merged
        with self._context.leases.reading(digest):
            self._context.leases.touch(digest, self._context.clock.monotonic())
            try:
                async with self._context.cache.at_hand([digest] if merged is None else []):
                    async for frame in self._context.reader.read(digest, path, offset=offset, stop=stop):
                        self._context.leases.touch(digest, self._context.clock.monotonic())
                        yield frame
            except (OSError, DamagedFile) as error:
                raise await self._context.damage.of_read(digest, error) from error
            self._context.damage.note_read(digest)
