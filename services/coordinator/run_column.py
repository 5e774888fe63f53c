"""The run: registration and heartbeats of sites, operators' orders, status."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import threading
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from heterorl.common.errors import ContractMismatch, Draining, InvalidRequest, RunFinished
from heterorl.common.process import metrics
from heterorl.common.types.common import SiteId, StepReport
from heterorl.common.types.policy import stated_version, version_or_none
from heterorl.common.types.run import (
    RELEASE,
    CanaryReport,
    CanaryVerdict,
    Command,
    Heartbeat,
    RegisterAnswer,
    Registration,
    RunStatus,
    changed_facts,
    describe_standstill,
    with_changes,
)
from heterorl.coordinator import evaluation_jobs as evaluations
from heterorl.coordinator import status_report
from heterorl.coordinator.context import CoordinatorContext
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.coordinator.groups import work_assignments
from heterorl.coordinator.rpc.bounds import PUSH_GROUPS
from heterorl.coordinator.sites import audit, incarnations, quarantine
from heterorl.coordinator.sites.audit import AuditKind
from heterorl.coordinator.sites.sites import Holder, note_revoked_sites
from heterorl.coordinator.store.database import (
    Connection,
    Database,
    answer_to_order,
    get_meta,
    remember_order,
    set_meta,
)
from heterorl.coordinator.versions import lineage, published_variants, rollback_order

_LOG = logging.getLogger(__name__)
MAX_SEQUENCE = 2**62
STEPS_BYTES = 4 << 20
"""Bytes of the step reports in one answer."""


class RunColumn:
    """Sites, orders and status."""

    def __init__(self, context: CoordinatorContext) -> None:
        self._context = context
        self._beats = Beats(context.database, context.config, context.queue.quotas.full)
        self._is_idle = False
        self._noted: frozenset[int] = frozenset()
        """The list of revoked certificates that the audit log has."""

    async def register(self, registration: Registration) -> RegisterAnswer:
        bound = self._context.config.max_staleness_versions
        if registration.max_delay_versions > bound:
            raise ContractMismatch(
                f"the delay of {registration.max_delay_versions} versions exceeds max_staleness_versions = {bound}",
                action="raise the coordinator's max_staleness_versions or lower the sampler's delay",
            )
        longest_s = self._context.config.max_superseded_s
        if not 0 <= registration.max_delay_s <= longest_s:
            # NaN is refused like a number that is too large.
            raise ContractMismatch(
                f"the delay of {registration.max_delay_s:g} s there and back exceeds max_superseded_s = {longest_s:g}",
                action="raise the coordinator's max_superseded_s or lower the sampler's delay",
            )
        if not 0 <= registration.work_ahead_s < math.inf:
            raise InvalidRequest(f"work_ahead_s: {registration.work_ahead_s:g} is not a number of seconds")
        if not registration.site or not registration.incarnation:
            raise InvalidRequest("site and incarnation must not be empty")
        if registration.lowest_sequence > MAX_SEQUENCE:
            raise InvalidRequest(f"lowest_sequence: {registration.lowest_sequence} exceeds {MAX_SEQUENCE}")

        def operation(connection: Connection) -> tuple[int | None, int]:
            if not lineage.agree(connection, registration.contract, may_state=False):
                action = "start the learner; this node goes on by itself"
                raise Draining("no learner has stated the contract yet", action=action, retry_after_s=1.0)
            published_variants.check_offered(connection, registration.variant)
            known = self._context.sites.register(connection, registration)
            if registration.held is not None:
                holder = registration.site, registration.incarnation
                work_assignments.keep_only(connection, registration.held, holder)
            return lineage.head_version(connection), known + 1

        head, next_sequence = await self._context.database.run(operation)
        self._context.sites.see(registration.site, registration.incarnation, self._context.clock.monotonic())
        _LOG.info("site %s registered: engine %s, %s", registration.site, registration.engine, registration.dtype)
        return RegisterAnswer(
            run_id=self._context.config.run_id,
            head_version=stated_version(head),
            next_sequence=next_sequence,
            max_staleness_versions=bound,
            max_message_bytes=self._context.config.max_message_bytes,
            push_groups=PUSH_GROUPS,
            work_ahead_s=self._context.sites.granted_ahead_s(registration),
        )

    async def heartbeat(self, beat: Heartbeat) -> tuple[Command, ...]:
        commands = await self._beats.commands((beat.site, beat.incarnation))
        if commands is None:
            return (Command.REGISTER,)
        self._context.sites.beat(beat, self._context.clock.monotonic())
        return commands

    async def report_canary(self, report: CanaryReport) -> CanaryVerdict:
        """Compare a site's canary with the learner's; begin or end its quarantine.
        The audit log gets at most one beginning and one end a version, so that a site with alternating canaries cannot
        fill it."""

        def operation(connection: Connection) -> tuple[CanaryVerdict, float | None, bool]:
            self._context.sites.require(connection, report.site, report.incarnation)
            before = quarantine.canary_reason_of(connection, report.site)
            variant = self._context.sites.variant(connection, report.site, report.incarnation)
            threshold = self._context.config.canary_threshold
            verdict = quarantine.compare_canary(connection, report, threshold=threshold, variant=variant)
            is_off = bool(verdict.quarantine)
            is_said = bool(before) != is_off and quarantine.is_news(connection, report, is_off=is_off)
            if is_said:
                kind = AuditKind.QUARANTINE if verdict.quarantine else AuditKind.QUARANTINE_ENDED
                detail = verdict.quarantine or f"version {report.version} scores as the learner says"
                audit.append(connection, kind, subject=report.site, detail=detail, now=self._context.clock.wall())
            stated = quarantine.read_canary(connection, report.version, variant)
            return verdict, quarantine.canary_kl(report.logprobs, stated), is_said

        verdict, kl, is_said = await self._context.database.run(operation)
        if kl is not None:
            metrics.SITE_CANARY_KL.labels(metrics.SITES.of(report.site)).set(kl)
        self._context.sites.note_canary(report, verdict.difference, self._context.clock.monotonic())
        if is_said and verdict.quarantine:
            _LOG.error(
                "site %s goes into quarantine: %s; a version that the site scores right ends it, or an operator: %s",
                report.site, verdict.quarantine, RELEASE,
            )  # fmt: skip
        elif is_said:
            _LOG.info("site %s leaves quarantine with version %d", report.site, report.version)
        return verdict

    async def get_status(self) -> RunStatus:
        return await status_report.run_status(self._context)

    async def rollback(self, *, to_version: int, request_id: str) -> int:
        """Order the learner to publish an earlier version's content.
        It replaces an earlier order. Raises RunFinished: no version comes any more."""
        target = version_or_none(to_version)

        def operation(connection: Connection) -> int | None:
            is_new, head = not rollback_order.is_known(connection, request_id), lineage.head_version(connection)
            if is_new and target is not None and self._context.config.is_finished(head):
                most = self._context.config.max_versions
                raise RunFinished(f"the run ended with version {most}, the coordinator's max_versions")
            rollback_order.place(connection, to_version=target, request_id=request_id)
            detail = "taken back" if target is None else f"to version {target}"
            if is_new:
                kind, now = AuditKind.ROLLBACK_ORDER, self._context.clock.wall()
                audit.append(connection, kind, subject=request_id, detail=detail, now=now)
            return head

        head = await self._context.database.run(operation)
        _LOG.warning(
            "an operator %s", "cancels the rollback" if target is None else f"orders a rollback to version {target}"
        )
        return stated_version(head)

    async def list_restorable(self) -> tuple[int, ...]:
        return await self._context.database.run(rollback_order.restorable)

    async def release_site(self, *, site: SiteId, reason: str, request_id: str = "") -> str:
        now = self._context.clock.wall()

        def operation(connection: Connection) -> str:
            before = answer_to_order(connection, f"release/{site}", request_id)
            if before is None:
                before = quarantine.release(connection, site, reason=reason, now=now)
                remember_order(connection, f"release/{site}", request_id, before)
            return before

        before = await self._context.change(operation)
        _LOG.warning("site %s is released by an operator: %s", site, reason)
        return before

    def note_standstill(self, sites: Sequence[str]) -> None:
        """Log once when quarantines stop the run or it goes on."""
        if bool(sites) != self._is_idle:
            self._is_idle = bool(sites)
            level = logging.ERROR if sites else logging.WARNING
            _LOG.log(
                level, "%s", describe_standstill(sites) or "the run goes on: a site that answers is not in quarantine"
            )

    async def note_revoked(self, serials: frozenset[int], by_site: Mapping[str, int]) -> None:
        """Note revoked certificates; `by_site` are the newest ones of sites."""
        now, is_new = self._context.clock.wall(), serials != self._noted

        def operation(connection: Connection) -> None:
            if is_new:
                audit.note_revoked(connection, serials, now=now)
            note_revoked_sites(connection, serials, by_site)

        await self._context.database.run(operation)
        self._noted = serials

    async def describe_run(self, *, epoch: int, facts: Mapping[str, str]) -> None:
        """Store the learner's facts about the run, and log changes."""
        now = self._context.clock.wall()

        def operation(connection: Connection) -> str:
            lineage.check_epoch(connection, epoch)
            before = json.loads(get_meta(connection, status_report.FACTS) or "{}")
            (step,) = connection.execute("SELECT coalesce(max(step), 0) FROM steps").fetchone()
            words = changed_facts(before, facts) if before else ""
            said = with_changes(before, facts, words=words, step=int(step))
            set_meta(connection, status_report.FACTS, json.dumps(said))
            if words:
                detail = f"after step {step}: {words}"
                audit.append(connection, AuditKind.CONFIGURATION, subject=f"epoch {epoch}", detail=detail, now=now)
            return words

        if words := await self._context.change(operation):
            _LOG.warning("the learner began with another configuration: %s", words)

    async def list_steps(self, *, after_step: int, limit: int) -> tuple[StepReport, ...]:
        if not 1 <= limit <= 1000:
            raise InvalidRequest(f"limit: {limit} is not in 1..1000")
        most = min(STEPS_BYTES, self._context.config.max_group_bytes)
        return await self._context.database.run(
            lambda connection: status_report.list_steps(connection, after_step, limit, max_bytes=most)
        )

    async def drain(self, *, reason: str, epoch: int | None = None) -> None:
        """Hand out no more work until a learner acquires the lease.
        `epoch` fences a learner's order."""

        def operation(connection: Connection) -> None:
            if epoch is not None:
                lineage.check_epoch(connection, epoch)
            set_meta(connection, "draining", reason or "asked to")
            head, config = lineage.head_version(connection), self._context.config
            if head is not None:
                evaluations.plan(
                    connection, config.evaluation, version=head, now=self._context.clock.wall(), is_last=True
                )

        await self._context.database.run(operation)
        _LOG.info("the run drains: %s", reason)


