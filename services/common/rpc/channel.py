"""One channel to a coordinator, replaced when this node's certificates change.

Guarantees: a call begins with the newest certificates; a replaced channel closes after its last call. A stream refused
because its channel had the old certificate raises Unreachable, so its owner dials again.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc

from heterorl.common.errors import Unreachable
from heterorl.common.identity.credentials import Material, MaterialFiles, channel_credentials, read_material
from heterorl.common.identity.tls import TlsConfig, check_tls
from heterorl.common.process.address import addresses
from heterorl.common.rpc.error_status import from_rpc_error
from heterorl.common.rpc.transport_options import MAX_MESSAGE_BYTES, MIN_MESSAGE_BYTES, channel_options
from heterorl.v1 import (
    backup_pb2,
    diagnosis_pb2,
    evaluation_pb2,
    metrics_pb2,
    policy_pb2,
    rollout_pb2,
    run_pb2,
    sample_pb2,
)

_FILES: tuple[Any, ...] = (
    backup_pb2, diagnosis_pb2, evaluation_pb2, metrics_pb2, policy_pb2, rollout_pb2, run_pb2, sample_pb2,
)  # fmt: skip
RPCS: Mapping[str, Any] = {
    method.name: method
    for file in _FILES
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
"""Descriptors of the rpcs of all services by name."""
_SILENT = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
KNOCK_S = 2.0
"""Time that an address has to accept a connection; a dead host never refuses one."""


def stubs_of(channel: grpc.aio.Channel) -> dict[str, Any]:
    """The rpcs of all services over one channel, by name."""
    return {name: _stub(channel, rpc) for name, rpc in RPCS.items()}


def _stub(channel: grpc.aio.Channel, rpc: Any) -> Any:
    ways = ("stream" if is_stream else "unary" for is_stream in (rpc.client_streaming, rpc.server_streaming))
    return getattr(channel, "_".join(ways))(
        f"/{rpc.containing_service.full_name}/{rpc.name}",
        request_serializer=GetMessageClass(rpc.input_type).SerializeToString,
        response_deserializer=GetMessageClass(rpc.output_type).FromString,
    )


@dataclass(slots=True, kw_only=True, eq=False)
class OpenChannel:
    """A dialled channel and its rpcs by name."""

    channel: grpc.aio.Channel
    stubs: Mapping[str, Any]
    number: int
    num_calls: int = 0


class CoordinatorChannel:
    """The channel to `address`, a host:port or several with commas between them."""

    def __init__(self, address: str, *, tls: TlsConfig, max_message_bytes: int) -> None:
        """Prepare a channel; the first call dials.

        Raises ConfigError: the TLS settings are unusable.
        """
        self._addresses = addresses(address)
        for each in self._addresses:
            check_tls(tls, key="coordinator", address=each)
        self._address = self._addresses[0]
        self._is_lost = len(self._addresses) > 1
        """Whether to look for the listening address before the next call."""
        self._receive_bytes = max_message_bytes
        self.send_bytes = max_message_bytes
        """Largest message that this link sends."""
        self._files = None if tls.insecure else MaterialFiles(tls)
        self._lane = self._open()
        self._retired: set[OpenChannel] = set()

    async def send_up_to(self, num_bytes: int) -> None:
        """Adopt the peer's limit for sent messages; received ones keep theirs."""
        # With less this node could not even register again to learn a corrected limit.
        limit = min(max(num_bytes, MIN_MESSAGE_BYTES), MAX_MESSAGE_BYTES)
        if limit != self.send_bytes:
            # gRPC fixes limits for a channel's life, so open another one; running calls end on theirs.
            self.send_bytes = limit
            await self._replace()

    async def close(self) -> None:
        for lane in (self._lane, *self._retired):
            await lane.channel.close()

    @contextlib.asynccontextmanager
    async def held(self) -> AsyncIterator[OpenChannel]:
        """The channel for one call; it stays open until the context ends."""
        lane = await self._current()
        lane.num_calls += 1
        try:
            yield lane
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAUTHENTICATED and lane is not await self._current():
                raise Unreachable("the certificate was replaced during the call", retry_after_s=0.1) from error
            if error.code() in _SILENT and from_rpc_error(error) is None:
                self._is_lost = len(self._addresses) > 1
            raise
        finally:
            lane.num_calls -= 1
            await self._sweep()

    async def _current(self) -> OpenChannel:
        if self._is_lost:
            self._is_lost = False
            await self._seek()
        if self._files is not None and self._files.current().number != self._lane.number:
            await self._replace()
        return self._lane

    async def _seek(self) -> None:
        """Switch to the listening address, or to the next if none listens."""
        following = self._addresses[(self._addresses.index(self._address) + 1) % len(self._addresses)]
        found = await _listening(self._addresses) or following
        if found != self._address:
            self._address = found
            await self._replace()

    async def _replace(self) -> None:
        self._retired.add(self._lane)
        self._lane = self._open()
        await self._sweep()

    def _open(self) -> OpenChannel:
        material = None if self._files is None else self._files.current()
        channel = _dialled(self._address, material, receive_bytes=self._receive_bytes, send_bytes=self.send_bytes)
        return OpenChannel(channel=channel, stubs=stubs_of(channel), number=0 if material is None else material.number)

    async def _sweep(self) -> None:
        for lane in [lane for lane in self._retired if lane.num_calls == 0]:
            self._retired.discard(lane)
            await lane.channel.close()


async def listening_one(text: str) -> str:
    """The address of a list that accepts a connection, else its first."""
    candidates = addresses(text)
    found = await _listening(candidates) if len(candidates) > 1 else None
    return found or candidates[0]


async def _listening(candidates: Sequence[str]) -> str | None:
    """The first address to accept a connection; a standby listens on none."""

    async def knock(address: str) -> str:
        host, _, port = address.rpartition(":")
        _, writer = await asyncio.open_connection(host.removeprefix("[").removesuffix("]"), int(port))
        writer.close()
        return address

    knocks = [asyncio.create_task(knock(address)) for address in candidates]
    try:
        for answer in asyncio.as_completed(knocks, timeout=KNOCK_S):
            with contextlib.suppress(OSError, ValueError):
                return await answer
    except TimeoutError:
        pass
    finally:
        for task in knocks:
            task.cancel()
        await asyncio.gather(*knocks, return_exceptions=True)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Whether a server serves, and why or why not."""

    is_serving: bool
    reason: str


async def check_health(address: str, *, tls: TlsConfig, timeout_s: float) -> Answer:
    """Ask the server at host:port once, with a certificate of any role.

    A failed call is an answer too. Raises ConfigError for plaintext to another machine, or an unusable certificate
    file.
    """
    check_tls(tls, key="ADDRESS", address=address)
    material = None if tls.insecure else read_material(tls, number=0, now=time.time())
    async with _dialled(address, material, receive_bytes=1 << 16) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            return Answer(is_serving=False, reason=f"{address}: {error.code().name}: {error.details()}")
    name = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    return Answer(is_serving=answer.status == health_pb2.HealthCheckResponse.SERVING, reason=f"{address}: {name}")


def _dialled(address: str, material: Material | None, *, receive_bytes: int, send_bytes: int = 0) -> grpc.aio.Channel:
    options = channel_options(
        address, insecure=material is None, max_message_bytes=receive_bytes, send_bytes=send_bytes
    )
    if material is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, channel_credentials(material), options=options)
