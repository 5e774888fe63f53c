"""The standard health service (grpc.health.v1) of a relay, for whoever of the run asks."""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from heterorl.common.errors import RemoteError
from heterorl.common.rpc.status import to_status
from heterorl.relay.door import Door

_Status = health_pb2.HealthCheckResponse
_Context = grpc.aio.ServicerContext[Any, Any]


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc] # the package has no types
    """Answers for the relay itself, which serves what it keeps whether or not the coordinator answers."""

    def __init__(self, door: Door) -> None:
        self._door = door
        self.is_serving = False

    async def Check(self, request: health_pb2.HealthCheckRequest, context: _Context) -> health_pb2.HealthCheckResponse:
        """Answer the state now."""
        try:
            self._door.admit(context.auth_context(), is_probe=True)
        except RemoteError as error:
            await context.abort(*to_status(error))
        if request.service:
            await context.abort(grpc.StatusCode.NOT_FOUND, "only the server as a whole has a health")
        return _Status(status=_Status.SERVING if self.is_serving else _Status.NOT_SERVING)
