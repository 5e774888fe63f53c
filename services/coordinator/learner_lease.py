"""The learner's lease: acquire, renew and release, one store operation each."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

from heterorl.common.errors import InvalidRequest, LeaseHeld
from heterorl.common.types.common import Contract, LearnerProgress
from heterorl.common.types.policy import LeaseGrant, stated_version
from heterorl.common.wire.statement import check_statement
from heterorl.coordinator.context import CoordinatorContext
from heterorl.coordinator.groups import validation
from heterorl.coordinator.sites import audit
from heterorl.coordinator.sites.audit import AuditKind
from heterorl.coordinator.store.database import Connection, get_meta, set_meta
from heterorl.coordinator.versions import lineage, rollback_order
from heterorl.coordinator.versions.lineage import Lease, decide_acquire, keep_statement
from heterorl.coordinator.versions.published_variants import check_names, offer

_LOG = logging.getLogger(__name__)
MAX_INCARNATION = 64
SAME_HOLDER = (
    "stop one of the two learners that have this holder, or give one another `holder` and `state_dir`; a learner that"
    " was started again from its own state_dir need not wait"
)


class LearnerLease:
    """The lease of the one learner that may publish."""

    def __init__(self, context: CoordinatorContext) -> None:
        self._context = context
        self._expires = context.clock.monotonic() + context.config.learner_lease_s
        """Monotonic instant, used by store operations only; a lease found at a start gets a fresh term at its end."""

    async def acquire_lease(
        self,
        *,
        holder: str,
        contract: Contract,
        request_id: str,
        variants: Sequence[str] = (),
        incarnation: str = "",
        groups_per_version: int = 0,
        statement: bytes = b"",
    ) -> LeaseGrant:
        if not holder or not request_id:
            raise InvalidRequest("holder and request_id must not be empty")
        if len(incarnation) > MAX_INCARNATION:
            raise InvalidRequest(f"incarnation: longer than {MAX_INCARNATION} characters")
        check_names(variants)
        if statement:
            check_statement(statement, contract)
        problem = validation.contract_problem(contract, self._context.config)
        if problem:
            raise InvalidRequest(problem, action=validation.SIZE_ACTION)
        now = self._context.clock.monotonic()

        def operation(connection: Connection) -> tuple[int, int | None, str, str]:
            lease = read_lease(connection, expires=self._expires)
            epoch, wait_s, reason = decide_acquire(
                now, lease, holder=holder, request_id=request_id, incarnation=incarnation
            )
            if epoch is None:
                action = SAME_HOLDER if lease.holder == holder else None
                raise LeaseHeld(reason, action=action, retry_after_s=wait_s)
            lineage.agree(connection, contract, may_state=True)
            other = keep_statement(connection, statement)
            if epoch != lease.epoch:
                for key, value in {
                    "epoch": str(epoch),
                    "holder": holder,
                    "lease_request_id": request_id,
                    "lease_incarnation": incarnation,
                    "lease_released": "0",
                    "lease_groups_per_version": str(groups_per_version),
                    "num_prompts": str(contract.num_prompts),
                    "draining": "",
                }.items():
                    set_meta(connection, key, value)
                self._context.queue.return_leased(connection)
                detail = f"epoch {epoch}"
                audit.append(
                    connection, AuditKind.LEARNER_LEASE, subject=holder, detail=detail, now=self._context.clock.wall()
                )
                offer(connection, variants)
            # Inside the operation: the next request may be in the same commit, and must see this one.
            self._expires = self._context.clock.monotonic() + self._context.config.learner_lease_s
            return epoch, lineage.head_version(connection), reason, other

        epoch, head, reason, other = await self._context.change(operation)
        _LOG.info("learner %s has the lease: %s", holder, reason)
        counted = self._context.config.groups_per_version
        if groups_per_version not in (0, counted):
            _LOG.warning(
                "a version of learner %s takes %d groups, and groups_per_version is %d: set it to %d, or work is paced"
                " for versions of another size", holder, groups_per_version, counted, groups_per_version,
            )  # fmt: skip
        if other:
            _LOG.warning("learner %s states another configuration; sites with [join] get the first: %s", holder, other)
        return self._grant(epoch, holder, head)

    async def renew_lease(
        self, *, epoch: int, progress: LearnerProgress | None = None, refused_rollback: str = ""
    ) -> LeaseGrant:
        """Extend the lease, also after its expiry unless another learner took it."""

        def operation(connection: Connection) -> LeaseGrant:
            lineage.check_epoch(connection, epoch)
            # A request that waits behind a slow operation counts from its turn.
            now = self._context.clock.monotonic()
            self._expires = now + self._context.config.learner_lease_s
            self._context.standing.note(progress, epoch=epoch, now=now)
            holder = get_meta(connection, "holder") or ""
            refused = rollback_order.refuse(connection, request_id=refused_rollback)
            if refused is not None:
                detail = f"the learner cannot go back to version {refused}: its log says why"
                wall = self._context.clock.wall()
                audit.append(connection, AuditKind.ROLLBACK_ORDER, subject=refused_rollback, detail=detail, now=wall)
            grant = self._grant(epoch, holder, lineage.head_version(connection))
            version, request_id = rollback_order.open_order(connection)
            return dataclasses.replace(grant, rollback_to=stated_version(version), rollback_id=request_id)

        return await self._context.database.run(operation)

    async def release_lease(self, *, epoch: int) -> None:
        """End the lease; its groups return to the queue. Repeatable."""

        def operation(connection: Connection) -> None:
            if get_meta(connection, "epoch") == str(epoch) and get_meta(connection, "lease_released") == "1":
                # A repeat: the first answer was lost.
                return
            lineage.check_epoch(connection, epoch)
            set_meta(connection, "lease_released", "1")
            self._context.queue.return_leased(connection)

        await self._context.change(operation)

    def _grant(self, epoch: int, holder: str, head: int | None) -> LeaseGrant:
        config = self._context.config
        return LeaseGrant(
            epoch=epoch,
            holder=holder,
            ttl_s=config.learner_lease_s,
            head_version=stated_version(head),
            max_message_bytes=config.max_message_bytes,
            max_staleness_versions=config.max_staleness_versions,
            masks_stale=config.mask_stale,
            most_groups_per_version=config.most_groups_per_version,
        )


def read_lease(connection: Connection, *, expires: float) -> Lease:
    """The durable part of the lease, with the given expiry."""
    return Lease(
        epoch=int(get_meta(connection, "epoch") or 0),
        holder=get_meta(connection, "holder") or "",
        request_id=get_meta(connection, "lease_request_id") or "",
        incarnation=get_meta(connection, "lease_incarnation") or "",
        expires=expires,
        is_released=get_meta(connection, "lease_released") != "0",
    )
