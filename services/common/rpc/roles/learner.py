"""The learner's calls over gRPC: for its lease, and what it says of groups and of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from heterorl.common.rpc.calls import Calls
from heterorl.common.types.common import Contract
from heterorl.common.types.policy import LeaseGrant
from heterorl.common.types.rollout import DropReason, GroupId, Rejection
from heterorl.common.types.sample import EvaluationSample, SampleNote
from heterorl.common.types.series import Series
from heterorl.common.types.step import LearnerProgress
from heterorl.common.types.words import peer_words
from heterorl.common.wire.common import contract_to_pb, progress_to_pb
from heterorl.common.wire.metrics import series_to_pb
from heterorl.common.wire.policy import grant_from_pb
from heterorl.common.wire.rollout import group_id_to_pb, reason_to_pb, rejections_to_pb
from heterorl.common.wire.sample_notes import evaluation_to_pb, note_to_pb
from heterorl.v1 import metrics_pb2, policy_pb2, rollout_pb2, run_pb2, sample_pb2


class LearnerCalls(Calls):
    """Asks for the lease, keeps it, gives it back; says what became of groups and what the run is."""

    async def acquire_lease(
        self,
        *,
        holder: str,
        contract: Contract,
        request_id: str,
        flavours: Sequence[str] = (),
        incarnation: str = "",
        groups_per_version: int = 0,
        statement: bytes = b"",
    ) -> LeaseGrant:
        """Become the run's learner under a new epoch."""
        request = policy_pb2.AcquireLeaseRequest(
            request_id=request_id,
            holder=holder,
            contract=contract_to_pb(contract),
            flavours=flavours,
            incarnation=incarnation,
            groups_per_version=groups_per_version,
            statement=statement,
        )
        return grant_from_pb(await self._call("AcquireLease", request))

    async def renew_lease(self, *, epoch: int, progress: LearnerProgress | None = None) -> LeaseGrant:
        """Extend the lease."""
        request = policy_pb2.RenewLeaseRequest(epoch=epoch, progress=progress_to_pb(progress))
        return grant_from_pb(await self._call("RenewLease", request))

    async def release_lease(self, *, epoch: int) -> None:
        """End the lease."""
        await self._call("ReleaseLease", policy_pb2.ReleaseLeaseRequest(epoch=epoch))

    async def push_learner_metrics(self, *, site: str, series: Sequence[Series]) -> bool:
        """Hand out this learner's numbers, once; returns whether the coordinator keeps them."""
        request = metrics_pb2.PushLearnerMetricsRequest(site=site, series=series_to_pb(series))
        return bool((await self._once("PushLearnerMetrics", request)).is_kept)

    async def abandon_groups(
        self, *, epoch: int, ids: Sequence[GroupId], reason: str, counted_as: DropReason = DropReason.LEARNER_ABANDONED
    ) -> None:
        """Drop leased groups for good."""
        request = rollout_pb2.AbandonGroupsRequest(
            epoch=epoch,
            ids=[group_id_to_pb(group_id) for group_id in ids],
            reason=peer_words(reason),
            counted_as=reason_to_pb(counted_as),
        )
        await self._call("AbandonGroups", request)

    async def reject_groups(self, *, epoch: int, rejections: Sequence[Rejection]) -> None:
        """Drop leased groups that failed a check."""
        await self._call("RejectGroups", rejections_to_pb(epoch, rejections))

    async def describe_run(self, *, epoch: int, facts: Mapping[str, str]) -> None:
        """Say what the run trains."""
        await self._call("DescribeRun", run_pb2.DescribeRunRequest(epoch=epoch, facts=dict(facts)))

    async def note_samples(
        self, *, epoch: int, notes: Sequence[SampleNote], evaluations: Sequence[EvaluationSample] = ()
    ) -> None:
        """Say what kept groups were as text; said again, it is the same."""
        request = sample_pb2.NoteSamplesRequest(
            epoch=epoch,
            notes=[note_to_pb(note) for note in notes],
            evaluations=[evaluation_to_pb(evaluation) for evaluation in evaluations],
        )
        await self._call("NoteSamples", request)
