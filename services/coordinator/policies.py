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
    InvalidRequest,
    LeaseHeld,
    PayloadMissing,
    RunFinished,
)
from services.common.types import (
    Contract,
    Digest,
    GroupId,
    LeaseGrant,
    Manifest,
    PayloadRef,
    PublishRequest,
    SignedManifest,
)
from services.common.wire import manifest_from_bytes
from services.coordinator import audit, canary, group_size, lineage, manifests, plans, queue, reports, rollback
from services.coordinator import flavours as forms
from services.coordinator.audit import AuditKind
from services.coordinator.database import get_meta, set_meta
from services.coordinator.membership import decide_acquire
from services.coordinator.node import Node
from services.coordinator.spans import worth_merging

_LOG = logging.getLogger(__name__)
MAX_INCARNATION = 64
SAME_HOLDER = (
    "stop one of the two learners that have this holder, or give one another `holder` and `state_dir`; a learner that"
    " was started again from its own state_dir need not wait"
)


class Policies(Node):
    """Versions and their weights."""

    # policy: the learner's side

    async def acquire_lease(
        self,
        *,
        holder: str,
        contract: Contract,
        request_id: str,
        flavours: Sequence[str] = (),
        incarnation: str = "",
        groups_per_version: int = 0,
    ) -> LeaseGrant:
        """Begin a new epoch; its predecessor's groups return to the queue."""
        if not holder or not request_id:
            raise InvalidRequest("holder and request_id must not be empty")
        if len(incarnation) > MAX_INCARNATION:
            raise InvalidRequest(f"incarnation: longer than {MAX_INCARNATION} characters")
        forms.check_names(flavours)
        problem = group_size.problem_of(contract, self.config)
        if problem:
            raise InvalidRequest(problem, action=group_size.ACTION)
        now = self.clock.monotonic()

        def operation(connection: sqlite3.Connection) -> tuple[int, int, str]:
            lease = lineage.read_lease(connection, expires=self.lease_expires)
            decision, reason = decide_acquire(now, lease, holder=holder, request_id=request_id, incarnation=incarnation)
            if decision.epoch is None:
                action = SAME_HOLDER if lease.holder == holder else None
                raise LeaseHeld(reason, action=action, retry_after_s=decision.wait_s)
            lineage.agree(connection, contract, may_state=True)
            if decision.is_new:
                lineage.write_lease(
                    connection,
                    epoch=decision.epoch,
                    holder=holder,
                    request_id=request_id,
                    is_released=False,
                    incarnation=incarnation,
                )
                set_meta(connection, "lease_groups_per_version", str(groups_per_version))
                queue.return_leased(connection)
                detail = f"epoch {decision.epoch}"
                audit.append(connection, AuditKind.LEARNER_LEASE, subject=holder, detail=detail, now=self.clock.wall())
                set_meta(connection, "num_prompts", str(contract.num_prompts))
                set_meta(connection, "draining", "")
                forms.offer(connection, flavours)
            # Inside the operation: the next request for the lease, in the same commit perhaps, must see this one.
            self.lease_expires = now + self.config.learner_lease_s
            return decision.epoch, lineage.read_head(connection).version, reason

        epoch, head, reason = await self.change(operation)
        _LOG.info("learner %s: %s", holder, reason)
        return LeaseGrant(
            epoch=epoch,
            holder=holder,
            ttl_s=self.config.learner_lease_s,
            head_version=head,
            max_message_bytes=self.config.max_message_bytes,
            max_staleness_versions=self.config.max_staleness_versions,
        )

    async def renew_lease(self, *, epoch: int) -> LeaseGrant:
        """Extend the lease, also after its expiry while nobody else took it."""
        now = self.clock.monotonic()

        def operation(connection: sqlite3.Connection) -> LeaseGrant:
            lineage.check_epoch(connection, epoch)
            self.lease_expires = now + self.config.learner_lease_s
            return LeaseGrant(
                epoch=epoch,
                holder=get_meta(connection, "holder") or "",
                ttl_s=self.config.learner_lease_s,
                head_version=lineage.read_head(connection).version,
                rollback_to=rollback.ordered(connection),
                max_staleness_versions=self.config.max_staleness_versions,
            )

        return await self.database.run(operation)

    async def release_lease(self, *, epoch: int) -> None:
        """End the lease; its groups return to the queue."""

        def operation(connection: sqlite3.Connection) -> None:
            lineage.check_epoch(connection, epoch)
            set_meta(connection, "lease_released", "1")
            queue.return_leased(connection)

        await self.change(operation)

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
