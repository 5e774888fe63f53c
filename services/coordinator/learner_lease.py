"""The learner's lease: taken, renewed, given back; each is one store operation. See heterorl.common.api."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Sequence

from heterorl.common.errors import InvalidRequest, LeaseHeld
from heterorl.common.types.common import Contract
from heterorl.common.types.policy import LeaseGrant
from heterorl.coordinator.groups import group_size, queue
from heterorl.coordinator.parts import Node
from heterorl.coordinator.sites import audit
from heterorl.coordinator.sites.audit import AuditKind
from heterorl.coordinator.store.database import get_meta, set_meta
from heterorl.coordinator.versions import flavours as forms
from heterorl.coordinator.versions import lineage, rollback
from heterorl.coordinator.versions.lease import Lease, decide_acquire

_LOG = logging.getLogger(__name__)
MAX_INCARNATION = 64
SAME_HOLDER = (
    "stop one of the two learners that have this holder, or give one another `holder` and `state_dir`; a learner that"
    " was started again from its own state_dir need not wait"
)


class Leases(Node):
    """Who may publish."""

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
            lease = read_lease(connection, expires=self.lease_expires)
            decision, reason = decide_acquire(now, lease, holder=holder, request_id=request_id, incarnation=incarnation)
            if decision.epoch is None:
                action = SAME_HOLDER if lease.holder == holder else None
                raise LeaseHeld(reason, action=action, retry_after_s=decision.wait_s)
            lineage.agree(connection, contract, may_state=True)
            if decision.is_new:
                write_lease(
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


def read_lease(connection: sqlite3.Connection, *, expires: float) -> Lease:
    """The durable part of the lease, with the given expiry."""
    return Lease(
        epoch=int(get_meta(connection, "epoch") or 0),
        holder=get_meta(connection, "holder") or "",
        request_id=get_meta(connection, "lease_request_id") or "",
        incarnation=get_meta(connection, "lease_incarnation") or "",
        expires=expires,
        is_released=get_meta(connection, "lease_released") != "0",
    )


def write_lease(
    connection: sqlite3.Connection,
    *,
    epoch: int,
    holder: str,
    request_id: str,
    is_released: bool,
    incarnation: str = "",
) -> None:
    """Make a lease durable."""
    set_meta(connection, "epoch", str(epoch))
    set_meta(connection, "holder", holder)
    set_meta(connection, "lease_request_id", request_id)
    set_meta(connection, "lease_incarnation", incarnation)
    set_meta(connection, "lease_released", "1" if is_released else "0")
