"""Messages <-> domain calls of the coordinator. Decides nothing; typed errors pass through to the interceptor."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from heterorl.common.api import CoordinatorApi
from heterorl.common.errors import DigestMismatch, InvalidRequest
from heterorl.common.process.metrics import BYTES
from heterorl.common.rpc.options import FRAME_BYTES
from heterorl.common.types.facts import parse_facts
from heterorl.common.types.values import SiteId
from heterorl.common.wire import canary, leases, messages
from heterorl.common.wire.contract import contract_from_pb
from heterorl.common.wire.groups import group_id_from_pb
from heterorl.common.wire.publication import publish_from_pb
from heterorl.common.wire.rejections import rejections_from_pb
from heterorl.common.wire.run_status import status_to_pb
from heterorl.coordinator import observe
from heterorl.coordinator.servicers.push_stream import PushStreams, Taker
from heterorl.v1 import policy_pb2, policy_pb2_grpc, rollout_pb2, rollout_pb2_grpc, run_pb2, run_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]


class PolicyServicer(policy_pb2_grpc.PolicyServiceServicer):
    """heterorl.v1.PolicyService."""

    def __init__(self, api: CoordinatorApi) -> None:
        self._api = api

    async def AcquireLease(
        self, request: policy_pb2.AcquireLeaseRequest, context: Context
    ) -> policy_pb2.AcquireLeaseResponse:
        grant = await self._api.acquire_lease(
            holder=request.holder,
            contract=contract_from_pb(request.contract),
            request_id=request.request_id,
            flavours=tuple(request.flavours),
            incarnation=request.incarnation,
            groups_per_version=request.groups_per_version,
        )
        return leases.grant_to_pb(grant)

    async def RenewLease(
        self, request: policy_pb2.RenewLeaseRequest, context: Context
    ) -> policy_pb2.RenewLeaseResponse:
        grant = await self._api.renew_lease(epoch=request.epoch)
        return leases.renewal_to_pb(grant)

    async def ReleaseLease(
        self, request: policy_pb2.ReleaseLeaseRequest, context: Context
    ) -> policy_pb2.ReleaseLeaseResponse:
        await self._api.release_lease(epoch=request.epoch)
        return policy_pb2.ReleaseLeaseResponse()

    async def QueryUpload(
        self, request: policy_pb2.QueryUploadRequest, context: Context
    ) -> policy_pb2.QueryUploadResponse:
        digest = messages.digest_field("digest", request.digest)
        return policy_pb2.QueryUploadResponse(num_bytes=await self._api.query_upload(digest=digest))

    async def UploadPayload(
        self, request_iterator: AsyncIterator[policy_pb2.UploadPayloadRequest], context: Context
    ) -> policy_pb2.UploadPayloadResponse:
        first = await anext(request_iterator, None)
        if first is None or first.WhichOneof("part") != "header":
            raise InvalidRequest("upload: the first message must be the header")

        async def frames() -> AsyncIterator[bytes]:
            async for message in request_iterator:
                # Once: each access of a bytes field copies it.
                frame = message.frame
                if message.WhichOneof("part") != "frame" or not 0 < len(frame) <= FRAME_BYTES:
                    raise InvalidRequest(f"upload: frames carry 1 to {FRAME_BYTES} bytes")
                if messages.frame_checksum(frame) != message.checksum:
                    raise DigestMismatch("upload: a frame was damaged on its way", action="ask QueryUpload")
                BYTES.labels("weights", "in").inc(len(frame))
                yield frame

        num_bytes = await self._api.upload_payload(
            epoch=first.header.epoch,
            digest=messages.digest_field("header.digest", first.header.digest),
            num_bytes=first.header.num_bytes,
            offset=first.header.offset,
            frames=frames(),
        )
        return policy_pb2.UploadPayloadResponse(num_bytes=num_bytes)

    async def PublishVersion(
        self, request: policy_pb2.PublishVersionRequest, context: Context
    ) -> policy_pb2.PublishVersionResponse:
        version = await self._api.publish_version(publish_from_pb(request))
        return policy_pb2.PublishVersionResponse(version=version)

    async def GetStep(self, request: policy_pb2.GetStepRequest, context: Context) -> policy_pb2.GetStepResponse:
        return policy_pb2.GetStepResponse(version=await self._api.get_step(step_id=request.step_id))

    async def WatchHead(
        self, request: policy_pb2.WatchHeadRequest, context: Context
    ) -> AsyncIterator[policy_pb2.WatchHeadResponse]:
        async for update in self._api.watch_head(after_version=request.after_version):
            yield policy_pb2.WatchHeadResponse(version=update.version, age_s=update.age_s)

    async def GetManifest(
        self, request: policy_pb2.GetManifestRequest, context: Context
    ) -> policy_pb2.GetManifestResponse:
        signed = await self._api.get_signed_manifest(version=request.version, flavour=request.flavour)
        return policy_pb2.GetManifestResponse(manifest=signed.data, signature=signed.signature)

    async def ListManifests(
        self, request: policy_pb2.ListManifestsRequest, context: Context
    ) -> policy_pb2.ListManifestsResponse:
        found = await self._api.list_manifests(
            first_version=request.first_version, last_version=request.last_version, flavour=request.flavour
        )
        return policy_pb2.ListManifestsResponse(manifests=found)

    async def PlanPull(self, request: policy_pb2.PlanPullRequest, context: Context) -> policy_pb2.PlanPullResponse:
        plan = await self._api.plan_pull(
            have_version=request.have_version,
            have_root=request.have_root,
            want_version=request.want_version,
            accept_merged=request.accept_merged,
            base_root=request.base_root,
            object_bytes=request.object_bytes,
            flavour=request.flavour,
        )
        return messages.plan_to_pb(plan)

    async def ReadPayload(
        self, request: policy_pb2.ReadPayloadRequest, context: Context
    ) -> AsyncIterator[policy_pb2.ReadPayloadResponse]:
        digest = messages.digest_field("digest", request.digest)
        stop = request.stop if request.HasField("stop") else None
        async for frame in self._api.read_payload(digest=digest, offset=request.offset, stop=stop):
            BYTES.labels("weights", "out").inc(len(frame))
            yield policy_pb2.ReadPayloadResponse(frame=frame, checksum=messages.frame_checksum(frame))


class RolloutServicer(rollout_pb2_grpc.RolloutServiceServicer):
    """heterorl.v1.RolloutService."""

    def __init__(self, api: Taker, *, max_prompt_tokens: int = 1 << 18) -> None:
        self._api = api
        self._pushes = PushStreams(api, max_prompt_tokens=max_prompt_tokens)

    async def LeaseWork(self, request: rollout_pb2.LeaseWorkRequest, context: Context) -> rollout_pb2.LeaseWorkResponse:
        grant = await self._api.lease_work(
            site=SiteId(request.site),
            incarnation=request.incarnation,
            max_groups=request.max_groups,
            policy_version=request.policy_version,
            request_id=request.request_id,
        )
        return messages.work_grant_to_pb(grant)

    async def AbandonWork(
        self, request: rollout_pb2.AbandonWorkRequest, context: Context
    ) -> rollout_pb2.AbandonWorkResponse:
        await self._api.abandon_work(
            site=SiteId(request.site), incarnation=request.incarnation, assignments=list(request.assignments)
        )
        return rollout_pb2.AbandonWorkResponse()

    async def PushGroups(
        self, request_iterator: AsyncIterator[rollout_pb2.PushGroupsRequest], context: Context
    ) -> AsyncIterator[rollout_pb2.PushGroupsResponse]:
        async for outcome in self._pushes.outcomes(request_iterator):
            observe.observe_push(outcome)
            yield messages.outcome_to_pb(outcome)

    async def StreamGroups(
        self, request_iterator: AsyncIterator[rollout_pb2.StreamGroupsRequest], context: Context
    ) -> AsyncIterator[rollout_pb2.StreamGroupsResponse]:
        first = await anext(request_iterator, None)
        if first is None:
            raise InvalidRequest("stream: the first message must state the epoch")

        async def credits() -> AsyncIterator[int]:
            if first.credits:
                yield first.credits
            async for message in request_iterator:
                yield message.credits

        held = [group_id_from_pb(group_id) for group_id in first.held]
        # Closed at once when the call ends, so that what was leased and not sent goes back now.
        async with contextlib.aclosing(
            self._api.stream_groups(epoch=first.epoch, held=held, credits=credits())  # type: ignore[type-var]
        ) as stream:
            async for queued in stream:
                message = messages.queued_to_pb(queued)
                BYTES.labels("groups", "out").inc(message.ByteSize())
                observe.observe_lease(queued)
                yield message

    async def AbandonGroups(
        self, request: rollout_pb2.AbandonGroupsRequest, context: Context
    ) -> rollout_pb2.AbandonGroupsResponse:
        ids = [group_id_from_pb(group_id) for group_id in request.ids]
        await self._api.abandon_groups(epoch=request.epoch, ids=ids, reason=request.reason)
        return rollout_pb2.AbandonGroupsResponse()

    async def RejectGroups(
        self, request: rollout_pb2.RejectGroupsRequest, context: Context
    ) -> rollout_pb2.RejectGroupsResponse:
        await self._api.reject_groups(epoch=request.epoch, rejections=rejections_from_pb(request))
        return rollout_pb2.RejectGroupsResponse()


class RunServicer(run_pb2_grpc.RunServiceServicer):
    """heterorl.v1.RunService."""

    def __init__(self, api: CoordinatorApi) -> None:
        self._api = api

    async def Register(self, request: run_pb2.RegisterRequest, context: Context) -> run_pb2.RegisterResponse:
        return messages.register_answer_to_pb(await self._api.register(messages.registration_from_pb(request)))

    async def Heartbeat(self, request: run_pb2.HeartbeatRequest, context: Context) -> run_pb2.HeartbeatResponse:
        return messages.commands_to_pb(await self._api.heartbeat(messages.heartbeat_from_pb(request)))

    async def ReportCanary(
        self, request: run_pb2.ReportCanaryRequest, context: Context
    ) -> run_pb2.ReportCanaryResponse:
        return canary.verdict_to_pb(await self._api.report_canary(canary.canary_from_pb(request)))

    async def GetStatus(self, request: run_pb2.GetStatusRequest, context: Context) -> run_pb2.GetStatusResponse:
        return status_to_pb(await self._api.get_status())

    async def ListSteps(self, request: run_pb2.ListStepsRequest, context: Context) -> run_pb2.ListStepsResponse:
        reports = await self._api.list_steps(after_step=request.after_step, limit=request.limit)
        return run_pb2.ListStepsResponse(reports=[messages.report_to_pb(report) for report in reports])

    async def Drain(self, request: run_pb2.DrainRequest, context: Context) -> run_pb2.DrainResponse:
        await self._api.drain(reason=request.reason, epoch=request.epoch if request.HasField("epoch") else None)
        return run_pb2.DrainResponse()

    async def Rollback(self, request: run_pb2.RollbackRequest, context: Context) -> run_pb2.RollbackResponse:
        head = await self._api.rollback(to_version=request.to_version, request_id=request.request_id)
        return run_pb2.RollbackResponse(head_version=head)

    async def ReleaseSite(self, request: run_pb2.ReleaseSiteRequest, context: Context) -> run_pb2.ReleaseSiteResponse:
        quarantine = await self._api.release_site(
            site=SiteId(request.site), reason=request.reason, request_id=request.request_id
        )
        return run_pb2.ReleaseSiteResponse(quarantine=quarantine)

    async def DescribeRun(self, request: run_pb2.DescribeRunRequest, context: Context) -> run_pb2.DescribeRunResponse:
        await self._api.describe_run(epoch=request.epoch, facts=parse_facts(request.facts))
        return run_pb2.DescribeRunResponse()
