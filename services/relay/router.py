"""Routes every call that reaches a relay.

    WatchHead, GetManifest, ListManifests, PlanPull, ReadPayload    heterorl.relay.cached_weights
    grpc.health.v1.Health/Check                                     whether the relay serves
    everything else of heterorl                                     Forwarder

No call is answered or forwarded before its caller is admitted: its site's samplers, of bounded calls and memory.
Handlers take and give bytes as streams, so no message is read before there is room. A forwarded call keeps deadline,
cancellation, metadata, status and trailing metadata. A message is read when the one before it has left, so a slow end
slows the other. A certificate that expires or is revoked ends its streams at their next message.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health_pb2

from heterorl.common.errors import HeterorlError, InvalidRequest, QuotaExceeded, RemoteError, Unreachable
from heterorl.common.identity.spiffe import (
    NODE_KEY,
    Identity,
    Refusal,
    RefusalReason,
    certificate_of,
    identify,
    refuse_node,
    refused,
)
from heterorl.common.identity.tls import TlsConfig
from heterorl.common.process.metrics import IDENTITY_REFUSALS, RELAY_CALLS, RPC_SECONDS
from heterorl.common.rpc.channel import RPCS, CoordinatorChannel
from heterorl.common.rpc.error_status import reason_of, to_status
from heterorl.common.rpc.server_limits import Caller, MemoryQuota, Reservation
from heterorl.common.types.common import digest_field
from heterorl.common.wire.common_messages import arguments, to_message
from heterorl.common.wire.policy_messages import frame_checksum
from heterorl.relay.cached_weights import CachedWeights
from heterorl.v1 import policy_pb2

RETRY_AFTER_S = 1.0
_Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """The calling node.
    Without certificates `identity` is None and all callers are one."""

    name: str
    identity: Identity | None = None
    certificate: bytes = b""

    @property
    def holder(self) -> Caller:
        """The caller that a message's bytes count for."""
        return Caller(self.name, is_privileged=False, is_proven=self.identity is not None)


@dataclass(kw_only=True, eq=False, repr=False)
class NodeAdmission:
    """Admits nodes. Belongs to the event loop.

    `own` gives this relay's identity (None on loopback without certificates); `places` bounds concurrent calls,
    `places_of_node` the calls of one certificate.
    """

    own: Callable[[], Identity | None]
    revoked: Container[int]
    places: int
    places_of_node: int
    budget: MemoryQuota
    wall_time: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        self._calls: Counter[str] = Counter()
        self._num_calls = 0
        for reason in RefusalReason:
            IDENTITY_REFUSALS.labels(reason.value)

    def admit(self, auth: Mapping[str, Iterable[bytes]], *, is_probe: bool = False) -> Node:
        """Check a call by its connection.
        A health probe may have any role and site. Raises Unauthenticated: no identity; PermissionDenied: not for this
        identity."""
        own = self.own()
        if own is None:
            return Node(name="local")
        identity = identify(auth)
        if isinstance(identity, Refusal):
            raise refused(identity)
        node = Node(name=f"{identity.role} {identity.site}", identity=identity, certificate=certificate_of(auth))
        self.recheck(node)
        refusal = refuse_node(own, identity)
        is_forgiven = is_probe and identity.run == own.run
        if refusal is not None and not is_forgiven:
            raise refused(refusal)
        return node

    def recheck(self, node: Node) -> None:
        """Check what changes with time.
        Raises Unauthenticated: the certificate was revoked or has expired."""
        if node.identity is None:
            return
        refusal = node.identity.refuse_at(self.wall_time(), revoked=self.revoked)
        if refusal is not None:
            raise refused(refusal)

    @contextlib.contextmanager
    def place(self, node: Node) -> Iterator[None]:
        """Hold a place for one call. Raises QuotaExceeded: none is free; retryable."""
        if node.identity is not None and self._calls[node.name] >= self.places_of_node:
            problem = f"{node.name} has {self.places_of_node} open calls at the relay (site_concurrent_rpcs)"
            raise QuotaExceeded(problem, retry_after_s=RETRY_AFTER_S)
        if self._num_calls >= self.places:
            problem = f"{self.places} calls are open at the relay (max_concurrent_rpcs)"
            raise QuotaExceeded(problem, retry_after_s=RETRY_AFTER_S)
        self._calls[node.name] += 1
        self._num_calls += 1
        RELAY_CALLS.inc()
        try:
            yield
        finally:
            RELAY_CALLS.dec()
            self._num_calls -= 1
            self._calls[node.name] -= 1
            if not self._calls[node.name]:
                del self._calls[node.name]

    async def message(self, node: Node, method: str, context: _Context) -> tuple[Reservation, Any]:
        """A call's next message or EOF, and its room.
        The caller closes the room. Raises QuotaExceeded: none came in time, retryable; InvalidRequest: too long for the
        method; Unauthenticated: revoked or expired."""
        room, message = await self.budget.message(node.holder, method, context.read)
        try:
            self.recheck(node)
        except RemoteError:
            room.close()
            raise
        return room, message


