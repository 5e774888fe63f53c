"""The grpc.aio server: limits, certificates, health service, error mapping, graceful stop."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from heterorl.common.errors import ConfigError
from heterorl.common.identity.credentials import MaterialFiles, Revocations, add_port
from heterorl.common.identity.spiffe import Role
from heterorl.common.rpc.server_limits import MemoryQuota
from heterorl.common.rpc.transport_options import server_options
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.coordinator.rpc.access import CallAuthorizer
from heterorl.coordinator.rpc.call_admission import CallAdmission, Shares

_Status = health_pb2.HealthCheckResponse
_HealthContext = grpc.aio.ServicerContext[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse]


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc] # the package has no types
    """Answers `Check` for the server as a whole; `Watch` is not served."""

    is_serving = False

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: _HealthContext
    ) -> health_pb2.HealthCheckResponse:
        if request.service:
            await context.abort(grpc.StatusCode.NOT_FOUND, "only the server as a whole has a health")
        return _Status(status=_Status.SERVING if self.is_serving else _Status.NOT_SERVING)


_LOG = logging.getLogger(__name__)
UNREFUSED_RPCS = 8
"""Calls that gRPC lets in for each place of admission control; those without a place are being refused."""


class Server:
    """Wraps the grpc.aio server and its health service."""

    def __init__(self, config: CoordinatorConfig, *, wall_time: Callable[[], float] = time.time) -> None:
        """Prepare a server.
        Raises ConfigError: a certificate file is unusable, or not a coordinator's of this run."""
        self._tls = tls = config.tls
        self._files = None if tls.insecure or not tls.cert else MaterialFiles(tls)
        if self._files is not None:
            own = self._files.current().identity
            if own.role is not Role.COORDINATOR or own.run != config.run_id:
                problem = f"names {own.uri}; this is the coordinator of run {config.run_id}"
                action = "issue a certificate for this run's coordinator: `heterorl certs issue`, or correct run_id"
                raise ConfigError("tls.cert", problem, action=action)
        self._revoked = Revocations(Path(tls.revoked)) if tls.revoked else None
        if self._files is not None and self._revoked is None:
            _LOG.warning(
                "tls.revoked is not set: revoked certificates stay valid; set it to the list of heterorl certs revoke"
            )
        self.authorizer = CallAuthorizer(
            run_id=config.run_id,
            is_plaintext=tls.insecure,
            wall_time=wall_time,
            revoked=frozenset() if self._revoked is None else self._revoked,
            authorities=lambda: b"" if self._files is None else self._files.current().ca,
        )
        self.admission = CallAdmission(
            self.authorizer,
            shares=Shares(places=config.max_concurrent_rpcs, per_site=config.site_concurrent_rpcs),
            budget=MemoryQuota(total_bytes=config.messages_in_flight_bytes, message_bytes=config.max_message_bytes),
        )
        self.grpc = grpc.aio.server(
            interceptors=[self.admission],
            options=server_options(config.max_message_bytes),
            # gRPC counts calls of all callers alike, so its own bound only limits calls that are being refused.
            maximum_concurrent_rpcs=UNREFUSED_RPCS * config.max_concurrent_rpcs,
        )
        self._health = HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)

    def revoked_serials(self) -> frozenset[int]:
        return frozenset() if self._revoked is None else self._revoked.current()

    async def start(self, address: str) -> int:
        """Listen and report SERVING; returns the port.
        Raises ConfigError: plaintext on a public address, or the address is taken."""
        port = add_port(self.grpc, address, tls=self._tls, files=self._files)
        await self.grpc.start()
        self._health.is_serving = True
        return port

    async def stop(self, grace_s: float) -> None:
        """Report NOT_SERVING, refuse new calls, cut running ones after `grace_s` seconds."""
        self._health.is_serving = False
        await self.grpc.stop(grace_s)
