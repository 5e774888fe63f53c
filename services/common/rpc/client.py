"""CoordinatorApi over gRPC: every call has a deadline, repeats with one key, and raises the peer's typed errors."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

import grpc.aio

from heterorl.common.api import PieceFrames
from heterorl.common.errors import Unreachable
from heterorl.common.process.metrics import BYTES
from heterorl.common.rpc.calls import once, readable, timed
from heterorl.common.rpc.direct import DirectWrites
from heterorl.common.rpc.roles import EvaluationCalls, LearnerCalls, WeightCalls
from heterorl.common.types.common import Digest, Series, SiteId, StepReport
from heterorl.common.types.evaluation import EvaluationSet
from heterorl.common.types.policy import PublishRequest, PutPlace
from heterorl.common.types.rollout import Group, GroupId, PushOutcome, QueuedGroup, ReturnReason, SealedGroup, WorkGrant
from heterorl.common.types.run import (
    CanaryReport,
    CanaryVerdict,
    Command,
    Heartbeat,
    RegisterAnswer,
    Registration,
    RunStatus,
)
from heterorl.common.types.sample import Sample, SampleFilter, SampleList, SamplePage
from heterorl.common.wire.common import report_from_pb, series_to_pb
from heterorl.common.wire.evaluation import sets_to_pb
from heterorl.common.wire.policy import frame_checksum, publish_to_pb
from heterorl.common.wire.rollout import (
    group_id_to_pb,
    outcomes_from_pb,
    pushes_to_pb,
    queued_from_pb,
    return_reason_to_pb,
    work_grant_from_pb,
)
from heterorl.common.wire.run import (
    canary_to_pb,
    commands_from_pb,
    heartbeat_to_pb,
    register_answer_from_pb,
    registration_to_pb,
    status_from_pb,
    verdict_from_pb,
)
from heterorl.common.wire.sample import list_from_pb, list_request_to_pb, sample_from_pb
from heterorl.common.wire.seal import sealed
from heterorl.v1 import metrics_pb2, policy_pb2, rollout_pb2, run_pb2, sample_pb2

PUSH_TIMEOUT_S = 120.0
"""For a push of nothing; its bytes come on top."""
ASSIGNMENTS_AT_ONCE = 4096
"""The coordinator takes no more in one call."""
MIN_UP_BYTES_PER_S = 4096.0
"""The slowest link over which a push ends before its deadline; a dead one is noticed by its pings in seconds."""


class CoordinatorClient(WeightCalls, EvaluationCalls, LearnerCalls):
    """A coordinator at an address; implements heterorl.common.api.CoordinatorApi. Plaintext only if `tls` says so.

    Streams (watch_head, read_payload, stream_groups, upload_payload) are not repeated here: their callers hold the
    cursor. They raise Unreachable when the link breaks.
    """

    def __init__(self, address: str, **how: Any) -> None:
        super().__init__(address, **how)
        # Groups in one message, as the coordinator said when this node registered.
        self._push_groups = 1
        self._writes = DirectWrites(self._connections)

    async def query_upload(self, *, digest: Digest) -> int:
        """Ask how many bytes of a payload are durable."""
        request = policy_pb2.QueryUploadRequest(digest=digest)
        return int((await self._call("QueryUpload", request)).num_bytes)

    async def upload_payload(
        self, *, epoch: int, digest: Digest, num_bytes: int, offset: int, frames: AsyncIterator[bytes]
    ) -> int:
        """Append frames to a payload; after Unreachable ask `query_upload` and go on from there."""

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
            async with self._link.stubs() as stubs:
                with timed("UploadPayload"):
                    return int((await stubs.method("UploadPayload")(requests)).num_bytes)

        return await once("UploadPayload", attempt)

    async def put_payload(self, *, epoch: int, digest: Digest, num_bytes: int, frames: PieceFrames) -> bool:
        """Put a payload piece by piece at the addresses that the coordinator gives for them."""
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
        """Have the coordinator take what was put."""

        async def requests() -> AsyncIterator[policy_pb2.UploadPayloadRequest]:
            header = policy_pb2.UploadHeader(epoch=epoch, digest=digest, num_bytes=num_bytes, is_put=True)
            yield policy_pb2.UploadPayloadRequest(header=header)

        return await self._upload(requests())

    async def publish_version(self, request: PublishRequest) -> int:
        """Commit one version; the step id makes a repetition harmless."""
        message = publish_to_pb(request)
        return int((await self._call("PublishVersion", message)).version)

    async def get_step(self, *, step_id: str) -> int | None:
        """Ask what a step id became."""
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
        """Ask for prompt groups, or with sets for held-out prompts; the request id makes a repetition harmless."""
        request = rollout_pb2.LeaseWorkRequest(
            site=site,
            incarnation=incarnation,
            max_groups=max_groups,
            policy_version=policy_version,
            request_id=request_id or secrets.token_hex(8),
            sets=sets_to_pb(sets),
        )
        return work_grant_from_pb(await self._call("LeaseWork", request))

    async def abandon_work(
        self, *, site: SiteId, incarnation: str, assignments: Sequence[int], reason: ReturnReason | None = None
    ) -> None:
        """Give assignments back."""
        for first in range(0, len(assignments), ASSIGNMENTS_AT_ONCE):
            some = assignments[first : first + ASSIGNMENTS_AT_ONCE]
            request = rollout_pb2.AbandonWorkRequest(
                site=site, incarnation=incarnation, assignments=list(some), reason=return_reason_to_pb(reason)
            )
            await self._call("AbandonWork", request)

    async def push_groups(self, groups: Sequence[Group | SealedGroup]) -> list[PushOutcome]:
        """Push groups and return outcomes of the first ones, in order; repeating the call is harmless.

        Fewer than were pushed came before the link broke: what is settled is settled, whatever became of the rest.
        """
        pushed = pushes_to_pb(
            [sealed(group) for group in groups], limit_bytes=self._link.send_bytes, limit_groups=self._push_groups
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
                async with self._link.stubs() as stubs:
                    with timed("PushGroups"):
                        async for message in stubs.method("PushGroups")(requests(), timeout=timeout_s):
                            for outcome in outcomes_from_pb(readable("PushGroups", message)):
                                # One for each group; what a peer sends beyond that, or of others, is not kept.
                                if len(outcomes) < len(groups) and is_in_order:
                                    is_in_order = outcome.id == groups[len(outcomes)].id
                                    outcomes += [outcome] * is_in_order
            except (grpc.aio.AioRpcError, Unreachable):
                if not outcomes:
                    raise
            if not outcomes and pushed:
                raise Unreachable(f"PushGroups: no outcome for the first of {len(groups)} groups", retry_after_s=1.0)
            return outcomes

        return await self._insist(attempt, name="PushGroups")

    def _push_timeout_s(self, num_bytes: int) -> float:
        # Twice over the cap: others may have taken from it just before.
        capped_s = 2 * num_bytes / self._up.bytes_per_s if self._up.bytes_per_s else 0.0
        return PUSH_TIMEOUT_S + num_bytes / MIN_UP_BYTES_PER_S + capped_s

    async def stream_groups(
        self, *, epoch: int, held: Sequence[GroupId], credits: AsyncIterator[int]
    ) -> AsyncIterator[QueuedGroup]:
        """Yield leased groups, one per credit, until the link breaks."""

        async def requests() -> AsyncIterator[rollout_pb2.StreamGroupsRequest]:
            yield rollout_pb2.StreamGroupsRequest(epoch=epoch, held=[group_id_to_pb(group_id) for group_id in held])
            async for credit in credits:
                yield rollout_pb2.StreamGroupsRequest(epoch=epoch, credits=credit)

        async for message in self._streamed("StreamGroups", requests()):
            BYTES.labels("groups", "in").inc(message.ByteSize())
            yield queued_from_pb(message)

    async def register(self, registration: Registration) -> RegisterAnswer:
        """Introduce a sampler."""
        request = registration_to_pb(registration)
        answer = register_answer_from_pb(await self._call("Register", request))
        if answer.max_message_bytes:
            await self._link.send_up_to(answer.max_message_bytes)
        self._push_groups = answer.push_groups
        return answer

    async def heartbeat(self, beat: Heartbeat) -> tuple[Command, ...]:
        """Report a sampler's state and receive commands."""
        request = heartbeat_to_pb(beat)
        return commands_from_pb(await self._call("Heartbeat", request))

    async def report_canary(self, report: CanaryReport) -> CanaryVerdict:
        """Report a sampler's log-probs of the canary."""
        return verdict_from_pb(await self._call("ReportCanary", canary_to_pb(report)))

    async def push_sampler_metrics(self, *, site: SiteId, series: Sequence[Series]) -> bool:
        """Hand out this sampler's numbers, once; returns whether the coordinator keeps them."""
        request = metrics_pb2.PushSamplerMetricsRequest(site=site, series=series_to_pb(series))
        return bool((await self._once("PushSamplerMetrics", request)).is_kept)

    async def get_status(self) -> RunStatus:
        """Ask for the state of the run."""
        return status_from_pb(await self._call("GetStatus", run_pb2.GetStatusRequest()))

    async def list_steps(self, *, after_step: int, limit: int) -> tuple[StepReport, ...]:
        """Ask for step reports after a cursor."""
        request = run_pb2.ListStepsRequest(after_step=after_step, limit=limit)
        answer = await self._call("ListSteps", request)
        return tuple(report_from_pb(report) for report in answer.reports)

    async def drain(self, *, reason: str, epoch: int | None = None) -> None:
        """Ask the run to finish what is held and stop."""
        await self._call("Drain", run_pb2.DrainRequest(reason=reason, epoch=epoch))

    async def rollback(self, *, to_version: int, request_id: str) -> int:
        """Order the learner to go back to the content of a version."""
        request = run_pb2.RollbackRequest(request_id=request_id, to_version=to_version)
        return int((await self._call("Rollback", request)).head_version)

    async def list_restorable(self) -> tuple[int, ...]:
        """Ask for the versions that one can go back to."""
        return tuple((await self._call("ListRestorable", run_pb2.ListRestorableRequest())).versions)

    async def release_site(self, *, site: SiteId, reason: str, request_id: str = "") -> str:
        """End a site's quarantine; the request id makes a repetition harmless."""
        request = run_pb2.ReleaseSiteRequest(site=site, reason=reason, request_id=request_id or secrets.token_hex(8))
        return str((await self._call("ReleaseSite", request)).quarantine)

    async def list_samples(self, *, wanted: SampleFilter, page: SamplePage) -> SampleList:
        """Ask for a page of kept samples."""
        return list_from_pb(await self._call("ListSamples", list_request_to_pb(wanted, page)), page)

    async def get_sample(self, *, sample_id: int) -> Sample:
        """Ask for one sample with its texts."""
        return sample_from_pb(await self._call("GetSample", sample_pb2.GetSampleRequest(id=sample_id)))