POLICY = "/heterorl.v1.PolicyService/"
CARRIED = "/heterorl.v1."
HEALTH = "/grpc.health.v1.Health/Check"
OTHER = "other"
"""Label of rpcs that this release does not know."""
_Answer = Callable[[Any], AsyncIterator[Message]]
_OWN_KEYS = frozenset({"user-agent", "te", "content-type", NODE_KEY})
"""Metadata of one link only, or that a node may not set."""


class Router(grpc.GenericRpcHandler):
    """The one handler of a relay's server."""

    def __init__(self, *, weights: CachedWeights, forwarder: Forwarder, admission: NodeAdmission) -> None:
        self._weights = weights
        self._forwarder = forwarder
        self._admission = admission
        self.is_serving = False
        self._here: Mapping[str, tuple[type[Message], _Answer]] = {
            f"{POLICY}WatchHead": (policy_pb2.WatchHeadRequest, self._watch_head),
            f"{POLICY}GetManifest": (policy_pb2.GetManifestRequest, self._get_manifest),
            f"{POLICY}ListManifests": (policy_pb2.ListManifestsRequest, self._list_manifests),
            f"{POLICY}PlanPull": (policy_pb2.PlanPullRequest, self._plan_pull),
            f"{POLICY}ReadPayload": (policy_pb2.ReadPayloadRequest, self._read_payload),
            HEALTH: (health_pb2.HealthCheckRequest, self._check_health),
        }

    def service(self, handler_call_details: Any) -> grpc.RpcMethodHandler[Any, Any] | None:
        """The handler of a method; None where it is not of heterorl."""
        method = str(handler_call_details.method)
        if not method.startswith(CARRIED) and method != HEALTH:
            return None

        async def call(_: object, context: _Context) -> AsyncIterator[bytes]:
            started, code = time.perf_counter(), "internal"
            try:
                node = self._admission.admit(context.auth_context(), is_probe=method == HEALTH)
                with self._admission.place(node):
                    async for message in self._answer(method, node, context):
                        yield message
                code = "OK"
            except (asyncio.CancelledError, GeneratorExit):
                # The latter if the call ends while a message is sent.
                code = grpc.StatusCode.CANCELLED.name
                raise
            except grpc.aio.AioRpcError as error:
                code = error.code().name
                await _pass_on(context, error)
            except Unreachable as error:
                code = grpc.StatusCode.UNAVAILABLE.name
                # Without a reason of ours, as the line itself says it: worth asking again, for as long as it takes.
                await context.abort(grpc.StatusCode.UNAVAILABLE, f"the relay: {error.args[0]}")
            except HeterorlError as error:
                code = reason_of(error)
                await context.abort(*to_status(error))
            finally:
                RPC_SECONDS.labels("server", self._label(method), code).observe(time.perf_counter() - started)

        return grpc.stream_stream_rpc_method_handler(call, None, None)

    def _label(self, method: str) -> str:
        # Callers choose the name, so unknown ones share one label.
        name = method.rpartition("/")[2]
        return name if name in RPCS else OTHER

    async def _answer(self, method: str, node: Node, context: _Context) -> AsyncIterator[bytes]:
        here = self._here.get(method)
        if here is None:
            async for message in self._forwarder.carry(method, node, context):
                yield message
            return
        room, data = await self._admission.message(node, method, context)
        room.close()
        if data is grpc.aio.EOF:
            raise InvalidRequest("the call has no request")
        kind, answer = here
        try:
            request = kind.FromString(data)
        except DecodeError as error:
            raise InvalidRequest(f"the bytes are no {kind.DESCRIPTOR.name}") from error
        async for response in answer(request):
            self._admission.recheck(node)
            yield response.SerializeToString()

    async def _watch_head(self, request: policy_pb2.WatchHeadRequest) -> AsyncIterator[Message]:
        async for update in self._weights.head.watch(after_version=request.after_version):
            yield policy_pb2.WatchHeadResponse(version=update.version, age_s=update.age_s)

    async def _get_manifest(self, request: policy_pb2.GetManifestRequest) -> AsyncIterator[Message]:
        signed = await self._weights.get_signed_manifest(**arguments(request))
        yield policy_pb2.GetManifestResponse(manifest=signed.data, signature=signed.signature)

    async def _list_manifests(self, request: policy_pb2.ListManifestsRequest) -> AsyncIterator[Message]:
        yield policy_pb2.ListManifestsResponse(manifests=await self._weights.list_manifests(**arguments(request)))

    async def _plan_pull(self, request: policy_pb2.PlanPullRequest) -> AsyncIterator[Message]:
        plan = await self._weights.plan_pull(**arguments(request))
        yield to_message(policy_pb2.PlanPullResponse, plan)

    async def _read_payload(self, request: policy_pb2.ReadPayloadRequest) -> AsyncIterator[Message]:
        wanted = arguments(request, digest=digest_field("digest", request.digest))
        async for frame in self._weights.payloads.read(**wanted):
            yield policy_pb2.ReadPayloadResponse(frame=frame, checksum=frame_checksum(frame))

    async def _check_health(self, request: health_pb2.HealthCheckRequest) -> AsyncIterator[Message]:
        """The relay serves what it keeps, whether or not the coordinator answers."""
        status = health_pb2.HealthCheckResponse
        serving = status.SERVING if self.is_serving else status.NOT_SERVING
        yield status(status=status.SERVICE_UNKNOWN if request.service else serving)


