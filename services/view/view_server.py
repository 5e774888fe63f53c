"""Loopback HTTP server for one user, protected by a URL's secret.

The Host check stops DNS rebinding by foreign pages; the key of the printed URL stops other users of this machine. The
first visit moves the key from the URL into a cookie.
"""

from __future__ import annotations

import hmac
import logging
import re
import socketserver
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

from heterorl.common.process.address import listen_error

_OWN_HOST = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:[0-9]{1,5})?", re.IGNORECASE | re.ASCII)
KEY_FIELD = "key"
HEADERS = (
    (
        "Content-Security-Policy",
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    ),
    ("X-Content-Type-Options", "nosniff"),
    ("X-Frame-Options", "DENY"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Cache-Control", "no-store"),
)
"""Headers of every answer: no foreign content, no inline code, no frames, no caching."""


def is_own_host(hosts: list[str]) -> bool:
    """Whether one Host header names this machine; a tunnel may change ports."""
    return len(hosts) == 1 and _OWN_HOST.fullmatch(hosts[0].strip()) is not None


def cookie_name(port: int) -> str:
    """The cookie's name, with the port since all ports share cookies."""
    return f"heterorl-view-{port}"


def has_key(cookies: str, *, port: int, key: str) -> bool:
    """Whether a Cookie header holds the key."""
    pairs = (part.strip().partition("=") for part in cookies.split(";"))
    found = [value for name, _, value in pairs if name == cookie_name(port)]
    return any(_is_same(value, key) for value in found)


def take_key(query: str, *, key: str) -> str | None:
    """The query without the key; None if it is missing or wrong."""
    try:
        fields = parse_qsl(query, max_num_fields=100)
    except ValueError:
        return None
    if not any(name == KEY_FIELD and _is_same(value, key) for name, value in fields):
        return None
    return urlencode([(name, value) for name, value in fields if name != KEY_FIELD], errors="replace")


def _is_same(value: str, key: str) -> bool:
    return hmac.compare_digest(value.encode("utf-8", "replace"), key.encode("ascii"))


LOG = logging.getLogger(__name__)
IDLE_S = 30.0
"""Seconds after which an idle connection is closed."""
_TEXT = "text/plain; charset=utf-8"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One HTTP response."""

    status: HTTPStatus = HTTPStatus.OK
    content_type: str = "text/html; charset=utf-8"
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()


Respond = Callable[[str, str], Answer]
"""Answers the path and query of a URL."""


class ViewServer(ThreadingHTTPServer):
    """Serves `respond` from threads to clients that have `key`.
    Port 0 takes a free one. Raises as `listen_error`."""

    daemon_threads = True

    def __init__(self, respond: Respond, *, port: int, key: str) -> None:
        self.respond, self.key = respond, key
        try:
            super().__init__(("127.0.0.1", port), _Handler)
        except OSError as error:
            raise listen_error("--port", f"127.0.0.1:{port}", error) from error
        self._thread = threading.Thread(target=self.serve_forever, name="view", daemon=True, args=(0.05,))

    def server_bind(self) -> None:
        """Bind without a DNS lookup of 127.0.0.1."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = "127.0.0.1", self.server_address[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/?{KEY_FIELD}={self.key}"

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        if self._thread.is_alive():
            self.shutdown()
            self._thread.join()
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002 - of the standard library
        """Ignore browsers that disconnect; log every other error."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            LOG.error("the view failed at a request; reload the page", exc_info=sys.exception())


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "heterorl-view", ""
    timeout = IDLE_S
    server: ViewServer
    # Headers and body are sent together, so no packet waits for an acknowledgement.
    wbufsize = -1
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        self._send(self._answer(), with_body=True)

    def do_HEAD(self) -> None:
        self._send(self._answer(), with_body=False)

    def _answer(self) -> Answer:
        if not is_own_host(self.headers.get_all("Host") or []):
            body = b"This server answers only as 127.0.0.1 or localhost.\n"
            return Answer(status=HTTPStatus.MISDIRECTED_REQUEST, content_type=_TEXT, body=body)
        try:
            target = urlsplit(self.path)
        except ValueError:
            return Answer(status=HTTPStatus.BAD_REQUEST, content_type=_TEXT, body=b"The URL cannot be read.\n")
        port, key = self.server.server_port, self.server.key
        rest = take_key(target.query, key=key)
        if rest is not None:
            # A second slash would name another host.
            place = "/" + target.path.lstrip("/") + (f"?{rest}" if rest else "")
            cookie = f"{cookie_name(port)}={key}; HttpOnly; SameSite=Lax; Path=/"
            headers = (("Location", place), ("Set-Cookie", cookie))
            return Answer(status=HTTPStatus.SEE_OTHER, content_type=_TEXT, body=b"", headers=headers)
        if not has_key("; ".join(self.headers.get_all("Cookie") or []), port=port, key=key):
            body = b"Open the URL that `heterorl view` printed: it has the key of this page.\n"
            return Answer(status=HTTPStatus.FORBIDDEN, content_type=_TEXT, body=body)
        return self.server.respond(target.path, target.query)

    def _send(self, answer: Answer, *, with_body: bool) -> None:
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.content_type)
        self.send_header("Content-Length", str(len(answer.body)))
        for name, value in answer.headers:
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(answer.body)

    def end_headers(self) -> None:
        """Add HEADERS, also to errors that the standard library answers."""
        for name, value in HEADERS:
            self.send_header(name, value)
        super().end_headers()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - of the standard library
        LOG.debug("the view answered: %s", format % args)
