"""gRPC servicer of versions, payloads and the learner's lease."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from heterorl.common.errors import Busy, InvalidRequest
from heterorl.common.process.metrics import BYTES
from heterorl.common.types.common import digest_field
from heterorl.common.types.policy import PublishRequest
from heterorl.common.weights.payload import FRAME_BYTES
from heterorl.common.wire.common_messages import arguments, contract_from_pb, progress_from_pb, to_message, to_value
from heterorl.common.wire.policy_messages import frame_checksum, grant_to_pb, renewal_to_pb
from heterorl.coordinator.learner_lease import LearnerLease
from heterorl.coordinator.policy_column import PolicyColumn
from heterorl.v1 import policy_pb2 as pb
from heterorl.v1 import policy_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]


class PolicyServicer(policy_pb2_grpc.PolicyServiceServicer):
    """heterorl.v1.PolicyService."""

    def __init__(self, policy: PolicyColumn, lease: LearnerLease) -> None:
        self._policy = policy
        self._lease = lease

    async def AcquireLease(self, request: pb.AcquireLeaseRequest, context: Context) -> pb.AcquireLeaseResponse:
        stated = arguments(request, contract=contract_from_pb(request.contract))
        return grant_to_pb(await self._lease.acquire_lease(**stated))

    async def RenewLease(self, request: pb.RenewLeaseRequest, context: Context) -> pb.RenewLeaseResponse:
        progress = progress_from_pb(request.progress) if request.HasField("progress") else None
        grant = await self._lease.renew_lease(
            epoch=request.epoch, progress=progress, refused_rollback=request.refused_rollback
        )
        return renewal_to_pb(grant)

    async def ReleaseLease(self, request: pb.ReleaseLeaseRequest, context: Context) -> pb.ReleaseLeaseResponse:
        await self._lease.release_lease(epoch=request.epoch)
        return pb.ReleaseLeaseResponse()

    async def QueryUpload(self, request: pb.QueryUploadRequest, context: Context) -> pb.QueryUploadResponse:
        digest = digest_field("digest", request.digest)
        return pb.QueryUploadResponse(num_bytes=await self._policy.query_upload(digest=digest))

    async def UploadPayload(
        self, request_iterator: AsyncIterator[pb.UploadPayloadRequest], context: Context
    ) -> pb.UploadPayloadResponse:
        first = await anext(request_iterator, None)
        if first is None or first.WhichOneof("part") != "header":
            raise InvalidRequest("upload: the first message must be the header")

        async def frames() -> AsyncIterator[bytes]:
            async for message in request_iterator:
                # Each access of a bytes field copies it.
                frame = message.frame
                if message.WhichOneof("part") != "frame" or not 0 < len(frame) <= FRAME_BYTES:
                    raise InvalidRequest(f"upload: frames carry 1 to {FRAME_BYTES} bytes")
                if frame_checksum(frame) != message.checksum:
                    # A fault of the link; DigestMismatch would blame the sender.
                    raise Busy("upload: a frame was damaged on its way", action="ask QueryUpload", retry_after_s=1.0)
                BYTES.labels("weights", "in").inc(len(frame))
                yield frame

        num_bytes = await self._policy.upload_payload(
            epoch=first.header.epoch,
            digest=digest_field("header.digest", first.header.digest),
            num_bytes=first.header.num_bytes,
            offset=first.header.offset,
            frames=frames(),
        )
        return pb.UploadPayloadResponse(num_bytes=num_bytes)

    async def PublishVersion(self, request: pb.PublishVersionRequest, context: Context) -> pb.PublishVersionResponse:
        version = await self._policy.publish_version(to_value(PublishRequest, request))
        return pb.PublishVersionResponse(version=version)

    async def GetStep(self, request: pb.GetStepRequest, context: Context) -> pb.GetStepResponse:
        return pb.GetStepResponse(version=await self._policy.get_step(step_id=request.step_id))

    async def WatchHead(self, request: pb.WatchHeadRequest, context: Context) -> AsyncIterator[pb.WatchHeadResponse]:
        async for update in self._policy.watch_head(after_version=request.after_version):
            yield pb.WatchHeadResponse(version=update.version, age_s=update.age_s)

    async def GetManifest(self, request: pb.GetManifestRequest, context: Context) -> pb.GetManifestResponse:
        signed = await self._policy.get_signed_manifest(**arguments(request))
        return pb.GetManifestResponse(manifest=signed.data, signature=signed.signature)

    async def ListManifests(self, request: pb.ListManifestsRequest, context: Context) -> pb.ListManifestsResponse:
        return pb.ListManifestsResponse(manifests=await self._policy.list_manifests(**arguments(request)))

    async def PlanPull(self, request: pb.PlanPullRequest, context: Context) -> pb.PlanPullResponse:
        plan = await self._policy.plan_pull(**arguments(request))
        answer = to_message(pb.PlanPullResponse, plan)
        answer.urls.extend(await self._policy.payload_urls(plan))
        return answer

    async def ReadPayload(
        self, request: pb.ReadPayloadRequest, context: Context
    ) -> AsyncIterator[pb.ReadPayloadResponse]:
        wanted = arguments(request, digest=digest_field("digest", request.digest))
        async for frame in self._policy.read_payload(**wanted):
            BYTES.labels("weights", "out").inc(len(frame))
            yield pb.ReadPayloadResponse(frame=frame, checksum=frame_checksum(frame))
