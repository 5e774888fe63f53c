"""A relay's gRPC server: its limits, its certificates, and the one handler of everything."""

from __future__ import annotations

from pathlib import Path

import grpc.aio

from heterorl.common.errors import ConfigError, PortInUse
from heterorl.common.identity.credentials import MaterialFiles, server_credentials
from heterorl.common.identity.identity import Identity, Role
from heterorl.common.identity.revocation import Revocations
from heterorl.common.identity.tls import check_tls
from heterorl.common.rpc.budget import Budget
from heterorl.common.rpc.options import server_options
from heterorl.relay.config import RelayConfig
from heterorl.relay.door import Door
from heterorl.relay.forward import Forwarder
from heterorl.relay.router import Router
from heterorl.relay.weights import Weights

UNREFUSED_RPCS = 8
"""Calls that gRPC lets in for each place; all but the placed ones are on their way out."""


class RelayServer:
    """Answers the samplers of a site."""

    def __init__(self, config: RelayConfig, weights: Weights) -> None:
        """Prepare a server.

        Raises:
            ConfigError: a file of certificates cannot be used, or is not a relay's.
        """
        self._config = config
        self._files = None if config.tls.insecure or not config.tls.cert else MaterialFiles(config.tls)
        if self._files is not None and self._files.current().identity.role is not Role.RELAY:
            found = self._files.current().identity.uri
            action = "heterorl certs issue relay SITE --host NAME"
            raise ConfigError("tls.cert", f"names {found}, and this is a relay", action=action)
        self.door = Door(
            own=self._identity,
            revoked=Revocations(Path(config.tls.revoked)) if config.tls.revoked else frozenset(),
            places=config.max_concurrent_rpcs,
            places_of_node=config.site_concurrent_rpcs,
            budget=Budget(total_bytes=config.messages_in_flight_bytes, message_bytes=config.max_message_bytes),
        )
        self._forwarder = Forwarder(
            config.coordinator, tls=config.tls, max_message_bytes=config.max_message_bytes, door=self.door
        )
        self._grpc = grpc.aio.server(
            options=server_options(config.max_message_bytes),
            maximum_concurrent_rpcs=UNREFUSED_RPCS * config.max_concurrent_rpcs,
        )
        self._router = Router(weights=weights, forwarder=self._forwarder, door=self.door)
        self._grpc.add_generic_rpc_handlers((self._router,))

    def _identity(self) -> Identity | None:
        return None if self._files is None else self._files.current().identity

    async def start(self) -> int:
        """Listen and report SERVING; returns the port.

        Raises:
            ConfigError: plaintext on an address that others can reach.
            PortInUse: the address is taken.
        """
        check_tls(self._config.tls, key="listen", address=self._config.listen)
        try:
            if self._files is None:
                port = self._grpc.add_insecure_port(self._config.listen)
            else:
                port = self._grpc.add_secure_port(self._config.listen, server_credentials(self._files))
        except RuntimeError as error:
            raise PortInUse("listen", self._config.listen) from error
        await self._grpc.start()
        self._router.is_serving = True
        return port

    async def stop(self) -> None:
        """Report NOT_SERVING, refuse new calls, give running ones their grace, then cut them."""
        self._router.is_serving = False
        await self._grpc.stop(self._config.stop_grace_s)
        await self._forwarder.close()
