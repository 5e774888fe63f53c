"""The coordinator in domain terms: joins lease, lineage, queue and work over one store. Knows no transport.

Guarantees: each mutation is one store operation, answered after its commit; waiters are woken by bells, never by
polling; closing wakes every waiter. Must never decide anything that a pure module can.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass

from heterorl.common.errors import (
    ContractMismatch,
    Draining,
    InvalidRequest,
    NotRegistered,
)
from heterorl.common.process import metrics
from heterorl.common.process.clock import Clock
from heterorl.common.types.common import SiteId, StepReport
from heterorl.common.types.run import (
    CanaryReport,
    CanaryVerdict,
    Command,
    Heartbeat,
    RegisterAnswer,
    Registration,
    RunStatus,
)
from heterorl.common.types.standstill import RELEASE
from heterorl.coordinator import status
from heterorl.coordinator.config import CoordinatorConfig
from heterorl.coordinator.opening import open_node
from heterorl.coordinator.policy import Policies
from heterorl.coordinator.rollout import Rollouts
from heterorl.coordinator.sites import audit, canary, quarantine, watermark
from heterorl.coordinator.sites.audit import AuditKind
from heterorl.coordinator.sites.flaps import note_left_out
from heterorl.coordinator.store import repeats
from heterorl.coordinator.store.database import Database, get_meta, set_meta
from heterorl.coordinator.versions import flavours, lineage

_LOG = logging.getLogger(__name__)
MAX_SEQUENCE = 2**62
"""Far from the end of the store's integers."""


