"""CoordinatorApi over gRPC: deadlines, repeats under one idempotency key, typed errors."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import Any, Self

import grpc.aio

from heterorl.common.api import PieceFrames
from heterorl.common.errors import Unreachable
from heterorl.common.process.metrics import BYTES, Service, registry_of
from heterorl.common.process.pushed_metrics import pushing
from heterorl.common.rpc.calls import WeightCalls, once, readable, timed
from heterorl.common.rpc.node_config import NodeConfig
from heterorl.common.rpc.presigned import PresignedWrites
from heterorl.common.types.common import Contract, Digest, LearnerProgress, Series, SiteId, StepReport, peer_words
from heterorl.common.types.evaluation import Evaluation, EvaluationSet, PromptResult
from heterorl.common.types.policy import LeaseGrant, PublishRequest, PutPlace
from heterorl.common.types.rollout import (
    DropReason,
    Group,
    GroupId,
    PushOutcome,
    QueuedGroup,
    Rejection,
    ReturnReason,
    SealedGroup,
    WorkGrant,
)
from heterorl.common.types.run import (
    CanaryReport,
    CanaryVerdict,
    Command,
    Heartbeat,
    RegisterAnswer,
    Registration,
    RunStatus,
)
from heterorl.common.types.sample import EvaluationSample, Sample, SampleFilter, SampleList, SampleNote, SamplePage
from heterorl.common.wire.common_messages import contract_to_pb, series_to_pb, to_message, to_value
from heterorl.common.wire.policy_messages import frame_checksum, grant_from_pb, publish_to_pb
from heterorl.common.wire.rollout_messages import (
    REASONS,
    RETURN_REASONS,
    evaluation_from_pb,
    outcomes_from_pb,
    pushes_to_pb,
    queued_from_pb,
    rejections_to_pb,
    results_to_pb,
)
from heterorl.common.wire.run_messages import (
    commands_from_pb,
    heartbeat_to_pb,
    register_answer_from_pb,
    registration_to_pb,
    status_from_pb,
)
from heterorl.common.wire.sample_messages import (
    evaluation_to_pb,
    list_from_pb,
    list_request_to_pb,
    note_to_pb,
    sample_from_pb,
)
from heterorl.common.wire.sealed_groups import sealed
from heterorl.v1 import common_pb2, evaluation_pb2, metrics_pb2, policy_pb2, rollout_pb2, run_pb2, sample_pb2

PUSH_TIMEOUT_S = 120.0
"""Deadline of a push of evaluations; one of groups has the time of its bytes on top."""
ASSIGNMENTS_AT_ONCE = 4096
"""The coordinator's limit of one call."""
MIN_UP_BYTES_PER_S = 4096.0
"""Slowest link whose pushes meet their deadline; pings notice a dead link in seconds."""
_METRICS: Mapping[Service, Any] = {
    "learner": metrics_pb2.PushLearnerMetricsRequest,
    "sampler": metrics_pb2.PushSamplerMetricsRequest,
    "relay": metrics_pb2.PushRelayMetricsRequest,
}
"""Each service pushes by an rpc of its own, which a certificate of its role allows."""


