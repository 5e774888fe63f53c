"""Servers that compute rewards, for tests: real HTTP and TLS on a free port; what they answer is a function."""

from __future__ import annotations

import datetime
import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from tests.support.limits import WAIT_S

Reply = tuple[int, dict[str, str], bytes]


@dataclass
class RewardServer:
    """Answers each POST with what `reply` makes of its document; remembers documents and headers."""

    reply: Callable[[dict[str, Any]], Any]
    url: str = ""
    asked: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)


@contextmanager
def serving(
    reply: Callable[[dict[str, Any]], Any], *, tls: ssl.SSLContext | None = None, host: str = ""
) -> Iterator[RewardServer]:
    """A server for as long as the block runs.

    Args:
        reply: of a document: an object for status 200, or (status, headers, body).
        tls: serves https where it is given.
        host: a name or address of this machine; by default 127.0.0.1, and localhost of a certificate.
    """
    state = RewardServer(reply)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            document = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            state.asked.append(document)
            state.headers.append(dict(self.headers))
            state.paths.append(self.path)
            answer = state.reply(document)
            status, headers, body = answer if isinstance(answer, tuple) else (200, {}, json.dumps(answer).encode())
            try:
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)
            except OSError:
                pass

        def log_message(self, *args: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

        def handle_error(self, *args: Any) -> None:
            """A client that leaves is part of the tests."""

    server = Server((host or "127.0.0.1", 0), Handler)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    scheme, host = ("https", host or "localhost") if tls is not None else ("http", host or "127.0.0.1")
    state.url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{server.server_address[1]}"
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join(WAIT_S)


def localhost_tls(directory: Path) -> tuple[ssl.SSLContext, Path]:
    """A server's context for the name localhost, and the file of the only authority that knows it: itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    path = directory / "localhost.crt"
    path.write_bytes(certificate.public_bytes(Encoding.PEM))
    (directory / "localhost.key").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(path, directory / "localhost.key")
    return context, path
