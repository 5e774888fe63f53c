"""Ask a server whether it serves, by gRPC's own health protocol (grpc.health.v1)."""

from __future__ import annotations

import time
from dataclasses import dataclass

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from heterorl.common.identity.credentials import channel_credentials, read_material
from heterorl.common.identity.tls import TlsConfig, check_tls
from heterorl.common.rpc.options import channel_options

MESSAGE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Whether a server serves, and in a few words why or why not."""

    is_serving: bool
    reason: str


async def check_health(address: str, *, tls: TlsConfig, timeout_s: float) -> Answer:
    """Ask the server at host:port once, with a certificate of any role; whatever goes wrong is an answer too.

    Raises:
        ConfigError: plaintext to another machine, or a file of certificates that cannot be used.
    """
    check_tls(tls, key="ADDRESS", address=address)
    async with _channel(address, tls) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            return Answer(is_serving=False, reason=f"{address}: {error.code().name}: {error.details()}")
    name = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    return Answer(is_serving=answer.status == health_pb2.HealthCheckResponse.SERVING, reason=f"{address}: {name}")


def _channel(address: str, tls: TlsConfig) -> grpc.aio.Channel:
    options = channel_options(address, insecure=tls.insecure, max_message_bytes=MESSAGE_BYTES)
    if tls.insecure:
        return grpc.aio.insecure_channel(address, options=options)
    credentials = channel_credentials(read_material(tls, number=0, now=time.time()))
    return grpc.aio.secure_channel(address, credentials, options=options)
