"""Serves the bytes that a scheme sends beyond heterorl's, next to the coordinator, by gRPC with mutual TLS."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from benchmarks.regions.arms import scheme_bytes
from benchmarks.regions.sampler import MESSAGE_BYTES, METHOD
from heterorl.common.identity.credentials import MaterialFiles, server_credentials
from heterorl.common.identity.tls import ServerTlsConfig
from heterorl.common.rpc.transport_options import server_options
from heterorl.common.weights.payload import FRAME_BYTES


def sizes_in(directory: Path) -> list[dict[str, Any]]:
    """Rows of the learner for each version so far."""
    path = directory / "sizes.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


async def serve_rest(directory: Path, scheme: str, tls: ServerTlsConfig) -> tuple[grpc.aio.Server, int]:
    """Start on all addresses; returns the server and its port."""
    frame = bytes(FRAME_BYTES)

    async def read(data: bytes, _: Any) -> AsyncIterator[bytes]:
        asked = json.loads(data)
        left = scheme_bytes(scheme, sizes_in(directory), have=asked["have"], want=asked["want"]) - asked["less"]
        while left > 0:
            yield frame[: min(left, FRAME_BYTES)]
            left -= FRAME_BYTES

    service, _, name = METHOD[1:].partition("/")
    handlers = {name: grpc.unary_stream_rpc_method_handler(read)}  # type: ignore[arg-type]
    server = grpc.aio.server(options=server_options(MESSAGE_BYTES))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    port = server.add_secure_port("0.0.0.0:0", server_credentials(MaterialFiles(tls)))
    await server.start()
    return server, port
