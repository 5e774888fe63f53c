"""The standard health service (grpc.health.v1) for the whole server; a generator, so that the gate guards its stream.

The servicer that comes with grpcio-health-checking writes to the context instead, which no interceptor of streams sees,
and forgets all watchers when one of them leaves.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

_Status = health_pb2.HealthCheckResponse
_Context = grpc.aio.ServicerContext[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse]


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc] # the package has no types
    """Answers for the service of the empty name; `set_serving` wakes every watcher."""

    def __init__(self) -> None:
        self._is_serving = False
        self._changed = asyncio.Condition()

    async def set_serving(self, is_serving: bool) -> None:
        """Say whether calls are welcome."""
        async with self._changed:
            self._is_serving = is_serving
            self._changed.notify_all()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: _Context) -> health_pb2.HealthCheckResponse:
        """Answer the state now; NOT_FOUND for the name of a service."""
        if request.service:
            await context.abort(grpc.StatusCode.NOT_FOUND, "only the server as a whole has a health")
        return _Status(status=self._status(request.service))

    async def Watch(
        self,
        request: health_pb2.HealthCheckRequest,
        context: _Context,
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """Yield the state, and again whenever it changes."""
        last = _Status.UNKNOWN
        while True:
            async with self._changed:
                while (status := self._status(request.service)) == last:
                    await self._changed.wait()
            last = status
            yield _Status(status=status)

    def _status(self, service: str) -> health_pb2.HealthCheckResponse.ServingStatus.ValueType:
        if service:
            return _Status.SERVICE_UNKNOWN
        return _Status.SERVING if self._is_serving else _Status.NOT_SERVING
