"""CoordinatorApi over gRPC: deadlines, repeats under one idempotency key, typed errors."""

import contextlib
import dataclasses
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import Any, Self

import grpc.aio

from heterorl.common.errors import Unreachable
from heterorl.common.process.metrics import BYTES, Service, registry_of
from heterorl.common.process.pushed_metrics import pushing
from heterorl.common.rpc.calls import WeightCalls, answer_to, once, readable, timed
from heterorl.common.rpc.node_config import NodeConfig
from heterorl.common.types.common import Digest, Series, SiteId, StepReport, peer_words
from heterorl.common.types.evaluation import MAX_TEXT, Evaluation, EvaluationSet, PromptResult, cut_texts
from heterorl.common.types.policy import LeaseGrant, PublishRequest
from heterorl.common.types.rollout import (
    MAX_ASSIGNMENTS,
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
from heterorl.common.wire.common_messages import new_message, to_message, to_value
from heterorl.common.wire.policy_messages import frame_checksum, grant_from_pb
from heterorl.common.wire.rollout_messages import evaluation_from_pb, outcome_from_pb, pushes_to_pb, queued_from_pb
from heterorl.common.wire.run_messages import (
    commands_from_pb,
    heartbeat_to_pb,
    register_answer_from_pb,
    registration_to_pb,
    status_from_pb,
)
from heterorl.common.wire.sample_messages import list_from_pb, list_request_to_pb, sample_from_pb
from heterorl.common.wire.sealed_groups import sealed
from heterorl.v1 import evaluation_pb2, metrics_pb2, policy_pb2, rollout_pb2, run_pb2

PUSH_TIMEOUT_S = 120.0
"""Deadline of a push of evaluations; one of groups has the time of its bytes on top."""
MIN_UP_BYTES_PER_S = 4096.0
"""Slowest link whose pushes meet their deadline; pings notice a dead link in 20 s."""
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

    @classmethod
    def of(cls, config: NodeConfig, **how: Any) -> Self:
        return cls(
            config.coordinator,
            tls=config.tls,
            bandwidth=config.bandwidth,
            payload_urls=config.payload_urls,
            payload_hosts=config.payload_hosts,
            **how,
        )

    # Arguments that go into a message as they are: heterorl.common.api states them.

    async def acquire_lease(self, **asked: Any) -> LeaseGrant:
        return grant_from_pb(await self._call("AcquireLease", **asked))

    async def renew_lease(self, **asked: Any) -> LeaseGrant:
        return grant_from_pb(await self._call("RenewLease", **asked))

    async def release_lease(self, *, epoch: int) -> None:
        await self._call("ReleaseLease", epoch=epoch)

    async def abandon_groups(
        self, *, epoch: int, ids: Sequence[GroupId], reason: str, counted_as: DropReason = DropReason.LEARNER_ABANDONED
    ) -> None:
        words = peer_words(reason)
        await self._call("AbandonGroups", epoch=epoch, ids=list(ids), reason=words, counted_as=counted_as)

    async def reject_groups(self, *, epoch: int, rejections: Sequence[Rejection]) -> None:
        said = [dataclasses.replace(each, detail=peer_words(each.detail)) for each in rejections]
        await self._call("RejectGroups", epoch=epoch, rejections=said)

    async def describe_run(self, *, epoch: int, facts: Mapping[str, str]) -> None:
        await self._call("DescribeRun", epoch=epoch, facts=dict(facts))

    async def note_samples(
        self, *, epoch: int, notes: Sequence[SampleNote], evaluations: Sequence[EvaluationSample] = ()
    ) -> None:
        await self._call("NoteSamples", epoch=epoch, notes=list(notes), evaluations=list(evaluations))

    async def query_upload(self, *, digest: Digest) -> int:
        return int((await self._call("QueryUpload", digest=digest)).num_bytes)

    async def upload_payload(
        self, *, epoch: int, digest: Digest, num_bytes: int, offset: int, frames: AsyncIterator[bytes]
    ) -> int:
        """Append frames to a payload; after Unreachable, continue from `query_upload`."""

        async def requests() -> AsyncGenerator[policy_pb2.UploadPayloadRequest, None]:
            yield policy_pb2.UploadPayloadRequest(
                header=policy_pb2.UploadHeader(epoch=epoch, digest=digest, num_bytes=num_bytes, offset=offset)
            )
            async for frame in frames:
                await self._pace(self._up, "up", len(frame))
                yield policy_pb2.UploadPayloadRequest(frame=frame, checksum=frame_checksum(frame))

        async def attempt() -> int:
            async with self._channel.held() as lane:
                with timed("UploadPayload"):
                    return int((await answer_to(lane.stubs["UploadPayload"], requests())).num_bytes)

        return await once("UploadPayload", attempt)

    async def publish_version(self, request: PublishRequest) -> int:
        return int((await self._call("PublishVersion", to_message(policy_pb2.PublishVersionRequest, request))).version)

    async def get_step(self, *, step_id: str) -> int | None:
        answer = await self._call("GetStep", step_id=step_id)
        return int(answer.version) if answer.HasField("version") else None

    async def lease_work(self, *, request_id: str = "", sets: Sequence[EvaluationSet] = (), **asked: Any) -> WorkGrant:
        request_id = request_id or secrets.token_hex(8)
        return to_value(WorkGrant, await self._call("LeaseWork", request_id=request_id, sets=list(sets), **asked))

    async def abandon_work(
        self, *, site: SiteId, incarnation: str, assignments: Sequence[int], reason: ReturnReason | None = None
    ) -> None:
        for first in range(0, len(assignments), MAX_ASSIGNMENTS):
            some = list(assignments[first : first + MAX_ASSIGNMENTS])
            await self._call("AbandonWork", site=site, incarnation=incarnation, assignments=some, reason=reason)

    async def push_groups(self, groups: Sequence[Group | SealedGroup]) -> list[PushOutcome]:
        """Push groups; outcomes before a broken link are final, others unknown."""
        pushed = pushes_to_pb(
            [sealed(group) for group in groups], limit_bytes=self._channel.send_bytes, limit_groups=self._push_groups
        )
        timeout_s = self._push_timeout_s(sum(message.ByteSize() for message in pushed))

        async def requests() -> AsyncIterator[rollout_pb2.PushGroupsRequest]:
            for message in pushed:
                await self._pace(self._up, "up", message.ByteSize())
                BYTES.labels("groups", "out").inc(message.ByteSize())
                yield message

        async def attempt() -> list[PushOutcome]:
            outcomes: list[PushOutcome] = []
            is_in_order = True
            try:
                async with self._channel.held() as lane:
                    with timed("PushGroups"):
                        async for message in lane.stubs["PushGroups"](requests(), timeout=timeout_s):
                            for outcome in map(outcome_from_pb, readable("PushGroups", message).outcomes):
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
            yield new_message(rollout_pb2.StreamGroupsRequest, epoch=epoch, held=list(held))
            async for credit in credits:
                yield rollout_pb2.StreamGroupsRequest(epoch=epoch, credits=credit)

        async for message in self._streamed("StreamGroups", requests()):
            BYTES.labels("groups", "in").inc(message.ByteSize())
            yield queued_from_pb(message)

    async def register(self, registration: Registration) -> RegisterAnswer:
        answer = register_answer_from_pb(await self._call("Register", registration_to_pb(registration)))
        if answer.max_message_bytes:
            await self._channel.send_up_to(answer.max_message_bytes)
        self._push_groups = answer.push_groups
        return answer

    async def heartbeat(self, beat: Heartbeat) -> tuple[Command, ...]:
        return commands_from_pb(await self._call("Heartbeat", heartbeat_to_pb(beat)))

    async def report_canary(self, report: CanaryReport) -> CanaryVerdict:
        request = to_message(run_pb2.ReportCanaryRequest, report)
        return to_value(CanaryVerdict, await self._call("ReportCanary", request))

    def pushing(
        self, service: Service, *, site: str, interval_s: float
    ) -> contextlib.AbstractAsyncContextManager[None]:
        kind = _METRICS[service]

        async def push(series: Sequence[Series]) -> bool:
            request = new_message(kind, site=site, series=list(series))
            return bool((await self._once(kind.DESCRIPTOR.name.removesuffix("Request"), request)).is_kept)

        return pushing(push, registry=registry_of(service), interval_s=interval_s, clock=self._clock)

    async def get_status(self) -> RunStatus:
        return status_from_pb(await self._call("GetStatus"))

    async def list_steps(self, *, after_step: int, limit: int) -> tuple[StepReport, ...]:
        answer = await self._call("ListSteps", after_step=after_step, limit=limit)
        return tuple(to_value(StepReport, report) for report in answer.reports)

    async def drain(self, *, reason: str, epoch: int | None = None) -> None:
        await self._call("Drain", reason=reason, epoch=epoch)

    async def rollback(self, *, to_version: int, request_id: str) -> int:
        return int((await self._call("Rollback", request_id=request_id, to_version=to_version)).head_version)

    async def list_restorable(self) -> tuple[int, ...]:
        return tuple((await self._call("ListRestorable")).versions)

    async def release_site(self, *, site: SiteId, reason: str, request_id: str = "") -> str:
        request_id = request_id or secrets.token_hex(8)
        return str((await self._call("ReleaseSite", site=site, reason=reason, request_id=request_id)).quarantine)

    async def list_samples(self, *, wanted: SampleFilter, page: SamplePage) -> SampleList:
        return list_from_pb(await self._call("ListSamples", list_request_to_pb(wanted, page)), page)

    async def get_sample(self, *, sample_id: int) -> Sample:
        return sample_from_pb(await self._call("GetSample", id=sample_id))

    async def push_evaluation(
        self, *, site: SiteId, incarnation: str, state_root: Digest, results: Sequence[PromptResult]
    ) -> int:
        request = new_message(
            evaluation_pb2.PushEvaluationRequest, site=site, incarnation=incarnation, state_root=state_root,
            results=[cut_texts(result, MAX_TEXT) for result in results],
        )  # fmt: skip
        await self._pace(self._up, "up", request.ByteSize())
        return int((await self._call("PushEvaluation", request, timeout_s=PUSH_TIMEOUT_S)).num_counted)

    async def list_evaluations(
        self, *, after_version: int = -1, limit: int = 1000, **asked: Any
    ) -> tuple[Evaluation, ...]:
        answer = await self._call("ListEvaluations", after_version=after_version, limit=limit, **asked)
        return tuple(evaluation_from_pb(message) for message in answer.evaluations)
