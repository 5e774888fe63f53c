"""Everybody's side of policy: heads, manifests, plans and payloads. See heterorl.common.api for each call."""

from __future__ import annotations

import functools
import sqlite3
from collections.abc import AsyncIterator, Callable

from heterorl.common.errors import Draining
from heterorl.common.types.common import Digest
from heterorl.common.types.policy import HeadUpdate, PullPlan, SignedManifest
from heterorl.coordinator.parts import Node
from heterorl.coordinator.payloads.merging.spans import worth_merging
from heterorl.coordinator.versions import lineage, manifests, plans


class Distribution(Node):
    """How versions reach those who need them."""

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
