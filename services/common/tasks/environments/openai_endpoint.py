"""OpenAI-compatible endpoint of one episode, on the loopback of this machine.

It answers only holders of its key, until `close`. Other programs of the machine hold a bounded number of its threads,
each for a bounded time. It takes one request at a time. An equal request waits
for or gets the same answer; a broken connection makes no second turn. Requests come in threads of their own and wait
until the environment calls `answer` or `refuse_rest`.
"""

import contextlib
import hmac
import json
import re
import secrets
import socket
import socketserver
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import urlsplit

from heterorl.common.tasks.environments.environment import Action, Observation
from heterorl.common.tasks.environments.openai_chat import (
    OVER,
    History,
    Request,
    RequestRefused,
    chunks,
    completion,
    read_request,
)
from heterorl.common.tasks.task import Message

MODEL = "policy"
"""Name of the only model; other names are accepted."""
MAX_BODY_BYTES = 16 << 20
"""Largest request, checked before parsing."""
KEEPALIVE_S = 10.0
"""Seconds between comments in a stream that waits for its turn."""
MOST_STRANGERS, STRANGER_S = 8, 10.0
"""Connections that have not shown the key, and seconds that each waits for bytes; one more closes the oldest."""
_CHAT, _MODELS = "/v1/chat/completions", "/v1/models"


@dataclass(slots=True, eq=False)
class _Turn:
    request: Request
    number: int
    done: threading.Event = field(default_factory=threading.Event)
    message: dict[str, Any] = field(default_factory=dict)
    is_cut: bool = False
    refusal: RequestRefused | None = None


class Endpoint:
    """The server, and its conversation."""

    def __init__(self, on_request: Callable[[tuple[Message, ...]], None], *, keepalive_s: float = KEEPALIVE_S) -> None:
        """Bind a port of 127.0.0.1; `start` answers there.

        The request's thread calls `on_request` with the messages that a new request adds.
        """
        self.api_key = secrets.token_urlsafe(24)
        self.keepalive_s = keepalive_s
        self.history = History()
        self._on_request = on_request
        self._lock = threading.Lock()
        self._turn: _Turn | None = None
        self._refusal: RequestRefused | None = None
        self._server = _Server(self)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True, name="endpoint")

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def start(self) -> None:
        self._thread.start()

    def answer(self, action: Action) -> None:
        with self._lock:
            turn = self._turn
            assert turn is not None, "a request is open"
            turn.message, turn.is_cut = self.history.answer(action), action.is_cut
            turn.done.set()

    def refuse_rest(self, refusal: RequestRefused) -> None:
        with self._lock:
            self._refusal = refusal
            if self._turn is not None and not self._turn.done.is_set():
                self._turn.refusal = refusal
                self._turn.done.set()

    def close(self) -> None:
        self.refuse_rest(RequestRefused("the episode has ended", status=500))
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()

    def asked(self, request: Request) -> _Turn:
        """Turn of a request or an earlier equal; raises RequestRefused during another."""
        with self._lock:
            turn = self._turn
            if turn is not None and turn.request.asks_as(request):
                return turn
            if self._refusal is not None:
                raise self._refusal
            if turn is not None and not turn.done.is_set():
                raise RequestRefused("another request is open: an episode is one conversation, one turn at a time")
            added = self.history.extend(request)
            self._turn = turn = _Turn(request, number=turn.number + 1 if turn else 1)
            self._on_request(added)
            return turn


class EndpointEpisode(ABC):
    """An episode whose agent asks an endpoint: each request is a turn."""

    _endpoint: Endpoint

    @abstractmethod
    def _next(self) -> tuple[Message, ...] | None:
        """Messages of the next request; None at the end."""

    def _first(self, agent: str) -> tuple[Message, ...]:
        first = self._next()
        if first is None:
            raise RuntimeError(f"{agent} ended before its first request")
        return first

    @property
    def shown_tools(self) -> tuple[Mapping[str, Any], ...]:
        return self._endpoint.history.tools or ()

    def step(self, action: Action) -> Observation | None:
        """Answer the request; the next one's messages, or None at the end."""
        self._endpoint.answer(action)
        added = self._next()
        return None if added is None else Observation(added)


