"""Ask a server whether it serves, by gRPC's own health protocol (grpc.health.v1)."""

from __future__ import annotations

from dataclasses import dataclass

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.rpc.options import link_options

MESSAGE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """Whether a server serves, and in a few words why or why not."""

    is_serving: bool
    reason: str


async def check_health(address: str, *, timeout_s: float) -> Health:
    """Ask the server at host:port once; whatever goes wrong is an answer too."""
    async with grpc.aio.insecure_channel(address, options=link_options(MESSAGE_BYTES)) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            return Health(is_serving=False, reason=f"{address}: {error.code().name}: {error.details()}")
    name = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    return Health(is_serving=answer.status == health_pb2.HealthCheckResponse.SERVING, reason=f"{address}: {name}")
