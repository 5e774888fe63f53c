"""Rollouts: assignments to sites, groups from sites, groups to the learner."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence

from heterorl.common.errors import Draining, HeterorlError, InvalidRequest, RunFinished
from heterorl.common.process import metrics
from heterorl.common.types.common import Contract, SiteId
from heterorl.common.types.evaluation import EvaluationSet
from heterorl.common.types.policy import stated_version
from heterorl.common.types.rollout import (
    MAX_ASSIGNMENTS,
    DropReason,
    Group,
    GroupId,
    LeasedGroup,
    PushOutcome,
    PushStatus,
    QueuedGroup,
    Rejection,
    ReturnReason,
    SealedGroup,
    WorkAssignment,
    WorkGrant,
)
from heterorl.common.wire.rollout_messages import leased_to_pb, queued_from_pb
from heterorl.coordinator.context import CoordinatorContext
from heterorl.coordinator.groups import queue, work_assignments
from heterorl.coordinator.groups.intake import Arrival, IngestContext, arrival_of, take_all
from heterorl.coordinator.groups.schedule import decide_grant
from heterorl.coordinator.sites import quarantine
from heterorl.coordinator.sites.sites import Holder, declared
from heterorl.coordinator.store import tallies
from heterorl.coordinator.store.database import MAX_REQUEST_ID, Connection, get_meta
from heterorl.coordinator.versions import lineage

_LOG = logging.getLogger(__name__)
RETRY_AFTER_S = 0.5
LEASE_BATCH = 128
"""Groups of one lease. Each waits behind the calls of all sites, so a small batch would limit the learner."""
ABANDONED_AS = (DropReason.LEARNER_ABANDONED, DropReason.UNIFORM, DropReason.STALE_AT_COMMIT)
_MADE = (DropReason.STALE_AT_INGEST, DropReason.LOST_MEMBERS)
"""Drops whose groups still count for the duration of a group."""


class RolloutColumn:
    """Work and groups."""

    def __init__(self, context: CoordinatorContext, *, held_out: Callable[..., Awaitable[WorkGrant]]) -> None:
        """`held_out` is `EvaluationColumn.lease`."""
        self._context = context
        self._held_out = held_out
        self._stream: object = None
        """The learner's newest stream of groups; read and written by store operations only."""
        self._has_stale = False

    async def lease_work(
        self,
        *,
        site: SiteId,
        incarnation: str,
        max_groups: int,
        policy_version: int,
        request_id: str = "",
        sets: Sequence[EvaluationSet] = (),
    ) -> WorkGrant:
        """Hand out prompts, paced and shared between sites; with sets, held-out prompts."""
        now, wall = self._context.clock.monotonic(), self._context.clock.wall()
        if not 1 <= max_groups <= MAX_ASSIGNMENTS:
            raise InvalidRequest(f"max_groups: {max_groups} is not in 1..{MAX_ASSIGNMENTS}")
        if len(request_id) > MAX_REQUEST_ID:
            raise InvalidRequest(f"request_id: {len(request_id)} characters, allowed are {MAX_REQUEST_ID}")
        holder = site, incarnation
        if sets:
            return await self._held_out(
                holder=holder, count=max_groups, policy_version=policy_version, request_id=request_id, sets=sets
            )

        def operation(connection: Connection) -> tuple[tuple[WorkAssignment, ...], str]:
            self._context.sites.require(connection, site, incarnation)
            self._check_end(connection)
            if get_meta(connection, "draining"):
                action = "deliver what is held, then end; only a learner that starts again continues the run"
                raise Draining(f"the run drains: {get_meta(connection, 'draining')}", action=action)
            head = stated_version(lineage.head_version(connection))
            contract = lineage.read_contract(connection)
            if contract is None or not 0 <= policy_version <= head:
                return (), f"policy {policy_version} is not one of this run's versions 0..{head}"
            if lineage.abandoned_span(connection, (policy_version,)) is not None:
                return (), f"policy {policy_version} was abandoned; pull version {head}"
            quarantine.check_site(connection, site)
            self._context.deadlines.look(connection, now)
            if head - policy_version <= self._context.config.max_staleness_versions:
                tallies.note_asked(connection, site, now)
            if again := work_assignments.handed_before(connection, holder, request_id):
                return self._context.deadlines.begin(connection, again, holder, now), "given to this request before"
            # A single site makes all versions itself: none comes before its groups.
            is_shared = tallies.read(connection, "wanting") > 1
            generation_s = self._context.sites.generation_s(site)
            held_limit, held_by = self._held_limit(connection, holder, now)
            granted, reason = decide_grant(
                self._context.config,
                wanted=max_groups,
                head_version=head,
                policy_version=policy_version,
                outstanding=tallies.outstanding(connection),
                held=tallies.held(connection, site),
                coming=lineage.coming(connection, generation_s, head=head, now=wall) if is_shared else 0,
                held_limit=held_limit,
                held_by=held_by,
            )
            handed = work_assignments.hand_out(
                connection, holder, count=granted, num_prompts=contract.num_prompts, config=self._context.config,
                request_id=request_id,
            )  # fmt: skip
            return self._context.deadlines.begin(connection, handed, holder, now), reason

        assignments, reason = await self._context.database.run(operation)
        self._context.sites.see(site, incarnation, self._context.clock.monotonic(), policy_version=policy_version)
        return WorkGrant(assignments=assignments, reason=reason, retry_after_s=0.0 if assignments else RETRY_AFTER_S)

    def _check_end(self, connection: Connection) -> None:
        if self._context.config.is_finished(lineage.head_version(connection)):
            raise RunFinished(f"the run ended with version {self._context.config.max_versions}")

    def _held_limit(self, connection: Connection, holder: Holder, now: float) -> tuple[int, str]:
        """Assignments that a site may hold, and the name of this bound."""
        config = self._context.config
        share = tallies.allowance(
            connection, holder[0], limit=config.outstanding_limit, at_least=config.groups_per_version,
            works_ahead=declared(connection, holder).ahead_s > 0, now=now,
        )  # fmt: skip
        return (config.site_work_groups, "site_work_groups") if config.site_work_groups else (share, "its share")

    async def abandon_work(
        self, *, site: SiteId, incarnation: str, assignments: Sequence[int], reason: ReturnReason | None = None
    ) -> None:
        """Open assignments that the site will not answer.
        Closes an assignment whose row gave no group too often."""
        if len(assignments) > MAX_ASSIGNMENTS:
            raise InvalidRequest(f"assignments: {len(assignments)}, at most {MAX_ASSIGNMENTS} are taken at once")

        def operation(connection: Connection) -> None:
            self._context.sites.require(connection, site, incarnation)
            at_least = self._context.config.groups_per_version
            work_assignments.take_back(connection, (site, incarnation), assignments, reason, at_least=at_least)

        await self._context.database.run(operation)

    async def stated_contract(self) -> Contract | None:
        return await self._context.database.run(lineage.read_contract)

    async def take_groups(self, groups: Sequence[Group | SealedGroup | Arrival]) -> list[PushOutcome]:
        """Take groups in; unreadable ones are recorded as invalid."""
        self._context.disk.check()
        config, waiting = self._context.config, self._context.queue
        now, instant = self._context.clock.wall(), self._context.clock.monotonic()

        def operation(connection: Connection) -> tuple[list[Arrival], list[PushOutcome]]:
            for site, incarnation in {(group.id.site, group.id.incarnation) for group in groups}:
                self._context.sites.require(connection, site, incarnation)
            contract = lineage.read_contract(connection)
            assert contract is not None, "a site registers only after the contract is stated"
            head = stated_version(lineage.head_version(connection))
            arrived = [arrival_of(group, contract, config) for group in groups]
            facts = IngestContext(
                config=config, quotas=waiting.quotas, ring=waiting.ring, head=head, now=now, instant=instant
            )
            return arrived, take_all(connection, arrived, facts)

        arrived, outcomes = await self._context.change(operation)
        for group in groups:
            self._context.sites.see(group.id.site, group.id.incarnation, self._context.clock.monotonic())
        for each, outcome in zip(arrived, outcomes, strict=True):
            if outcome.status is PushStatus.ACCEPTED or outcome.reason in _MADE:
                self._context.sites.time_group(each.id.site, each.generation_s)
            if outcome.status is PushStatus.ACCEPTED or outcome.reason is DropReason.LOST_MEMBERS:
                for reason in each.lost:
                    metrics.LOST_MEMBERS.labels(metrics.SITES.of(each.id.site), reason.value).inc()
        return outcomes

    async def stream_groups(
        self, *, epoch: int, held: Sequence[GroupId], credits: AsyncIterator[int]
    ) -> AsyncIterator[QueuedGroup]:
        async with contextlib.aclosing(self.stream_sealed(epoch=epoch, held=held, credits=credits)) as stream:
            async for leased in stream:
                yield queued_from_pb(leased_to_pb(leased))

    async def stream_sealed(
        self, *, epoch: int, held: Sequence[GroupId], credits: AsyncIterator[int]
    ) -> AsyncGenerator[LeasedGroup]:
        """As `stream_groups`, with sealed groups."""
        balance = 0
        is_open = True
        stream = object()

        def begin(connection: Connection) -> None:
            lineage.check_epoch(connection, epoch)
            self._context.queue.return_leased(connection, held=held)
            # The learner dialled again: an earlier stream must lease no more groups.
            self._stream = stream

        async def count_credits() -> None:
            nonlocal balance, is_open
            try:
                async for credit in credits:
                    balance += credit
                    self._context.bell.ring()
            finally:
                is_open = False
                self._context.bell.ring()

        await self._context.change(begin)
        counter = asyncio.create_task(count_credits())
        undelivered: deque[LeasedGroup] = deque()
        try:
            while not self._context.closing.is_set():
                ticket = self._context.bell.ticket()
                asked = balance
                leasing = self._context.database.submit(self._lease_groups(epoch, stream, asked, undelivered))
                if not await asyncio.shield(leasing):
                    _LOG.info("a stream of epoch %d ends: the learner opened another one", epoch)
                    break
                balance -= len(undelivered)
                # The next lease drops stale groups that this one left.
                is_idle = not undelivered and not self._has_stale
                while undelivered:
                    yield undelivered.popleft()
                if is_idle and asked == balance and is_open:
                    await ticket.wait()
                elif is_idle and asked == balance:
                    break
        finally:
            counter.cancel()
            await self._undo_leases(stream, undelivered)
            with contextlib.suppress(asyncio.CancelledError):
                await counter
        if self._context.closing.is_set():
            raise Draining("the coordinator is stopping", retry_after_s=1.0)

    def _lease_groups(
        self, epoch: int, stream: object, count: int, leased: deque[LeasedGroup]
    ) -> Callable[[Connection], bool]:
        """Operation that leases groups into `leased`; False if a newer stream began."""
        # Credits bound what the learner holds, the queue bounds what is in memory here.
        count, now, groups = min(count, LEASE_BATCH), self._context.clock.wall(), self._context.queue

        def operation(connection: Connection) -> bool:
            lineage.check_epoch(connection, epoch)
            if self._stream is not stream:
                return False
            # No site makes groups any more, and no version would take them.
            self._check_end(connection)
            # An undone operation runs again.
            leased.clear()
            self._has_stale = False
            if count > 0:
                head = stated_version(lineage.head_version(connection))
                leased.extend(groups.lease(connection, count=count, head=head, now=now))
                self._has_stale = groups.has_stale(connection, head=head, now=now)
            return True

        return operation

    async def _undo_leases(self, stream: object, leased: deque[LeasedGroup]) -> None:
        """Return a stream's unsent groups, unless a newer stream has done so."""

        def operation(connection: Connection) -> None:
            if self._stream is stream:
                queue.undo_lease(connection, [one.sealed.id for one in leased])

        # On the store's thread, after any lease that is running there.
        with contextlib.suppress(HeterorlError):
            await self._context.change(operation)

    async def abandon_groups(
        self, *, epoch: int, ids: Sequence[GroupId], reason: str, counted_as: DropReason = DropReason.LEARNER_ABANDONED
    ) -> None:
        if counted_as not in ABANDONED_AS:
            raise InvalidRequest(f"counted_as: {counted_as.value} is not an account of abandoned groups")
        groups = self._context.queue

        def operation(connection: Connection) -> None:
            lineage.check_epoch(connection, epoch)
            groups.drop(connection, ids, counted_as, detail=reason)

        # `change` rings the bell: groups that had to wait may be leased now.
        await self._context.change(operation)
        level = logging.DEBUG if counted_as is DropReason.UNIFORM else logging.WARNING
        _LOG.log(level, "the learner abandoned %d groups: %s", len(ids), reason)

    async def reject_groups(self, *, epoch: int, rejections: Sequence[Rejection]) -> None:
        """Drop groups that failed a check of the learner.
        A site with too many goes into quarantine."""
        bad = [entry.reason.value for entry in rejections if entry.reason not in quarantine.REJECTABLE]
        if bad:
            raise InvalidRequest(f"rejections.reason: {bad[0]} is not a check of the learner")
        config, now, groups = self._context.config, self._context.clock.wall(), self._context.queue

        def operation(connection: Connection) -> dict[SiteId, str]:
            lineage.check_epoch(connection, epoch)
            quarantined = {}
            for entry in rejections:
                if not groups.drop(connection, [entry.id], entry.reason, detail=entry.detail):
                    # Rejected before, or dropped for another reason.
                    continue
                why = quarantine.note_failure(
                    connection, entry.id.site, entry.reason, entry.detail, config=config, now=now
                )
                if why:
                    quarantined[entry.id.site] = why
                    groups.drop_of_site(connection, entry.id.site, detail=why)
                    work_assignments.open_held(connection, entry.id.site)
            return quarantined

        for site, why in (await self._context.change(operation)).items():
            _LOG.error(
                "site %s goes into quarantine until an operator releases it (heterorl sites release): %s", site, why
            )