async def _pass_on(context: _Context, error: grpc.aio.AioRpcError) -> None:
    """End a call with the status of the coordinator, typed errors included."""
    code = error.code()
    if code is grpc.StatusCode.CANCELLED:
        # By this end, as a replaced certificate closes a connection; for the node that is a broken line.
        code = grpc.StatusCode.UNAVAILABLE
    await context.abort(code, error.details() or "", tuple(error.trailing_metadata() or ()))


class Forwarder:
    """Carries calls to the coordinator, each node's over its own connection."""

    def __init__(self, address: str, *, tls: TlsConfig, max_message_bytes: int, admission: NodeAdmission) -> None:
        self._address = address
        self._tls = tls
        self._max_message_bytes = max_message_bytes
        self._admission = admission
        # By the names in certificates, so there are as many as the authority issued for this site.
        self._links: dict[str, CoordinatorChannel] = {}

    async def close(self) -> None:
        for link in self._links.values():
            await link.close()

    async def carry(self, method: str, node: Node, context: _Context) -> AsyncIterator[bytes]:
        """Yield the coordinator's answers while sending it the node's messages.
        Raises AioRpcError: the coordinator's or the transport's status; RemoteError: the node's message did not
        come."""
        # A call takes a place at the coordinator only once it has a message.
        room, first = await self._admission.message(node, method, context)
        try:
            async with self._link(node).held() as lane:
                call: Any = lane.channel.stream_stream(method)(
                    metadata=_metadata(node, context), timeout=context.time_remaining()
                )
                sending = asyncio.ensure_future(self._send(method, node, context, call, room, first))
                try:
                    async for message in call:
                        self._admission.recheck(node)
                        yield message
                    context.set_trailing_metadata(_passing(await call.trailing_metadata()))
                except asyncio.CancelledError:
                    # This relay cancelled the call because the message did not come, or the node cancelled it.
                    if sending.done() and not sending.cancelled() and isinstance(sending.exception(), RemoteError):
                        raise sending.exception() from None  # type: ignore[misc]
                    raise
                finally:
                    call.cancel()
                    sending.cancel()
                    await asyncio.gather(sending, return_exceptions=True)
        finally:
            room.close()

    async def _send(
        self, method: str, node: Node, context: _Context, call: Any, room: Reservation, message: Any
    ) -> None:
        try:
            while message is not grpc.aio.EOF:
                await call.write(message)
                room.close()
                room, message = await self._admission.message(node, method, context)
            await call.done_writing()
        except RemoteError:
            call.cancel()
            raise
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            # The coordinator has answered before it heard all; its status says why.
            return
        finally:
            room.close()

    def _link(self, node: Node) -> CoordinatorChannel:
        link = self._links.get(node.name)
        if link is None:
            link = CoordinatorChannel(self._address, tls=self._tls, max_message_bytes=self._max_message_bytes)
            self._links[node.name] = link
        return link


def _metadata(node: Node, context: _Context) -> list[tuple[str, str | bytes]]:
    carried = _passing(context.invocation_metadata())
    return [*carried, (NODE_KEY, node.certificate)] if node.certificate else carried


def _passing(metadata: Any) -> list[tuple[str, str | bytes]]:
    pairs = metadata or ()
    return [(key, value) for key, value in pairs if key not in _OWN_KEYS and not key.startswith(("grpc-", ":"))]
