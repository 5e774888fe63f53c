"""A grpc.aio server with our limits, health service, interceptor and graceful stop."""

from __future__ import annotations

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from services.common.errors import PortInUse
from services.common.rpc.interceptors import ErrorsAndTimes
from services.common.rpc.options import server_options


class Server:
    """Wraps the grpc.aio server and its health service."""

    def __init__(self, *, max_message_bytes: int, max_concurrent_rpcs: int) -> None:
        self.grpc = grpc.aio.server(
            interceptors=[ErrorsAndTimes()],
            options=server_options(max_message_bytes),
            maximum_concurrent_rpcs=max_concurrent_rpcs,
        )
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)

    async def start(self, address: str) -> int:
        """Listen and report SERVING; returns the port.

        Raises:
            PortInUse: the address is taken.
        """
        try:
            port = self.grpc.add_insecure_port(address)
        except RuntimeError as error:
            raise PortInUse("listen", address) from error
        await self.grpc.start()
        await self._health.set("", health_pb2.HealthCheckResponse.SERVING)
        return port

    async def stop(self, grace_s: float) -> None:
        """Report NOT_SERVING, refuse new calls, give running ones `grace_s` seconds, then cut them."""
        await self._health.enter_graceful_shutdown()
        await self.grpc.stop(grace_s)
