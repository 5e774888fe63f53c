"""gRPC servicers of assignments, groups and evaluations, and the pipeline of pushes.

    read      waits for messages of one call, bounded by their room; unblocked by the peer, or the call's end
    submit    waits for messages, then for room among its certificate's commits; unblocked by either loop next to it,
              or by the store
    outcomes  waits for a commit, in order; unblocked by the store; ends with the reader

While some groups of a call wait for their fsync, the next ones are examined and queued for the same commit.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from itertools import chain, islice
from typing import Any
from weakref import WeakValueDictionary

import grpc.aio

from heterorl.common.errors import InvalidRequest, NotRegistered
from heterorl.common.process.metrics import BYTES
from heterorl.common.process.threads import in_thread
from heterorl.common.rpc.server_limits import Caller
from heterorl.common.types.common import Contract
from heterorl.common.types.evaluation import EvaluationSet
from heterorl.common.types.rollout import DropReason, PushOutcome, Rejection
from heterorl.common.wire.common_messages import arguments, group_id_from_pb, new_message, to_message, to_value
from heterorl.common.wire.rollout_messages import (
    REASON_OF,
    RETURN_REASON_OF,
    evaluation_to_pb,
    leased_to_pb,
    results_from_pb,
)
from heterorl.coordinator import run_metrics
from heterorl.coordinator.evaluation_column import EvaluationColumn
from heterorl.coordinator.groups.intake import Arrival, examined
from heterorl.coordinator.rollout_column import RolloutColumn
from heterorl.coordinator.rpc.bounds import PUSH_GROUPS
from heterorl.coordinator.rpc.call_admission import INLINE_BYTES, Requests
from heterorl.v1 import evaluation_pb2, evaluation_pb2_grpc, rollout_pb2_grpc
from heterorl.v1 import rollout_pb2 as pb

READ_AHEAD = 16
BATCH_BYTES = 4 << 20
"""Bytes that share a commit, besides PUSH_GROUPS; a larger message has its own commit."""
COMMITS = 3
"""Commits of one certificate that wait for the store. The learner's renewal may wait behind them."""
Pushed = Sequence[pb.Group]
_Sized = tuple[Pushed, int]
_Answers = asyncio.Future[list[PushOutcome]]
_Commit = tuple[list[int], _Answers]
"""Groups of each message, and the future outcomes of all."""


class PushStreams:
    """The push streams of one coordinator."""

    def __init__(self, api: RolloutColumn, *, max_prompt_tokens: int) -> None:
        self._api = api
        self._max_prompt_tokens = max_prompt_tokens
        # The run's contract never changes.
        self._contract: Contract | None = None
        self._converting = asyncio.Semaphore(1)
        self._commits: WeakValueDictionary[Caller, asyncio.Semaphore] = WeakValueDictionary()

    async def outcomes(self, requests: Requests) -> AsyncIterator[Sequence[PushOutcome]]:
        """The outcomes of each message's groups, in order.
        Raises RemoteError: a message was refused, after the answers to those before it."""
        # Messages keep their room until their groups are in the store.
        requests.settle_by_hand()
        commits = self._commits.setdefault(requests.holder, asyncio.Semaphore(COMMITS))
        arrived: asyncio.Queue[_Sized | None] = asyncio.Queue(READ_AHEAD)
        committing: asyncio.Queue[_Commit | None] = asyncio.Queue(COMMITS)
        reader = asyncio.create_task(_read(requests, arrived))
        submitter = asyncio.create_task(self._submit(arrived, committing, commits))
        try:
            while (commit := await committing.get()) is not None:
                counts, answers = commit
                outcomes = await answers
                requests.settle(len(counts))
                first = 0
                for count in counts:
                    if some := outcomes[first : first + count]:
                        yield some
                    first += count
            await submitter
            await reader
        finally:
            for task in (reader, submitter):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await task

    async def _submit(
        self, arrived: asyncio.Queue[_Sized | None], queued: asyncio.Queue[_Commit | None], commits: asyncio.Semaphore
    ) -> None:
        """Hand messages to the store in batches; always ends with None."""
        waiting: _Sized | None = await arrived.get()
        try:
            while waiting is not None:
                batch, num_bytes, is_open = [waiting[0]], waiting[1], True
                waiting = None
                while not arrived.empty():
                    entry = arrived.get_nowait()
                    if entry is None:
                        is_open = False
                        break
                    if num_bytes + entry[1] > BATCH_BYTES or sum(map(len, batch)) + len(entry[0]) > PUSH_GROUPS:
                        waiting = entry
                        break
                    batch.append(entry[0])
                    num_bytes += entry[1]
                entries = await self._look_at(batch, num_bytes)
                batch.clear()
                if entries:
                    await commits.acquire()
                    answers: _Answers = asyncio.ensure_future(self._api.take_groups(list(chain.from_iterable(entries))))
                    answers.add_done_callback(lambda _: commits.release())
                    # The call may have ended: retrieve the exception.
                    answers.add_done_callback(lambda done: done.cancelled() or done.exception())
                    await queued.put(([len(groups) for groups in entries], answers))
                if waiting is None and is_open:
                    waiting = await arrived.get()
        except Exception:
            await queued.put(None)
            raise
        await queued.put(None)

    async def _look_at(self, batch: list[Pushed], num_bytes: int) -> list[list[Arrival]]:
        BYTES.labels("groups", "in").inc(num_bytes)
        if self._contract is None:
            self._contract = await self._api.stated_contract()
        contract = self._contract
        if contract is None:
            raise NotRegistered("no learner has stated the contract yet, so no site is registered")
        limit = self._max_prompt_tokens
        if num_bytes <= INLINE_BYTES:
            return _examined(batch, contract, limit)
        # One at a time, which bounds the memory.
        async with self._converting:
            return await in_thread(_examined, batch, contract, limit)


