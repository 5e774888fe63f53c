"""Admission control: places for calls, memory for messages.

Each call needs an admitted certificate.

gRPC parses the message of a unary call before a handler runs. So every handler is installed as a stream, and messages
are read here: authorized, counted, parsed (long ones on a thread), checked field by field. Answers are streamed too, so
that a call keeps its place until its answer has left.

No byte of a request is read before its caller is admitted. A revoked or expired certificate ends its streams at their
next message in either direction. Some places are reserved for learner and operator. One certificate gets its share on
all its connections, and a site three quarters of the samplers' places. A refusal for lack of a place is retryable.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import grpc
import grpc.aio
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import MethodDescriptor

from heterorl.common.errors import HeterorlError, InvalidRequest, QuotaExceeded
from heterorl.common.identity.spiffe import Identity, Peer, Role
from heterorl.common.process.metrics import RPC_SECONDS
from heterorl.common.process.threads import in_thread
from heterorl.common.rpc.error_status import reason_of, to_status
from heterorl.common.rpc.server_limits import OF_SITE, Caller, MemoryQuota, Reservation
from heterorl.common.wire.rollout_messages import pushed_from_pb
from heterorl.coordinator.rpc.access import RULES, CallAuthorizer
from heterorl.coordinator.rpc.bounds import PUSH_GROUPS, check, parse
from heterorl.v1 import rollout_pb2

_LOG = logging.getLogger(__name__)
RESERVED_PART = 8
"""One place in this many is kept for the learner and the operator, and at least two."""
RETRY_AFTER_S = 1.0


class Shares:
    """The places of one server. `per_site` is the share of one certificate."""

    def __init__(self, *, places: int, per_site: int) -> None:
        self._places = places
        self._open = places - max(2, places // RESERVED_PART)
        # At most half of the open places, so that one certificate never takes all.
        self._per_site = max(1, min(per_site, self._open // 2))
        self._per_connection = max(1, self._open // 2)
        self._of_site_most = max(self._per_site, int(OF_SITE * self._open))
        self.num_calls = 0
        self._num_open = 0
        self._of_holder: Counter[Caller] = Counter()
        self._of_site: Counter[str] = Counter()
        self._of_rpc: Counter[tuple[Caller, str]] = Counter()

    @contextlib.contextmanager
    def place(self, holder: Caller, method: str) -> Iterator[None]:
        """Hold a place for one call. Raises QuotaExceeded: none is free."""
        problem = self._problem(holder, method)
        if problem:
            raise QuotaExceeded(problem, retry_after_s=RETRY_AFTER_S)
        self._add(holder, method, 1)
        try:
            yield
        finally:
            self._add(holder, method, -1)

    def _problem(self, holder: Caller, method: str) -> str:
        at_once = RULES[method].at_once
        if at_once and holder.is_proven and self._of_rpc[holder, method] >= at_once:
            return f"{holder.name} has {at_once} concurrent calls of {method}, the share of one certificate"
        share = self._share(holder)
        if self._of_holder[holder] >= share:
            return f"{holder.name} has {share} concurrent calls, its share (site_concurrent_rpcs, max_concurrent_rpcs)"
        if self.num_calls >= self._places:
            return f"the coordinator has {self._places} concurrent calls (max_concurrent_rpcs)"
        if not holder.is_privileged and self._num_open >= self._open:
            return f"samplers have {self._open} concurrent calls; the rest of max_concurrent_rpcs is the learner's"
        if not holder.is_privileged and self._of_site[holder.owner] >= self._of_site_most:
            return f"{holder.owner} has {self._of_site_most} concurrent calls, a site's share (max_concurrent_rpcs)"
        return ""

    def _share(self, holder: Caller) -> int:
        if holder.is_privileged:
            # A learner and an operator together always find a place.
            return max(self._per_site, self._places // RESERVED_PART // 2)
        return self._per_site if holder.is_proven else self._per_connection

    def _add(self, holder: Caller, method: str, number: int) -> None:
        self.num_calls += number
        if not holder.is_privileged:
            self._num_open += number
        for counts, key in (
            (self._of_holder, holder), (self._of_site, holder.owner), (self._of_rpc, (holder, method)),
        ):  # fmt: skip
            counts[key] += number  # type: ignore[index]
            if not counts[key]:  # type: ignore[index]
                # Each connection has a new name.
                del counts[key]


INLINE_BYTES = 1 << 14
"""Messages up to this size are parsed on the event loop."""
PUSH_INLINE_BYTES = 1 << 22
"""The same for pushes, which parsing copies."""
PUSH = "/heterorl.v1.RolloutService/PushGroups"
PARSED_BYTES = 4
"""Bytes of memory counted for one byte of a message, up to the room of the longest message: varints may grow."""
_Context = grpc.aio.ServicerContext[Any, Any]

_PRIVILEGED = frozenset({Role.LEARNER, Role.OPERATOR, Role.COORDINATOR})


def holder_of(peer: Peer, method: str, address: str) -> Caller:
    """The holder of an admitted call: one for each certificate.
    Without certificates, one for each address."""
    if isinstance(peer, Identity):
        name, owner = f"{peer.role.value} {peer.site}", peer.site.partition(".")[0]
        return Caller(name, peer.role in _PRIVILEGED, is_proven=True, site=owner)
    # A local caller may call anything; calls of learners and operators count as theirs.
    is_privileged = Role.SAMPLER not in RULES[method].roles
    kind = "learner or operator" if is_privileged else "node"
    return Caller(f"{kind} at {address}", is_privileged, is_proven=False)


class Requests:
    """The messages of one call, read on request when there is room.

    The next request frees a message's room; after `settle_by_hand`, `settle` does.
    """

    def __init__(self, admission: CallAdmission, method: str, peer: Peer, holder: Caller, context: _Context) -> None:
        self._admission = admission
        self._method = method
        self._peer = peer
        self.holder = holder
        self._context = context
        self._rooms: list[Reservation] = []
        self._is_by_hand = False
        self.num_bytes = 0

    def settle_by_hand(self) -> None:
        self._is_by_hand = True

    def settle(self, count: int) -> None:
        """Give back the room of the oldest messages."""
        for room in self._rooms[:count]:
            room.close()
        del self._rooms[:count]

    def close(self) -> None:
        self.settle(len(self._rooms))

    def __aiter__(self) -> Requests:
        return self

    async def __anext__(self) -> Any:
        if not self._is_by_hand:
            self.close()
        room, data = await self._admission.budget.message(
            self.holder, self._method, self._context.read, times=PARSED_BYTES
        )
        if data is grpc.aio.EOF:
            raise StopAsyncIteration
        self._rooms.append(room)
        self.num_bytes = len(data)
        return await self._admission.message(self._method, self._peer, data)

    async def single(self) -> Any:
        message = await anext(self, None)
        if message is None:
            raise InvalidRequest("the call has no request")
        return message


class CallAdmission(grpc.aio.ServerInterceptor):
    """Wraps handlers: admits and times calls, turns typed errors into statuses."""

    def __init__(self, authorizer: CallAuthorizer, *, shares: Shares, budget: MemoryQuota) -> None:
        self.budget = budget
        self._authorizer = authorizer
        self.shares = shares
        # One at a time, so that the extra memory of parsing is taken once.
        self._parsing = asyncio.Semaphore(1)

    async def message(self, method: str, peer: Peer, data: bytes) -> Any:
        """Check and parse one message; a push becomes its groups.
        Raises InvalidRequest: format or bounds; Unauthenticated, PermissionDenied: not from this caller."""
        self._authorizer.recheck(peer)
        read = _pushed if method == PUSH else functools.partial(parse, descriptor=_descriptor(method).input_type)
        if len(data) <= (PUSH_INLINE_BYTES if method == PUSH else INLINE_BYTES):
            message: Any = read(data)
        else:
            async with self._parsing:
                # A cancelled call keeps its room and place until its thread ends.
                message = await in_thread(read, data)
        self._authorizer.check_request(method, peer, message)
        return message

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return None
        call = self._streamed(handler, str(handler_call_details.method))
        return grpc.stream_stream_rpc_method_handler(call, None, handler.response_serializer)

    def _streamed(self, handler: Any, method: str) -> Callable[[object, _Context], AsyncIterator[Any]]:
        async def answers(requests: Requests, context: _Context) -> AsyncIterator[Any]:
            if handler.stream_stream:
                inner = handler.stream_stream(requests, context)
            elif handler.stream_unary:
                yield await handler.stream_unary(requests, context)
                return
            elif handler.unary_unary:
                yield await handler.unary_unary(await requests.single(), context)
                return
            else:
                request = await requests.single()
                # The stream may last for days.
                requests.settle(1)
                inner = handler.unary_stream(request, context)
            async for answer in inner:
                yield answer

        async def call(_: object, context: _Context) -> AsyncIterator[Any]:
            async with _answered(method, context):
                with self._entered(method, context) as (peer, requests):
                    async for answer in answers(requests, context):
                        self._authorizer.recheck(peer)
                        yield answer

        return call

    @contextlib.contextmanager
    def _entered(self, method: str, context: _Context) -> Any:
        peer = self._authorizer.admit(method, context.auth_context(), context.invocation_metadata() or ())
        holder = holder_of(peer, method, str(context.peer()))
        with self.shares.place(holder, method):
            requests = Requests(self, method, peer, holder, context)
            try:
                yield peer, requests
            finally:
                requests.close()


def _pushed(data: bytes) -> list[rollout_pb2.Group]:
    message = parse(data, rollout_pb2.PushGroupsRequest.DESCRIPTOR)
    assert isinstance(message, rollout_pb2.PushGroupsRequest)
    groups = pushed_from_pb(message, limit_groups=PUSH_GROUPS)
    for group in groups:
        check(group)
    return groups


@functools.cache
def _descriptor(method: str) -> MethodDescriptor:
    service, _, name = method.removeprefix("/").rpartition("/")
    return descriptor_pool.Default().FindServiceByName(service).methods_by_name[name]


@contextlib.asynccontextmanager
async def _answered(method: str, context: _Context) -> AsyncIterator[None]:
    """Time a call and turn a typed error into its status.
    A cancelled call is not counted."""
    started, method = time.perf_counter(), method.rpartition("/")[2]
    try:
        yield
    except HeterorlError as error:
        code, message, trailers = to_status(error)
        _observe(method, reason_of(error), started)
        _LOG.debug("the server refused %s: %s", method, error)
        await context.abort(code, message, trailers)
    except Exception:
        # A defect: gRPC answers UNKNOWN, and the call must still be counted.
        _observe(method, "internal", started)
        raise
    else:
        _observe(method, "OK", started)


def _observe(method: str, code: str, started: float) -> None:
    RPC_SECONDS.labels("server", method, code).observe(time.perf_counter() - started)