@dataclass(slots=True)
class Coordinator(Policies, Rollouts):
    """Implements heterorl.common.api.CoordinatorApi."""

    @classmethod
    async def open(cls, config: CoordinatorConfig, clock: Clock, *, store: type[Database] = Database) -> Coordinator:
        """Open the data directory; every lease found there gets a fresh term.

        `store` is how operations run on the database: on a thread of their own, or inline under a virtual clock.

        Raises:
            CorruptStore: the store fails its check or belongs to another run.
        """
        node = await open_node(config, clock, store=store)
        return cls(**{field.name: getattr(node, field.name) for field in dataclasses.fields(node)})

    @property
    def on_fatal(self) -> asyncio.Future[None]:
        """Resolves when the store failed and the process must end."""
        return self.database.on_fatal

    async def end_streams(self) -> None:
        """Wake every waiter with the news of the end."""
        self.is_closing = True
        self.bell.ring()
        self.head_bell.ring()

    async def close(self) -> None:
        """End the streams and close the store."""
        await self.end_streams()
        await self.keeper.close()
        await self.reading.close()
        await self.database.close()

    # run

    async def register(self, registration: Registration) -> RegisterAnswer:
        """Admit a sampler that agrees with the run."""
        bound = self.config.max_staleness_versions
        if registration.max_delay_versions > bound:
            raise ContractMismatch(
                f"the delay of {registration.max_delay_versions} versions exceeds max_staleness_versions = {bound}",
                action="raise the coordinator's max_staleness_versions or lower the sampler's delay",
            )
        longest_s = self.config.max_policy_age_s
        if not 0 <= registration.max_delay_s <= longest_s:
            # A number that is none is refused like one that is too large.
            raise ContractMismatch(
                f"the delay of {registration.max_delay_s:g} s there and back exceeds max_policy_age_s = {longest_s:g}",
                action="raise the coordinator's max_policy_age_s or lower the sampler's delay",
            )
        if not registration.site or not registration.incarnation:
            raise InvalidRequest("site and incarnation must not be empty")
        if registration.lowest_sequence > MAX_SEQUENCE:
            raise InvalidRequest(f"lowest_sequence: {registration.lowest_sequence} exceeds {MAX_SEQUENCE}")

        def operation(connection: sqlite3.Connection) -> tuple[int, int]:
            if not lineage.agree(connection, registration.contract, may_state=False):
                raise Draining(
                    "no learner has stated the contract yet",
                    action="start the learner; this node goes on by itself",
                    retry_after_s=1.0,
                )
            flavours.check_offered(connection, registration.flavour)
            known = self.sites.register(connection, registration)
            return lineage.read_head(connection).version, known + 1

        head, next_sequence = await self.database.run(operation)
        self.sites.see(registration.site, registration.incarnation, self.clock.monotonic())
        _LOG.info("site %s registered: engine %s, %s", registration.site, registration.engine, registration.dtype)
        return RegisterAnswer(
            run_id=self.config.run_id,
            head_version=head,
            next_sequence=next_sequence,
            max_staleness_versions=bound,
            max_message_bytes=self.config.max_message_bytes,
        )

    async def heartbeat(self, beat: Heartbeat) -> tuple[Command, ...]:
        """Note a sampler's state and answer with commands."""

        def operation(connection: sqlite3.Connection) -> tuple[tuple[Command, ...], bool]:
            if not self.sites.is_known(connection, beat.site, beat.incarnation):
                return (Command.REGISTER,), False
            if self.config.is_finished(lineage.read_head(connection).version):
                return (Command.STOP,), True
            draining = (Command.DRAIN,) if get_meta(connection, "draining") else ()
            # Registering again, it says what it can still push, and the watermark passes over the rest.
            again = (Command.REGISTER,) if watermark.is_gap_wide(connection, beat.site, beat.incarnation) else ()
            return (*draining, *again), True

        commands, is_known = await self.database.run(operation)
        if is_known:
            self.sites.beat(beat, self.clock.monotonic())
        return commands

    async def report_canary(self, report: CanaryReport) -> CanaryVerdict:
        """Compare a site's canary with the learner's; quarantine it or end its quarantine."""

        instant = self.clock.monotonic()

        def operation(connection: sqlite3.Connection) -> tuple[CanaryVerdict, bool]:
            if not self.sites.is_known(connection, report.site, report.incarnation):
                raise NotRegistered(f"site {report.site}, incarnation {report.incarnation}, is not registered")
            before = canary.read_quarantines(connection).get(report.site, "")
            flavour = self.sites.flavour(connection, report.site, report.incarnation)
            threshold = self.config.canary_threshold
            verdict = canary.compare(connection, report, threshold=threshold, flavour=flavour)
            is_said = bool(before) != bool(verdict.quarantine) and self.flaps.note(report.site, instant)
            if is_said:
                kind = AuditKind.QUARANTINE if verdict.quarantine else AuditKind.QUARANTINE_ENDED
                detail = verdict.quarantine or f"version {report.version} scores as the learner says"
                audit.append(connection, kind, subject=report.site, detail=detail, now=self.clock.wall())
            return verdict, is_said

        verdict, is_said = await self.database.run(operation)
        self.sites.note_canary(report, verdict.difference, self.clock.monotonic())
        if is_said and verdict.quarantine:
            _LOG.error(
                "site %s goes into quarantine: %s; a version that it scores right ends that, or an operator: %s",
                report.site,
                verdict.quarantine,
                RELEASE,
            )
        elif is_said:
            _LOG.info("site %s leaves quarantine with version %d", report.site, report.version)
        return verdict

    async def get_status(self) -> RunStatus:
        """The state of the run."""
        now, wall = self.clock.monotonic(), self.clock.wall()
        return await self.database.run(
            lambda connection: status.run_status(
                connection,
                config=self.config,
                sites=self.sites,
                quotas=self.queue.quotas,
                now=now,
                wall=wall,
                uptime_s=now - self.started,
                store_bytes=self.blobs.used_bytes,
                store_problem=self.room.problem,
            )
        )

    async def release_site(self, *, site: SiteId, reason: str, request_id: str = "") -> str:
        """End a site's quarantine by an operator's order."""
        now = self.clock.wall()

        def operation(connection: sqlite3.Connection) -> str:
            before = repeats.answer_to(connection, f"release/{site}", request_id)
            if before is None:
                before = quarantine.release(connection, site, reason=reason, now=now)
                repeats.remember(connection, f"release/{site}", request_id, before)
            return before

        before = await self.change(operation)
        _LOG.warning("operator: site %s is released: %s", site, reason)
        return before

    async def note_refusals(self) -> None:
        """Sum up in the log of audit, now and then, what quotas refused and which changes had no row of their own."""
        for (site, quota), count in self.queue.quotas.new_refusals().items():
            metrics.QUOTA_REFUSALS.labels(metrics.SITES.of(site), quota).inc(count)
        now, instant = self.clock.wall(), self.clock.monotonic()
        if due := self.queue.quotas.due_summaries(instant):
            await self.database.run(lambda connection: audit.note_refusals(connection, due, now=now))
        if left_out := self.flaps.due(instant):
            await self.database.run(lambda connection: note_left_out(connection, left_out, now=now))

    async def note_revoked(self, serials: frozenset[int]) -> None:
        """Keep in the log of audit which certificates are refused."""
        now = self.clock.wall()
        await self.database.run(lambda connection: audit.note_revoked(connection, serials, now=now))

    async def describe_run(self, *, epoch: int, facts: Mapping[str, str]) -> None:
        """Keep what the learner says of the run, in place of what was said before."""
        text = json.dumps(dict(facts))

        def operation(connection: sqlite3.Connection) -> None:
            lineage.check_epoch(connection, epoch)
            set_meta(connection, status.FACTS, text)

        await self.change(operation)

    async def list_steps(self, *, after_step: int, limit: int) -> tuple[StepReport, ...]:
        """Step reports after a cursor."""
        if not 1 <= limit <= 1000:
            raise InvalidRequest(f"limit: {limit} is not in 1..1000")
        return await self.database.run(lambda connection: status.list_steps(connection, after_step, limit))

    async def drain(self, *, reason: str, epoch: int | None = None) -> None:
        """Hand out no more work until a learner acquires the lease again; a learner's order is fenced by its epoch."""

        def operation(connection: sqlite3.Connection) -> None:
            if epoch is not None:
                lineage.check_epoch(connection, epoch)
            set_meta(connection, "draining", reason or "asked to")

        await self.database.run(operation)
        _LOG.info("draining: %s", reason)
