"""The enrolment server: issues certificates to joining nodes for tokens.

    loop        waits for                               unblocked by
    accept      a connection                            the kernel; the end of the process
    answer      two frames of a node, the directory     the node; SPEAK_S, ANSWER_S; the lock's holder

It runs where the authority's key is. A connection lasts ANSWER_S at most, and SPEAK_S before its token. At most
OF_ADDRESS connections of one address are open, MAX_CONNECTIONS in all. At the limit, the oldest silent connection of
the busiest address ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import ipaddress
import logging
import ssl
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from heterorl.certs.authority import issue_enrolment_server
from heterorl.certs.authority_directory import SECRET, Authority, write_file
from heterorl.certs.enrolment import (
    ID_BYTES,
    SECRET_BYTES,
    BrokenFrame,
    Enrolment,
    JoinRefused,
    Refused,
    frame,
    read_frame,
    read_request,
)
from heterorl.common.errors import HeterorlError
from heterorl.common.process.address import listen_error

_LOG = logging.getLogger(__name__)
ANSWER_S = 10.0
SPEAK_S = 3.0
"""Limit of the handshake, the token and the signing request."""
MAX_CONNECTIONS, OF_ADDRESS = 64, 8


class _Unread(asyncio.StreamReaderProtocol):
    """A connection unread before `start_tls`: its first bytes are the handshake's."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        assert isinstance(transport, asyncio.Transport)
        transport.pause_reading()


class EnrolmentServer:
    """Listens for joining nodes."""

    def __init__(self, directory: Path, *, wall_time: Callable[[], float] = time.time) -> None:
        """Prepare for the authority of a directory.
        Raises ConfigError: there is no authority, or it has expired."""
        authority = Authority(directory)
        pair = authority.pair()
        self._enrolment = Enrolment(directory)
        self._greeting = x509.load_pem_x509_certificate(pair.cert).public_bytes(Encoding.DER)
        now = datetime.datetime.fromtimestamp(wall_time(), datetime.UTC)
        own = issue_enrolment_server(pair, now=now)
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._tls.minimum_version = ssl.TLSVersion.TLSv1_3
        with tempfile.TemporaryDirectory(prefix="heterorl-enrolment-") as place:
            # OpenSSL reads keys only from files; only this user can read the directory.
            path = Path(place) / "server.pem"
            write_file(path, own.key + own.cert, mode=SECRET)
            self._tls.load_cert_chain(path)
        self._wall_time = wall_time
        self._open: Counter[str] = Counter()
        self._silent: dict[asyncio.Timeout, str] = {}

    @contextlib.asynccontextmanager
    async def listening(self, address: str) -> AsyncIterator[int]:
        """Answer at host:port until the context ends; yields the port.
        Raises as `listen_error`."""
        host, _, port = address.rpartition(":")
        try:
            server = await asyncio.get_running_loop().create_server(
                lambda: _Unread(asyncio.StreamReader(), self._accept), host.strip("[]"), int(port)
            )
        except OSError as error:
            raise listen_error("--listen", address, error) from error
        async with server:
            yield int(server.sockets[0].getsockname()[1])

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = str(writer.get_extra_info("peername")[0])
        address = network_of(peer)
        self._open[address] += 1
        try:
            if self._has_room(address):
                async with asyncio.timeout(ANSWER_S):
                    await self._converse(reader, writer, peer)
        except (TimeoutError, BrokenFrame, OSError) as error:
            _LOG.debug("the authority gave the node at %s no answer: %s", peer, error)
        finally:
            self._open[address] -= 1
            if not self._open[address]:
                del self._open[address]
            # Without a wait for the end, which a reset never makes.
            writer.close()

    def _has_room(self, address: str) -> bool:
        """Whether a connection may stay; at the limit, ends a silent one."""
        if self._open[address] > OF_ADDRESS:
            return False
        if self._open.total() <= MAX_CONNECTIONS:
            return True
        # `max` takes the first of equals, which is the oldest.
        oldest = max(self._silent, key=lambda silent: self._open[self._silent[silent]], default=None)
        if oldest is None:
            return False
        del self._silent[oldest]
        oldest.reschedule(asyncio.get_running_loop().time())
        return True

    async def _listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: str) -> list[bytes]:
        async with asyncio.timeout(SPEAK_S) as silent:
            self._silent[silent] = network_of(peer)
            try:
                # Counted before the handshake, which may never begin.
                await writer.start_tls(self._tls, ssl_handshake_timeout=SPEAK_S)
                writer.write(frame(self._greeting))
                await writer.drain()
                return [await read_frame(reader), await read_frame(reader)]
            finally:
                self._silent.pop(silent, None)

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: str) -> None:
        token, csr = await self._listen(reader, writer, peer)
        try:
            certificate = await self._answer(token, csr, peer)
            reply = bytes([0]) + certificate.public_bytes(Encoding.DER)
        except JoinRefused as error:
            _LOG.warning("the authority refused a certificate to the node at %s: %s", peer, error)
            reply = bytes([error.reason]) + str(error).encode()[:1024]
        except (HeterorlError, OSError) as error:
            # Only the operator gets the reason.
            _LOG.error("the authority cannot issue a certificate to %s: %s", peer, error)
            reply = bytes([Refused.FAULT]) + b"the authority cannot issue certificates now"
        writer.write(frame(reply))
        await writer.drain()

    async def _answer(self, token: bytes, csr: bytes, peer: str) -> x509.Certificate:
        if len(token) != ID_BYTES + SECRET_BYTES:
            raise JoinRefused(Refused.TOKEN, "the token is not of this authority")
        request = read_request(csr)
        certificate = await asyncio.to_thread(
            self._enrolment.redeem,
            number=token[:ID_BYTES],
            secret=token[ID_BYTES:],
            request=request,
            wall_time=self._wall_time,
        )
        _LOG.info("the authority issued certificate %x to %s (uri=%s)", certificate.serial_number, peer, request.uri)
        return certificate


def network_of(address: str) -> str:
    """An IPv4 address, or the /64 that an IPv6 machine may have."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if parsed.version == 4:
        return address
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.ip_network((parsed, 64), strict=False))
