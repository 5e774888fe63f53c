"""Messages <-> domain calls about work and groups. Decides nothing."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from heterorl.common.errors import InvalidRequest
from heterorl.common.process.metrics import BYTES
from heterorl.common.types.common import SiteId
from heterorl.common.types.rollout import DropReason
from heterorl.common.wire.rollout import (
    group_id_from_pb,
    leased_to_pb,
    outcomes_to_pb,
    reason_from_pb,
    rejections_from_pb,
    return_reason_from_pb,
    work_grant_to_pb,
)
from heterorl.coordinator import observe
from heterorl.coordinator.rollout import RolloutColumn
from heterorl.coordinator.servicers.push_stream import PushStreams
from heterorl.v1 import rollout_pb2, rollout_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]


class RolloutServicer(rollout_pb2_grpc.RolloutServiceServicer):
    """heterorl.v1.RolloutService."""

    def __init__(self, rollouts: RolloutColumn, *, max_prompt_tokens: int = 1 << 18) -> None:
        self._rollouts = rollouts
        self._pushes = PushStreams(rollouts, max_prompt_tokens=max_prompt_tokens)

    async def LeaseWork(self, request: rollout_pb2.LeaseWorkRequest, context: Context) -> rollout_pb2.LeaseWorkResponse:
        grant = await self._rollouts.lease_work(
            site=SiteId(request.site),
            incarnation=request.incarnation,
            max_groups=request.max_groups,
            policy_version=request.policy_version,
            request_id=request.request_id,
        )
        return work_grant_to_pb(grant)

    async def AbandonWork(
        self, request: rollout_pb2.AbandonWorkRequest, context: Context
    ) -> rollout_pb2.AbandonWorkResponse:
        await self._rollouts.abandon_work(
            site=SiteId(request.site),
            incarnation=request.incarnation,
            assignments=list(request.assignments),
            reason=return_reason_from_pb(request.reason),
        )
        return rollout_pb2.AbandonWorkResponse()

    async def PushGroups(
        self, request_iterator: AsyncIterator[Any], context: Context
    ) -> AsyncIterator[rollout_pb2.PushGroupsResponse]:
        # The door gives each message as its groups.
        async for outcomes in self._pushes.outcomes(request_iterator):
            for outcome in outcomes:
                observe.observe_push(outcome)
            yield outcomes_to_pb(outcomes)

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
            self._rollouts.stream_sealed(epoch=first.epoch, held=held, credits=credits())
        ) as stream:
            async for leased in stream:
                message = leased_to_pb(leased)
                BYTES.labels("groups", "out").inc(message.ByteSize())
                observe.observe_lease(leased)
                yield message

    async def AbandonGroups(
        self, request: rollout_pb2.AbandonGroupsRequest, context: Context
    ) -> rollout_pb2.AbandonGroupsResponse:
        ids = [group_id_from_pb(group_id) for group_id in request.ids]
        # Of learners that state none, and of accounts that this program does not know.
        counted_as = reason_from_pb(request.counted_as) or DropReason.LEARNER_ABANDONED
        await self._rollouts.abandon_groups(epoch=request.epoch, ids=ids, reason=request.reason, counted_as=counted_as)
        return rollout_pb2.AbandonGroupsResponse()

    async def RejectGroups(
        self, request: rollout_pb2.RejectGroupsRequest, context: Context
    ) -> rollout_pb2.RejectGroupsResponse:
        await self._rollouts.reject_groups(epoch=request.epoch, rejections=rejections_from_pb(request))
        return rollout_pb2.RejectGroupsResponse()