class CoordinatorClient(WeightCalls):
    """A coordinator at an address; implements heterorl.common.api.CoordinatorApi.

    Streams (watch_head, read_payload, stream_groups, upload_payload) are not repeated: their callers hold the cursor.
    They raise Unreachable when the link breaks.
    """

    def __init__(self, address: str, **how: Any) -> None:
        super().__init__(address, **how)
        # Groups in one message, as the answer to `register` states.
        self._push_groups = 1
        self._writes = PresignedWrites(self._connections, self._clock)

    @classmethod
    def of(cls, config: NodeConfig, **how: Any) -> Self:
        """A client by the keys of a node's configuration."""
        return cls(
            config.coordinator,
            tls=config.tls,
            bandwidth=config.bandwidth,
            payload_urls=config.payload_urls,
            payload_hosts=config.payload_hosts,
            **how,
        )

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
        request = policy_pb2.AcquireLeaseRequest(
            request_id=request_id,
            holder=holder,
            contract=contract_to_pb(contract),
            variants=variants,
            incarnation=incarnation,
            groups_per_version=groups_per_version,
            statement=statement,
        )
        return grant_from_pb(await self._call("AcquireLease", request))

    async def renew_lease(self, *, epoch: int, progress: LearnerProgress | None = None) -> LeaseGrant:
        stated = None if progress is None else to_message(common_pb2.LearnerProgress, progress)
        request = policy_pb2.RenewLeaseRequest(epoch=epoch, progress=stated)
        return grant_from_pb(await self._call("RenewLease", request))

    async def release_lease(self, *, epoch: int) -> None:
        await self._call("ReleaseLease", policy_pb2.ReleaseLeaseRequest(epoch=epoch))

    async def abandon_groups(
        self, *, epoch: int, ids: Sequence[GroupId], reason: str, counted_as: DropReason = DropReason.LEARNER_ABANDONED
    ) -> None:
        request = rollout_pb2.AbandonGroupsRequest(
            epoch=epoch,
            ids=[to_message(common_pb2.GroupId, group_id) for group_id in ids],
            reason=peer_words(reason),
            counted_as=REASONS[counted_as],
        )
        await self._call("AbandonGroups", request)

    async def reject_groups(self, *, epoch: int, rejections: Sequence[Rejection]) -> None:
        await self._call("RejectGroups", rejections_to_pb(epoch, rejections))

    async def describe_run(self, *, epoch: int, facts: Mapping[str, str]) -> None:
        await self._call("DescribeRun", run_pb2.DescribeRunRequest(epoch=epoch, facts=dict(facts)))

    async def note_samples(
        self, *, epoch: int, notes: Sequence[SampleNote], evaluations: Sequence[EvaluationSample] = ()
    ) -> None:
        request = sample_pb2.NoteSamplesRequest(
            epoch=epoch,
            notes=[note_to_pb(note) for note in notes],
            evaluations=[evaluation_to_pb(evaluation) for evaluation in evaluations],
        )
        await self._call("NoteSamples", request)

    async def query_upload(self, *, digest: Digest) -> int:
        request = policy_pb2.QueryUploadRequest(digest=digest)
        return int((await self._call("QueryUpload", request)).num_bytes)

    async def upload_payload(
        self, *, epoch: int, digest: Digest, num_bytes: int, offset: int, frames: AsyncIterator[bytes]
    ) -> int:
        """Append frames to a payload; after Unreachable, continue from `query_upload`."""

        async def requests() -> AsyncIterator[policy_pb2.UploadPayloadRequest]:
            yield policy_pb2.UploadPayloadRequest(
                header=policy_pb2.UploadHeader(epoch=epoch, digest=digest, num_bytes=num_bytes, offset=offset)
            )
            async for frame in frames:
                await self._pace(self._up, "up", len(frame))
                yield policy_pb2.UploadPayloadRequest(frame=frame, checksum=frame_checksum(frame))

        return await self._upload(requests())

    async def _upload(self, requests: AsyncIterator[policy_pb2.UploadPayloadRequest]) -> int:
        async def attempt() -> int:
            async with self._channel.stubs() as stubs:
                with timed("UploadPayload"):
                    return int((await stubs.method("UploadPayload")(requests)).num_bytes)

        return await once("UploadPayload", attempt)

    async def put_payload(self, *, epoch: int, digest: Digest, num_bytes: int, frames: PieceFrames) -> bool:
        if not self._writes.is_worth_asking:
            return False
        request = policy_pb2.QueryUploadRequest(digest=digest, epoch=epoch, put_bytes=num_bytes)

        async def ask() -> PutPlace:
            answer = await self._call("QueryUpload", request)
            return PutPlace(url=answer.put_url, offset=answer.put_offset, num_bytes=answer.put_bytes)

        async def paced(offset: int, stop: int) -> AsyncGenerator[bytes, None]:
            async with contextlib.aclosing(frames(offset, stop)) as piece:
                async for frame in piece:
                    await self._pace(self._up, "up", len(frame))
                    yield frame

        return await self._writes.put_all(ask, paced, num_bytes=num_bytes)

    async def take_payload(self, *, epoch: int, digest: Digest, num_bytes: int) -> int:

        async def requests() -> AsyncIterator[policy_pb2.UploadPayloadRequest]:
            header = policy_pb2.UploadHeader(epoch=epoch, digest=digest, num_bytes=num_bytes, is_put=True)
            yield policy_pb2.UploadPayloadRequest(header=header)

        return await self._upload(requests())

    async def publish_version(self, request: PublishRequest) -> int:
        message = publish_to_pb(request)
        return int((await self._call("PublishVersion", message)).version)

    async def get_step(self, *, step_id: str) -> int | None:
        request = policy_pb2.GetStepRequest(step_id=step_id)
        answer = await self._call("GetStep", request)
        return int(answer.version) if answer.HasField("version") else None

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
        request = rollout_pb2.LeaseWorkRequest(
            site=site,
            incarnation=incarnation,
            max_groups=max_groups,
            policy_version=policy_version,
            request_id=request_id or secrets.token_hex(8),
            sets=[to_message(evaluation_pb2.EvaluationSet, each) for each in sets],
        )
        return to_value(WorkGrant, await self._call("LeaseWork", request))

    async def abandon_work(
        self, *, site: SiteId, incarnation: str, assignments: Sequence[int], reason: ReturnReason | None = None
    ) -> None:
        number: Any = None if reason is None else RETURN_REASONS[reason]
        for first in range(0, len(assignments), ASSIGNMENTS_AT_ONCE):
            some = assignments[first : first + ASSIGNMENTS_AT_ONCE]
            request = rollout_pb2.AbandonWorkRequest(
                site=site, incarnation=incarnation, assignments=list(some), reason=number
            )
            await self._call("AbandonWork", request)

    async def push_groups(self, groups: Sequence[Group | SealedGroup]) -> list[PushOutcome]:
        """Push groups; outcomes before a broken link are final, others unknown."""
        pushed = pushes_to_pb(
            [sealed(group) for group in groups], limit_bytes=self._channel.send_bytes, limit_groups=self._push_groups
        )
        timeout_s = self._push_timeout_s(sum(message.ByteSize() for message, _ in pushed))

        async def requests() -> AsyncIterator[rollout_pb2.PushGroupsRequest]:
            for message, _ in pushed:
                await self._pace(self._up, "up", message.ByteSize())
                BYTES.labels("groups", "out").inc(message.ByteSize())
                yield message

        async def attempt() -> list[PushOutcome]:
            outcomes: list[PushOutcome] = []
            is_in_order = True
            try:
                async with self._channel.stubs() as stubs:
                    with timed("PushGroups"):
                        async for message in stubs.method("PushGroups")(requests(), timeout=timeout_s):
                            for outcome in outcomes_from_pb(readable("PushGroups", message)):
                                # Keep one outcome for each group; drop extra outcomes and outcomes of other groups.
                                if len(outcomes) < len(groups) and is_in_order:
                                    is_in_order = outcome.id == groups[len(outcomes)].id
                                    outcomes += [outcome] * is_in_order
            except (grpc.aio.AioRpcError, Unreachable):
                if not outcomes:
                    raise
            if not outcomes and pushed:
                raise Unreachable(f"PushGroups: no outcome for the first of {len(groups)} groups", retry_after_s=1.0)
            return outcomes

        return await self._retried(attempt, name="PushGroups")

    def _push_timeout_s(self, num_bytes: int) -> float:
        # Twice: other calls may have just used up the allowance.
        capped_s = 2 * num_bytes / self._up.bytes_per_s if self._up.bytes_per_s else 0.0
        return PUSH_TIMEOUT_S + num_bytes / MIN_UP_BYTES_PER_S + capped_s

    async def stream_groups(
        self, *, epoch: int, held: Sequence[GroupId], credits: AsyncIterator[int]
    ) -> AsyncIterator[QueuedGroup]:

        async def requests() -> AsyncIterator[rollout_pb2.StreamGroupsRequest]:
            yield rollout_pb2.StreamGroupsRequest(
                epoch=epoch, held=[to_message(common_pb2.GroupId, group_id) for group_id in held]
            )
            async for credit in credits:
                yield rollout_pb2.StreamGroupsRequest(epoch=epoch, credits=credit)

        async for message in self._streamed("StreamGroups", requests()):
            BYTES.labels("groups", "in").inc(message.ByteSize())
            yield queued_from_pb(message)

    async def register(self, registration: Registration) -> RegisterAnswer:
        request = registration_to_pb(registration)
        answer = register_answer_from_pb(await self._call("Register", request))
        if answer.max_message_bytes:
            await self._channel.send_up_to(answer.max_message_bytes)
        self._push_groups = answer.push_groups
        return answer

    async def heartbeat(self, beat: Heartbeat) -> tuple[Command, ...]:
        request = heartbeat_to_pb(beat)
        return commands_from_pb(await self._call("Heartbeat", request))

    async def report_canary(self, report: CanaryReport) -> CanaryVerdict:
        request = to_message(run_pb2.ReportCanaryRequest, report)
        return to_value(CanaryVerdict, await self._call("ReportCanary", request))

    def pushing(
        self, service: Service, *, site: str, interval_s: float
    ) -> contextlib.AbstractAsyncContextManager[None]:
        """Send this node's metrics while the body runs."""
        kind = _METRICS[service]

        async def push(series: Sequence[Series]) -> bool:
            request = kind(site=site, series=series_to_pb(series))
            return bool((await self._once(kind.DESCRIPTOR.name.removesuffix("Request"), request)).is_kept)

        return pushing(push, registry=registry_of(service), interval_s=interval_s, clock=self._clock)

    async def get_status(self) -> RunStatus:
        return status_from_pb(await self._call("GetStatus", run_pb2.GetStatusRequest()))

    async def list_steps(self, *, after_step: int, limit: int) -> tuple[StepReport, ...]:
        request = run_pb2.ListStepsRequest(after_step=after_step, limit=limit)
        answer = await self._call("ListSteps", request)
        return tuple(to_value(StepReport, report) for report in answer.reports)

    async def drain(self, *, reason: str, epoch: int | None = None) -> None:
        await self._call("Drain", run_pb2.DrainRequest(reason=reason, epoch=epoch))

    async def rollback(self, *, to_version: int, request_id: str) -> int:
        request = run_pb2.RollbackRequest(request_id=request_id, to_version=to_version)
        return int((await self._call("Rollback", request)).head_version)

    async def list_restorable(self) -> tuple[int, ...]:
        return tuple((await self._call("ListRestorable", run_pb2.ListRestorableRequest())).versions)

    async def release_site(self, *, site: SiteId, reason: str, request_id: str = "") -> str:
        request = run_pb2.ReleaseSiteRequest(site=site, reason=reason, request_id=request_id or secrets.token_hex(8))
        return str((await self._call("ReleaseSite", request)).quarantine)

    async def list_samples(self, *, wanted: SampleFilter, page: SamplePage) -> SampleList:
        return list_from_pb(await self._call("ListSamples", list_request_to_pb(wanted, page)), page)

    async def get_sample(self, *, sample_id: int) -> Sample:
        return sample_from_pb(await self._call("GetSample", sample_pb2.GetSampleRequest(id=sample_id)))

    async def push_evaluation(
        self, *, site: SiteId, incarnation: str, state_root: Digest, results: Sequence[PromptResult]
    ) -> int:
        request = evaluation_pb2.PushEvaluationRequest(
            site=site, incarnation=incarnation, state_root=state_root, results=results_to_pb(results)
        )
        await self._pace(self._up, "up", request.ByteSize())
        return int((await self._call("PushEvaluation", request, timeout_s=PUSH_TIMEOUT_S)).num_counted)

    async def list_evaluations(
        self, *, task_set: str = "", after_version: int = -1, limit: int = 1000
    ) -> tuple[Evaluation, ...]:
        request = evaluation_pb2.ListEvaluationsRequest(task_set=task_set, after_version=after_version, limit=limit)
        answer = await self._call("ListEvaluations", request)
        return tuple(evaluation_from_pb(message) for message in answer.evaluations)
