"""Peers that open a connection and then do as little as they can, each kind one step further than the one before."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import ssl
from dataclasses import dataclass, field
from pathlib import Path

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""RFC 9113, 3.4: the client's preface and an empty SETTINGS frame."""


class Kind(enum.Enum):
    """How far a peer goes before it falls silent."""

    CONNECTED = "connected"
    PART_OF_HELLO = "part of a ClientHello"
    TLS = "TLS with a good certificate, no HTTP/2"
    SETTINGS = "HTTP/2 settings, then no answer to any ping"


class _Silent(asyncio.Protocol):
    def __init__(self, greeting: bytes) -> None:
        self._greeting = greeting
        self.closed = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._greeting)

    def connection_lost(self, exception: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(None)


@dataclass(slots=True)
class SlowPeers:
    """`count` peers of all kinds; who is thrown out comes again, until `tire`. `num_open` are connected now."""

    port: int
    node: Path
    count: int
    num_open: int = 0
    num_thrown_out: dict[Kind, int] = field(default_factory=lambda: dict.fromkeys(Kind, 0))
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)
    _is_tired: bool = False
    _context: ssl.SSLContext = field(init=False)
    _hello: bytes = field(init=False)

    def __post_init__(self) -> None:
        self._hello = _part_of_hello()
        self._context = ssl.create_default_context(cafile=str(self.node / "ca.crt"))
        self._context.load_cert_chain(self.node / "node.crt", self.node / "node.key")
        self._context.set_alpn_protocols(["h2"])

    async def __aenter__(self) -> SlowPeers:
        kinds = list(Kind)
        self._tasks = [asyncio.create_task(self._hang(kinds[place % len(kinds)])) for place in range(self.count)]
        return self

    async def __aexit__(self, *exception: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def tire(self) -> None:
        """Let nobody come again, and wait until the server threw out everybody."""
        self._is_tired = True
        await asyncio.gather(*self._tasks)

    async def _hang(self, kind: Kind) -> None:
        loop = asyncio.get_running_loop()
        context = self._context if kind in (Kind.TLS, Kind.SETTINGS) else None
        greeting = {Kind.PART_OF_HELLO: self._hello, Kind.SETTINGS: _PREFACE}.get(kind, b"")
        while not self._is_tired:
            try:
                transport, protocol = await loop.create_connection(
                    lambda: _Silent(greeting), "127.0.0.1", self.port, ssl=context,
                    server_hostname="localhost" if context else None,
                    ssl_handshake_timeout=300 if context else None,
                )  # fmt: skip
            except OSError:
                # Thrown out before the handshake's end, as on a machine that is slow with so many of them.
                self.num_thrown_out[kind] += 1
                await asyncio.sleep(0.1)
                continue
            self.num_open += 1
            try:
                await protocol.closed
                self.num_thrown_out[kind] += 1
            finally:
                self.num_open -= 1
                transport.abort()


def _part_of_hello() -> bytes:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    link = ssl.create_default_context().wrap_bio(incoming, outgoing, server_hostname="localhost")
    with contextlib.suppress(ssl.SSLWantReadError):
        link.do_handshake()
    hello = outgoing.read()
    return hello[: len(hello) // 2]
