"""The rollout half of the coordinator: work out, groups in, groups on to the learner. See services.common.api."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from services.common.api import Rejection, WorkGrant
from services.common.errors import (
    Draining,
    InvalidRequest,
    NotRegistered,
    RunFinished,
)
from services.common.types import (
    DropReason,
    Group,
    GroupId,
    PushOutcome,
    QueuedGroup,
    SiteId,
    WorkAssignment,
)
from services.coordinator import ledger, lineage, quarantine, queue, work
from services.coordinator.config import CoordinatorConfig
from services.coordinator.database import get_meta
from services.coordinator.node import Node
from services.coordinator.schedule import Load, Pace, decide_grant

_LOG = logging.getLogger(__name__)
RETRY_AFTER_S = 0.5
LEASE_BATCH = 16
MAX_ASSIGNMENTS = 4096
"""Named by one call: each is a statement on the store's only thread."""


class Rollouts(Node):
    """Work and groups."""

    # rollouts

    async def lease_work(self, *, site: SiteId, incarnation: str, max_groups: int, policy_version: int) -> WorkGrant:
        """Hand out prompt groups, paced."""
        now = self.clock.monotonic()
        if not 1 <= max_groups <= MAX_ASSIGNMENTS:
            raise InvalidRequest(f"max_groups: {max_groups} is not in 1..{MAX_ASSIGNMENTS}")

        def operation(connection: sqlite3.Connection) -> tuple[tuple[WorkAssignment, ...], str]:
            _check_site(connection, site, incarnation)
            if self.config.is_finished(lineage.read_head(connection).version):
                raise RunFinished(f"the run ended with version {self.config.max_versions}")
            if get_meta(connection, "draining"):
                raise Draining(f"the run drains: {get_meta(connection, 'draining')}")
            head = lineage.read_head(connection).version
            contract = lineage.read_contract(connection)
            if contract is None or not 0 <= policy_version <= head:
                return (), f"policy {policy_version} is not one of this run's versions 0..{head}"
            if not lineage.is_in_lineage(connection, policy_version):
                return (), f"policy {policy_version} was abandoned; pull version {head}"
            quarantine.check_site(connection, site)
            work.expire(connection, self.sites.expired(work.leased(connection), now))
            counts, held = ledger.counts(connection), work.leased(connection)
            load = Load(
                head_version=head,
                policy_version=policy_version,
                outstanding=counts.pending + counts.leased + len(held),
                held=sum(holder == site for holder, _ in held.values()),
            )
            granted, reason = decide_grant(load, _pace(self.config), wanted=max_groups)
            handed = work.hand_out(
                connection,
                site=site,
                incarnation=incarnation,
                count=granted,
                num_prompts=contract.num_prompts,
                seed=self.config.seed,
            )
            return self.sites.leased(handed, now), reason

        assignments, reason = await self.database.run(operation)
        self.sites.see(site, incarnation, now, policy_version=policy_version)
        return WorkGrant(assignments=assignments, reason=reason, retry_after_s=0.0 if assignments else RETRY_AFTER_S)

    async def abandon_work(self, *, site: SiteId, incarnation: str, assignments: Sequence[int]) -> None:
        """Open assignments that the site will not answer."""
        if len(assignments) > MAX_ASSIGNMENTS:
            raise InvalidRequest(f"assignments: {len(assignments)}, at most {MAX_ASSIGNMENTS} are taken at once")

        def operation(connection: sqlite3.Connection) -> None:
            _check_site(connection, site, incarnation)
            work.give_back(connection, site=site, incarnation=incarnation, assignments=list(assignments))

        await self.database.run(operation)

    async def push_groups(self, groups: Sequence[Group]) -> list[PushOutcome]:
        """Take groups in; every terminal outcome is durable when it is returned."""
        now, instant = self.clock.wall(), self.clock.monotonic()

        def operation(connection: sqlite3.Connection) -> list[PushOutcome]:
            for site, incarnation in {(group.id.site, group.id.incarnation) for group in groups}:
                _check_site(connection, site, incarnation)
            contract = lineage.read_contract(connection)
            assert contract is not None, "a site registers only after the contract is stated"
            head = lineage.read_head(connection).version
            return self.queue.ingest(connection, groups, contract=contract, head=head, now=now, instant=instant)

        outcomes = await self.change(operation)
        for group in groups:
            self.sites.see(group.id.site, group.id.incarnation, self.clock.monotonic())
        return outcomes

    async def stream_groups(
        self, *, epoch: int, held: Sequence[GroupId], credits: AsyncIterator[int]
    ) -> AsyncIterator[QueuedGroup]:
        """Lease whole groups to the learner, one per credit, until the epoch ends."""
        balance = 0
        is_open = True

        def begin(connection: sqlite3.Connection) -> None:
            lineage.check_epoch(connection, epoch)
            queue.return_leased(connection, held=held)

        async def count_credits() -> None:
            nonlocal balance, is_open
            try:
                async for credit in credits:
                    balance += credit
                    self.bell.ring()
            finally:
                is_open = False
                self.bell.ring()

        await self.database.run(begin)
        counter = asyncio.create_task(count_credits())
        try:
            while not self.is_closing:
                ticket = self.bell.ticket()
                asked = balance
                leased = await self.database.run(self._lease_groups(epoch, asked))
                balance -= len(leased)
                for group in leased:
                    yield group
                if not leased and asked == balance:
                    if not is_open:
                        break
                    await ticket.wait()
        finally:
            counter.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await counter
        if self.is_closing:
            raise Draining("the coordinator is stopping", retry_after_s=1.0)

    def _lease_groups(self, epoch: int, count: int) -> _Lease:
        # Few at a time: credits bound what the learner holds, this bounds what is in memory here.
        return _Lease(queue=self.queue, epoch=epoch, count=min(count, LEASE_BATCH), now=self.clock.wall())

    async def abandon_groups(self, *, epoch: int, ids: Sequence[GroupId], reason: str) -> None:
        """Drop groups that the learner cannot train on."""

        def operation(connection: sqlite3.Connection) -> None:
            lineage.check_epoch(connection, epoch)
            queue.drop(connection, ids, DropReason.LEARNER_ABANDONED)

        await self.database.run(operation)
        _LOG.warning("the learner abandoned %d groups: %s", len(ids), reason)

    async def reject_groups(self, *, epoch: int, rejections: Sequence[Rejection]) -> None:
        """Drop groups that failed a check of the learner; a site with too many goes into quarantine."""
        bad = [entry.reason.value for entry in rejections if entry.reason not in quarantine.REJECTABLE]
        if bad:
            raise InvalidRequest(f"rejections.reason: {bad[0]} is no check of the learner")
        rule, now = quarantine.rule_of(self.config), self.clock.wall()

        def operation(connection: sqlite3.Connection) -> dict[SiteId, str]:
            lineage.check_epoch(connection, epoch)
            quarantined = {}
            for entry in rejections:
                if not queue.drop(connection, [entry.id], entry.reason):
                    # Told before, or dropped for another reason meanwhile.
                    continue
                why = quarantine.note_failure(connection, entry.id.site, entry.reason, entry.detail, rule=rule, now=now)
                if why:
                    quarantined[entry.id.site] = why
                    queue.drop(connection, quarantine.pending_groups(connection, entry.id.site), DropReason.QUARANTINED)
                    work.open_held(connection, entry.id.site)
            return quarantined

        for site, why in (await self.change(operation)).items():
            _LOG.error("site %s goes into quarantine until an operator releases it: %s", site, why)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lease:
    """Store operation: lease groups under an epoch."""

    queue: queue.Queue
    epoch: int
    count: int
    now: float

    def __call__(self, connection: sqlite3.Connection) -> list[QueuedGroup]:
        lineage.check_epoch(connection, self.epoch)
        if self.count <= 0:
            return []
        head = lineage.read_head(connection).version
        return self.queue.lease(connection, count=self.count, head=head, now=self.now)


def _check_site(connection: sqlite3.Connection, site: str, incarnation: str) -> None:
    row = connection.execute("SELECT 1 FROM sites WHERE site = ? AND incarnation = ?", (site, incarnation)).fetchone()
    if row is None:
        raise NotRegistered(f"site {site}, incarnation {incarnation}, is not registered")


def _pace(config: CoordinatorConfig) -> Pace:
    return Pace(
        groups_per_version=config.groups_per_version,
        max_staleness_versions=config.max_staleness_versions,
        outstanding_limit=config.outstanding_limit,
        held_limit=config.site_work_groups,
    )