Commands = dict[Holder, tuple[Command, ...]]


@dataclass(slots=True)
class _Round:
    holders: set[Holder] = field(default_factory=set)
    answers: asyncio.Future[Commands] | None = None


class Beats:
    """Answers all waiting heartbeats by one store operation.

    With 1000 sites on PostgreSQL, one operation each starved the learner: it got 0 of 220 groups in 14 s. With batched
    heartbeats it got 500 of 780 in 22 s.
    """

    def __init__(self, database: Database, config: CoordinatorConfig, full: Container[str]) -> None:
        """`full` has the sites whose groups find no room in the queue."""
        self._database = database
        self._config = config
        self._full = full
        self._lock = threading.Lock()
        self._open: _Round | None = None
        """Open for heartbeats until the store's thread takes it."""

    async def commands(self, holder: Holder) -> tuple[Command, ...] | None:
        """Commands for a holder, None if unregistered; raises as `Database.run`."""
        with self._lock:
            mine = self._open
            # Done but open: the store failed before its thread took the round, as on a full disk.
            if mine is None or (mine.answers is not None and mine.answers.done()):
                mine = self._open = _Round()
            mine.holders.add(holder)
        if mine.answers is None:
            mine.answers = self._database.submit(lambda connection: self._answer(connection, mine))
        # A cancelled call must not cancel the others' answer.
        return (await asyncio.shield(mine.answers)).get(holder)

    def _answer(self, connection: Connection, asked: _Round) -> Commands:
        with self._lock:
            if self._open is asked:
                self._open = None
        return commands_of(connection, asked.holders, self._config, self._full)


def commands_of(
    connection: Connection, holders: Iterable[Holder], config: CoordinatorConfig, full: Container[str] = ()
) -> Commands:
    """Commands for holders; unregistered ones are left out.
    A drained run has no learner, so a site of `full` would push the rest of its outbox for ever."""
    wide = incarnations.wide_gaps(connection, holders)
    if config.is_finished(lineage.head_version(connection)):
        # A draining sampler evaluates the last version before it stops.
        last = (Command.DRAIN if evaluations.is_pending(connection) else Command.STOP,)
        return dict.fromkeys(wide, last)
    draining = (Command.DRAIN,) if get_meta(connection, "draining") else ()
    is_over = draining and get_meta(connection, "lease_released") == "1" and not evaluations.is_pending(connection)
    # A site that registers again states its lowest sequence, and the watermark passes over the missing ones.
    answers = {holder: (*draining, Command.REGISTER) if is_wide else draining for holder, is_wide in wide.items()}
    return answers | {holder: (Command.STOP,) for holder in wide if is_over and holder[0] in full}