def _examined(pushes: Sequence[Pushed], contract: Contract, max_prompt_tokens: int) -> list[list[Arrival]]:
    arrivals = iter(examined([*chain.from_iterable(pushes)], contract, max_prompt_tokens=max_prompt_tokens))
    return [list(islice(arrivals, len(push))) for push in pushes]


async def _read(requests: Requests, arrived: asyncio.Queue[_Sized | None]) -> None:
    try:
        async for message in requests:
            await arrived.put((message, requests.num_bytes))
    except Exception:
        # Groups before the error are committed and answered first.
        await arrived.put(None)
        raise
    await arrived.put(None)


Context = grpc.aio.ServicerContext[Any, Any]


class RolloutServicer(rollout_pb2_grpc.RolloutServiceServicer):
    """heterorl.v1.RolloutService."""

    def __init__(self, rollouts: RolloutColumn, *, max_prompt_tokens: int = 1 << 18) -> None:
        self._rollouts = rollouts
        self._pushes = PushStreams(rollouts, max_prompt_tokens=max_prompt_tokens)

    async def LeaseWork(self, request: pb.LeaseWorkRequest, context: Context) -> pb.LeaseWorkResponse:
        sets = tuple(to_value(EvaluationSet, each) for each in request.sets)
        grant = await self._rollouts.lease_work(**arguments(request, sets=sets))
        return to_message(pb.LeaseWorkResponse, grant)

    async def AbandonWork(self, request: pb.AbandonWorkRequest, context: Context) -> pb.AbandonWorkResponse:
        await self._rollouts.abandon_work(**arguments(request, reason=RETURN_REASON_OF.get(request.reason)))
        return pb.AbandonWorkResponse()

    async def PushGroups(self, request_iterator: Any, context: Context) -> AsyncIterator[pb.PushGroupsResponse]:
        # CallAdmission gives each message as its groups.
        async for outcomes in self._pushes.outcomes(request_iterator):
            for outcome in outcomes:
                run_metrics.observe_push(outcome)
            yield new_message(pb.PushGroupsResponse, outcomes=list(outcomes))

    async def StreamGroups(
        self, request_iterator: AsyncIterator[pb.StreamGroupsRequest], context: Context
    ) -> AsyncIterator[pb.StreamGroupsResponse]:
        first = await anext(request_iterator, None)
        if first is None:
            raise InvalidRequest("stream: the first message must state the epoch")

        async def credits() -> AsyncIterator[int]:
            if first.credits:
                yield first.credits
            async for message in request_iterator:
                yield message.credits

        held = [group_id_from_pb(group_id) for group_id in first.held]
        # Closed at once when the call ends, so that leased groups that were not sent go back now.
        async with contextlib.aclosing(
            self._rollouts.stream_sealed(epoch=first.epoch, held=held, credits=credits())
        ) as stream:
            async for leased in stream:
                message = leased_to_pb(leased)
                BYTES.labels("groups", "out").inc(message.ByteSize())
                run_metrics.observe_lease(leased)
                yield message

    async def AbandonGroups(self, request: pb.AbandonGroupsRequest, context: Context) -> pb.AbandonGroupsResponse:
        ids = [group_id_from_pb(group_id) for group_id in request.ids]
        # An earlier learner states no account, a later one perhaps an unknown one.
        counted_as = REASON_OF.get(request.counted_as, DropReason.LEARNER_ABANDONED)
        await self._rollouts.abandon_groups(**arguments(request, ids=ids, counted_as=counted_as))
        return pb.AbandonGroupsResponse()

    async def RejectGroups(self, request: pb.RejectGroupsRequest, context: Context) -> pb.RejectGroupsResponse:
        rejections = [to_value(Rejection, entry) for entry in request.rejections]
        await self._rollouts.reject_groups(epoch=request.epoch, rejections=rejections)
        return pb.RejectGroupsResponse()


class EvaluationServicer(evaluation_pb2_grpc.EvaluationServiceServicer):
    """heterorl.v1.EvaluationService."""

    def __init__(self, evaluations: EvaluationColumn) -> None:
        self._evaluations = evaluations

    async def PushEvaluation(
        self, request: evaluation_pb2.PushEvaluationRequest, context: Context
    ) -> evaluation_pb2.PushEvaluationResponse:
        pushed = arguments(request, results=results_from_pb(request.results))
        num_counted = await self._evaluations.push_evaluation(**pushed)
        return evaluation_pb2.PushEvaluationResponse(num_counted=num_counted)

    async def ListEvaluations(
        self, request: evaluation_pb2.ListEvaluationsRequest, context: Context
    ) -> evaluation_pb2.ListEvaluationsResponse:
        found = await self._evaluations.list_evaluations(**arguments(request))
        return evaluation_pb2.ListEvaluationsResponse(evaluations=[evaluation_to_pb(each) for each in found])
