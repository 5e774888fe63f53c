"""The learner's calls for its lease, over gRPC."""

from __future__ import annotations

from collections.abc import Sequence

from heterorl.common.rpc.calls import Calls
from heterorl.common.types.common import Contract
from heterorl.common.types.policy import LeaseGrant
from heterorl.common.types.step import LearnerProgress
from heterorl.common.wire.common import contract_to_pb, progress_to_pb
from heterorl.common.wire.policy import grant_from_pb
from heterorl.v1 import policy_pb2


class LeaseCalls(Calls):
    """Asks for the lease, keeps it, gives it back."""

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
        """Become the run's learner under a new epoch."""
        request = policy_pb2.AcquireLeaseRequest(
            request_id=request_id,
            holder=holder,
            contract=contract_to_pb(contract),
            flavours=flavours,
            incarnation=incarnation,
            groups_per_version=groups_per_version,
        )
        return grant_from_pb(await self._call("AcquireLease", request))

    async def renew_lease(self, *, epoch: int, progress: LearnerProgress | None = None) -> LeaseGrant:
        """Extend the lease."""
        request = policy_pb2.RenewLeaseRequest(epoch=epoch, progress=progress_to_pb(progress))
        return grant_from_pb(await self._call("RenewLease", request))

    async def release_lease(self, *, epoch: int) -> None:
        """End the lease."""
        await self._call("ReleaseLease", policy_pb2.ReleaseLeaseRequest(epoch=epoch))
