"""CoordinatorApi over gRPC: every call has a deadline, repeats with one key, and raises the peer's typed errors."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any, TypeVar

import grpc.aio
from heterorl.v1 import policy_pb2, policy_pb2_grpc, rollout_pb2, rollout_pb2_grpc, run_pb2, run_pb2_grpc

from services.common.api import Command, HeadUpdate, Heartbeat, PullPlan, RegisterAnswer, Registration, WorkGrant
from services.common.clock import Clock, SystemClock
from services.common.errors import HeterorlError, Unreachable
from services.common.metrics import RPC_CLIENT_SECONDS
from services.common.rpc import messages, retry
from services.common.rpc.options import link_options
from services.common.rpc.retry import RetryPolicy
from services.common.rpc.run_status import status_from_pb
from services.common.rpc.status import from_rpc_error, reason_of
from services.common.types import (
    Contract,
    Digest,
    Group,
    GroupId,
    LeaseGrant,
    PublishRequest,
    PushOutcome,
    QueuedGroup,
    RunStatus,
    SiteId,
    StepReport,
)
from services.common.wire import contract_to_pb, group_from_pb, group_id_to_pb, group_to_pb

ResultT = TypeVar("ResultT")
CALL_TIMEOUT_S = 20.0
PUSH_TIMEOUT_S = 120.0


class CoordinatorClient:
    """A coordinator at an address; implements services.common.api.CoordinatorApi.

    Streams (watch_head, read_payload, stream_groups, upload_payload) are not repeated here: their callers hold the
    cursor. They raise Unreachable when the link breaks.
    """

    def __init__(
        self,
        address: str,
        *,
        max_message_bytes: int = 16 << 20,
        policy: RetryPolicy | None = None,
        clock: Clock | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=link_options(max_message_bytes))
        # The generated stub classes carry no types for grpc.aio; their methods are typed at our own border below.
        self._policy_stub: Any = policy_pb2_grpc.PolicyServiceStub(self._channel)
        self._rollouts: Any = rollout_pb2_grpc.RolloutServiceStub(self._channel)
        self._run: Any = run_pb2_grpc.RunServiceStub(self._channel)
        self._retry = policy or RetryPolicy()
        self._clock = clock or SystemClock()
        self._rng = rng or random.Random()

    async def close(self) -> None:
        """Close the channel; calls under way are cancelled."""
        await self._channel.close()

    async def __aenter__(self) -> CoordinatorClient:
        """Use as a context."""
        return self

    async def __aexit__(self, *exception: object) -> None:
        """Close on leaving."""
        await self.close()

    async def _call(self, name: str, method: Any, request: Any, *, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        async def attempt() -> Any:
            with _timed(name):
                return await method(request, timeout=timeout_s)

        return await retry.call(attempt, name=name, policy=self._retry, clock=self._clock, rng=self._rng)

    async def acquire_lease(self, *, holder: str, contract: Contract, request_id: str) -> LeaseGrant:
        """Become the run's learner under a new epoch."""
        request = policy_pb2.AcquireLeaseRequest(
            request_id=request_id, holder=holder, contract=contract_to_pb(contract)
        )
        return messages.grant_from_pb(await self._call("AcquireLease", self._policy_stub.AcquireLease, request))

    async def renew_lease(self, *, epoch: int) -> LeaseGrant:
        """Extend the lease."""
        request = policy_pb2.RenewLeaseRequest(epoch=epoch)
        return messages.grant_from_pb(await self._call("RenewLease", self._policy_stub.RenewLease, request))

    async def release_lease(self, *, epoch: int) -> None:
        """End the lease."""
        await self._call("ReleaseLease", self._policy_stub.ReleaseLease, policy_pb2.ReleaseLeaseRequest(epoch=epoch))

    async def query_upload(self, *, digest: Digest) -> int:
        """Ask how many bytes of a payload are durable."""
        request = policy_pb2.QueryUploadRequest(digest=digest)
        return int((await self._call("QueryUpload", self._policy_stub.QueryUpload, request)).num_bytes)

    async def upload_payload(
        self, *, epoch: int, digest: Digest, num_bytes: int, offset: int, frames: AsyncIterator[bytes]
    ) -> int:
        """Append frames to a payload; after Unreachable ask `query_upload` and go on from there."""

        async def requests() -> AsyncIterator[policy_pb2.UploadPayloadRequest]:
            yield policy_pb2.UploadPayloadRequest(
                header=policy_pb2.UploadHeader(epoch=epoch, digest=digest, num_bytes=num_bytes, offset=offset)
            )
            async for frame in frames:
                yield policy_pb2.UploadPayloadRequest(frame=frame)

        async def attempt() -> int:
            with _timed("UploadPayload"):
                return int((await self._policy_stub.UploadPayload(requests())).num_bytes)

        return await _once("UploadPayload", attempt)

    async def publish_version(self, request: PublishRequest) -> int:
        """Commit one version; the step id makes a repetition harmless."""
        message = messages.publish_to_pb(request)
        return int((await self._call("PublishVersion", self._policy_stub.PublishVersion, message)).version)

    async def get_step(self, *, step_id: str) -> int | None:
        """Ask what a step id became."""
        request = policy_pb2.GetStepRequest(step_id=step_id)
        answer = await self._call("GetStep", self._policy_stub.GetStep, request)
        return int(answer.version) if answer.HasField("version") else None

    async def watch_head(self, *, after_version: int) -> AsyncIterator[HeadUpdate]:
        """Yield new heads until the link breaks."""
        call = self._policy_stub.WatchHead(policy_pb2.WatchHeadRequest(after_version=after_version))
        async for message in _streamed("WatchHead", call):
            yield HeadUpdate(version=message.version, age_s=message.age_s)

    async def get_manifest(self, *, version: int) -> bytes:
        """Fetch the exact bytes of a manifest."""
        request = policy_pb2.GetManifestRequest(version=version)
        return bytes((await self._call("GetManifest", self._policy_stub.GetManifest, request)).manifest)

    async def plan_pull(
        self,
        *,
        have_version: int,
        have_root: str,
        want_version: int,
        accept_merged: bool = False,
        base_root: str = "",
        object_bytes: int = 0,
    ) -> PullPlan:
        """Ask for the cheapest way to a version."""
        request = policy_pb2.PlanPullRequest(
            have_version=have_version,
            have_root=have_root,
            want_version=want_version,
            accept_merged=accept_merged,
            base_root=base_root,
            object_bytes=object_bytes,
        )
        return messages.plan_from_pb(await self._call("PlanPull", self._policy_stub.PlanPull, request))

    async def read_payload(self, *, digest: Digest, offset: int) -> AsyncIterator[bytes]:
        """Yield frames of a payload until its end; after Unreachable go on from the bytes received."""
        call = self._policy_stub.ReadPayload(policy_pb2.ReadPayloadRequest(digest=digest, offset=offset))
        async for message in _streamed("ReadPayload", call):
            yield message.frame

    async def lease_work(self, *, site: SiteId, incarnation: str, max_groups: int, policy_version: int) -> WorkGrant:
        """Ask for prompt groups."""
        request = rollout_pb2.LeaseWorkRequest(
            site=site, incarnation=incarnation, max_groups=max_groups, policy_version=policy_version
        )
        return messages.work_grant_from_pb(await self._call("LeaseWork", self._rollouts.LeaseWork, request))

    async def abandon_work(self, *, site: SiteId, incarnation: str, assignments: Sequence[int]) -> None:
        """Give assignments back."""
        request = rollout_pb2.AbandonWorkRequest(site=site, incarnation=incarnation, assignments=list(assignments))
        await self._call("AbandonWork", self._rollouts.AbandonWork, request)

    async def push_groups(self, groups: Sequence[Group]) -> list[PushOutcome]:
        """Push groups and return one outcome each, in order; repeating the call is harmless."""

        async def attempt() -> list[PushOutcome]:
            async def requests() -> AsyncIterator[rollout_pb2.PushGroupsRequest]:
                for group in groups:
                    yield rollout_pb2.PushGroupsRequest(group=group_to_pb(group))

            with _timed("PushGroups"):
                call = self._rollouts.PushGroups(requests(), timeout=PUSH_TIMEOUT_S)
                outcomes = [messages.outcome_from_pb(message) async for message in call]
            if len(outcomes) != len(groups):
                raise Unreachable(f"PushGroups: {len(outcomes)} outcomes for {len(groups)} groups", retry_after_s=1.0)
            return outcomes

        return await retry.call(attempt, name="PushGroups", policy=self._retry, clock=self._clock, rng=self._rng)

    async def stream_groups(
        self, *, epoch: int, held: Sequence[GroupId], credits: AsyncIterator[int]
    ) -> AsyncIterator[QueuedGroup]:
        """Yield leased groups, one per credit, until the link breaks."""

        async def requests() -> AsyncIterator[rollout_pb2.StreamGroupsRequest]:
            yield rollout_pb2.StreamGroupsRequest(epoch=epoch, held=[group_id_to_pb(group_id) for group_id in held])
            async for credit in credits:
                yield rollout_pb2.StreamGroupsRequest(epoch=epoch, credits=credit)

        async for message in _streamed("StreamGroups", self._rollouts.StreamGroups(requests())):
            yield QueuedGroup(
                group=group_from_pb(message.group),
                policy_age_s=message.policy_age_s,
                queue_age_s=message.queue_age_s,
            )

    async def abandon_groups(self, *, epoch: int, ids: Sequence[GroupId], reason: str) -> None:
        """Drop leased groups for good."""
        request = rollout_pb2.AbandonGroupsRequest(
            epoch=epoch, ids=[group_id_to_pb(group_id) for group_id in ids], reason=reason
        )
        await self._call("AbandonGroups", self._rollouts.AbandonGroups, request)

    async def register(self, registration: Registration) -> RegisterAnswer:
        """Introduce a sampler."""
        request = messages.registration_to_pb(registration)
        return messages.register_answer_from_pb(await self._call("Register", self._run.Register, request))

    async def heartbeat(self, beat: Heartbeat) -> tuple[Command, ...]:
        """Report a sampler's state and receive commands."""
        request = messages.heartbeat_to_pb(beat)
        return messages.commands_from_pb(await self._call("Heartbeat", self._run.Heartbeat, request))

    async def get_status(self) -> RunStatus:
        """Ask for the state of the run."""
        return status_from_pb(await self._call("GetStatus", self._run.GetStatus, run_pb2.GetStatusRequest()))

    async def list_steps(self, *, after_step: int, limit: int) -> tuple[StepReport, ...]:
        """Ask for step reports after a cursor."""
        request = run_pb2.ListStepsRequest(after_step=after_step, limit=limit)
        answer = await self._call("ListSteps", self._run.ListSteps, request)
        return tuple(messages.report_from_pb(report) for report in answer.reports)

    async def drain(self, *, reason: str) -> None:
        """Ask the run to finish what is held and stop."""
        await self._call("Drain", self._run.Drain, run_pb2.DrainRequest(reason=reason))


async def _once(name: str, attempt: Callable[[], Awaitable[ResultT]]) -> ResultT:
    try:
        return await attempt()
    except grpc.aio.AioRpcError as error:
        raise _typed(name, error) from error


async def _streamed(name: str, call: Any) -> AsyncIterator[Any]:
    try:
        with _timed(name):
            async for message in call:
                yield message
    except grpc.aio.AioRpcError as error:
        raise _typed(name, error) from error
    finally:
        call.cancel()


def _typed(name: str, error: grpc.aio.AioRpcError) -> HeterorlError:
    return from_rpc_error(error) or Unreachable(f"{name}: {error.code().name}: {error.details()}", retry_after_s=1.0)


@contextlib.contextmanager
def _timed(name: str) -> Iterator[None]:
    started = time.perf_counter()
    code = "OK"
    try:
        yield
    except grpc.aio.AioRpcError as error:
        typed = from_rpc_error(error)
        code = reason_of(typed) if typed is not None else error.code().name
        raise
    finally:
        RPC_CLIENT_SECONDS.labels(name, code).observe(time.perf_counter() - started)