def over() -> RequestRefused:
    """Refusal after a limit ended the episode."""
    words = "the episode is over: it has used up its turns, tokens or seconds; return the reward of what was reached"
    return RequestRefused(words, code=OVER)


class _Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._strangers: list[Any] = []
        self._lock = threading.Lock()
        super().__init__(("127.0.0.1", 0), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._strangers.append(request)
            if len(self._strangers) > MOST_STRANGERS:
                with contextlib.suppress(OSError):
                    self._strangers.pop(0).shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def trust(self, request: Any) -> None:
        """A connection has shown the key, or ends."""
        with self._lock, contextlib.suppress(ValueError):
            self._strangers.remove(request)

    def close_request(self, request: Any) -> None:
        self.trust(request)
        super().close_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore the error: a program may break its connections."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server
    timeout = STRANGER_S
    _is_last = True
    """Whether the program wants its connection closed after the answer."""

    def do_GET(self) -> None:
        self._answered(_MODELS, self._models)

    def do_POST(self) -> None:
        self._answered(_CHAT, self._chat)

    def log_message(self, *_: Any) -> None:
        """Keep requests out of the log."""

    def _answered(self, place: str, handle: Callable[[], None]) -> None:
        try:
            # The unread rest of a refused body must not be read as another request.
            self._is_last, self.close_connection = self.close_connection, True
            stated = self.headers.get("Authorization", "").encode()
            if not hmac.compare_digest(stated, f"Bearer {self.server.endpoint.api_key}".encode()):
                raise RequestRefused("the key belongs to another episode", status=401, code="invalid_api_key")
            self.server.trust(self.connection)
            self.connection.settimeout(None)
            if re.sub("/+", "/", urlsplit(self.path).path) != place:
                words = f"there is no {self.command} {self.path[:100]}, only POST {_CHAT} and GET {_MODELS}"
                raise RequestRefused(words, status=404)
            handle()
        except RequestRefused as refused:
            self._send(refused.status, refused.body)
        except OSError:
            self.close_connection = True
        except Exception as error:  # noqa: BLE001 - the program is told, and may ask again
            self._send(500, RequestRefused(f"{type(error).__name__}: {error}", status=500).body)

    def _models(self) -> None:
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "heterorl"}
        self._send(200, {"object": "list", "data": [model]})

    def _chat(self) -> None:
        request = read_request(self._body())
        turn = self.server.endpoint.asked(request)
        if request.is_streamed:
            self._stream(turn, request)
            return
        turn.done.wait()
        if turn.refusal is not None:
            raise turn.refusal
        made: Any = {"number": turn.number, "is_cut": turn.is_cut, "created": int(time.time())}
        self.close_connection = self._is_last
        self._send(200, completion(turn.message, request, **made))

    def _stream(self, turn: _Turn, request: Request) -> None:
        """Server-sent events of a turn; comments until it ends."""
        is_done = turn.done.wait(self.server.endpoint.keepalive_s)
        if is_done and turn.refusal is not None:
            raise turn.refusal
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        while not is_done:
            self.wfile.write(b": the turn is being drawn\n\n")
            is_done = turn.done.wait(self.server.endpoint.keepalive_s)
        if turn.refusal is not None:
            pieces: Any = [turn.refusal.body]
        else:
            made: Any = {"number": turn.number, "is_cut": turn.is_cut, "created": int(time.time())}
            pieces = chunks(turn.message, request, **made)
        for piece in pieces:
            self.wfile.write(b"data: " + json.dumps(piece).encode() + b"\n\n")
        self.wfile.write(b"data: [DONE]\n\n")

    def _body(self) -> Any:
        content = self.rfile.read(_size(self.headers.get("Content-Length", "")))
        try:
            return json.loads(content)
        except (ValueError, RecursionError) as error:
            raise RequestRefused(f"the body is not JSON: {error}") from None

    def _send(self, status: int, body: Any) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(content)


def _size(digits: str) -> int:
    """Stated bytes of a body; raises RequestRefused."""
    if not re.fullmatch("[0-9]+", digits):
        raise RequestRefused("a request needs a Content-Length", status=411)
    if len(digits.lstrip("0")) > len(str(MAX_BODY_BYTES)) or int(digits) > MAX_BODY_BYTES:
        raise RequestRefused(f"a request has at most {MAX_BODY_BYTES} bytes", status=413)
    return int(digits)
