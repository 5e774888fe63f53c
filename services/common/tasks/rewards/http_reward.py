"""HTTP client of a reward service, in a worker process.

    request   {"version": 1, "reward": "style", "prompt_index": 7, "prompt": "...",
               "messages": [{"role": "user", "content": "..."}], "answer": "...", "completions": ["...", ...]}
    answer    {"rewards": [0.5, ...], "signatures": ["64 bytes in hex", ...]}

One value for each completion, in order; `signatures` are optional (heterorl.common.tasks.rewards.remote_reward).

The worker is killed at its time limit; until then it retries transient failures with backoff. It checks the size of an
answer before it parses it, verifies the server's certificate, follows no redirect, and keeps the key out of errors.
"""

from __future__ import annotations

import http.client
import json
import math
import os
import random
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

VERSION = 1
MARGIN_S = 0.25
"""Left of the time limit for the answer to the service."""

Answer = Callable[[dict[str, Any]], dict[str, Any]]


def load(job: dict[str, Any]) -> tuple[Answer, dict[str, Any]]:
    """Answers requests of a worker."""
    server = Server(url=job["url"], key=read_key(job["api_key_env"], job["api_key_file"]), ca_file=job["ca_file"])

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        document = {"version": VERSION, "reward": job["name"], **{name: request[name] for name in _ASKED}}
        reply = server.post(document, deadline=deadline_of(job))
        return values_of(reply, count=len(request["completions"]), low=job["low"], high=job["high"])

    return answer, {}


_ASKED = ("prompt_index", "prompt", "messages", "answer", "completions")


def deadline_of(job: dict[str, Any]) -> float:
    """Deadline by the monotonic clock, shortly before the pool kills this process."""
    timeout_s = float(job["timeout_s"])
    return time.monotonic() + timeout_s - min(MARGIN_S, 0.1 * timeout_s)


def values_of(reply: dict[str, Any], *, count: int, low: float, high: float) -> dict[str, Any]:
    """Values and signatures of an answer; raises ServerRefused for invalid ones."""
    values, signatures = reply.get("rewards"), reply.get("signatures", [])
    if not isinstance(values, list) or len(values) != count:
        raise ServerRefused(f'"rewards" is not a list of {count} numbers')
    for value in values:
        # bool is a subclass of int.
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ServerRefused(f'"rewards" holds {value!r:.60}, which is not a finite number')
        if not low <= value <= high:
            raise ServerRefused(f"a reward of {value:g}, outside [low, high] = [{low:g}, {high:g}]")
    is_list = isinstance(signatures, list) and len(signatures) in (0, count)
    if not is_list or not all(isinstance(text, str) and len(text) <= 128 for text in signatures):
        raise ServerRefused('"signatures" is not a list of one text for each reward')
    return {"values": [float(value) for value in values], "signatures": signatures or [""] * count}


MAX_REPLY_BYTES = 1 << 20
MAX_KEY_BYTES = 8192
MAX_WORDS = 200
"""Shown characters of a refusal."""
RETRIED = (408, 425, 429, 500, 502, 503, 504)
"""Statuses of a server that may answer later."""
_FIRST_WAIT_S = 0.2
_LONGEST_WAIT_S = 5.0


class ServerRefused(Exception):
    """An answer of the server that a retry would not change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """Address of a server; `key` goes only into the Authorization header."""

    url: str
    key: str = field(default="", repr=False)
    ca_file: str = ""

    def post(self, document: Mapping[str, Any], *, deadline: float) -> dict[str, Any]:
        """The server's JSON object; transient failures are retried until the deadline.

        Raises:
            ServerRefused: a permanent status, no JSON object, or too large an answer.
            TimeoutError: no answer before the deadline; states the last failure.
        """
        body = json.dumps(document).encode()
        wait_s, last = _FIRST_WAIT_S, "no answer"
        while True:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(f"{last}; no time is left to try again")
            asked_s = 0.0
            try:
                return self._parsed(self._once(body, timeout_s=left_s, deadline=deadline))
            except urllib.error.HTTPError as error:
                with error:
                    last = f"status {error.code}: {self._start_of(error)}"
                if error.code not in RETRIED:
                    raise ServerRefused(last) from None
                asked_s = _seconds(error.headers.get("Retry-After", ""))
            except ssl.SSLError as error:
                raise ServerRefused(self._words(f"TLS: {error}")) from None
            except (OSError, http.client.HTTPException) as error:
                reason = getattr(error, "reason", error)
                if isinstance(reason, ssl.SSLError):
                    raise ServerRefused(self._words(f"TLS: {reason}")) from None
                last = self._words(f"{type(reason).__name__}: {reason}")
            # Jitter: callers that failed together must not retry together.
            pause_s = max(asked_s, wait_s * random.uniform(0.5, 1.0))
            if time.monotonic() + pause_s >= deadline:
                raise TimeoutError(f"{last}; no time is left to try again")
            time.sleep(pause_s)  # noqa: TID251 - of a reward's worker, which is killed at its limit
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    def _once(self, body: bytes, *, timeout_s: float, deadline: float) -> bytes:
        headers = {"Content-Type": "application/json", "Accept": "application/json", "User-Agent": "heterorl"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        request = urllib.request.Request(self.url, data=body, headers=headers, method="POST")
        context = ssl.create_default_context(cafile=self.ca_file or None)
        opener = urllib.request.build_opener(
            _NoRedirect, urllib.request.HTTPSHandler(context=context), proxies_to(self.url)
        )
        with opener.open(request, timeout=timeout_s) as response:
            received = b""
            while piece := response.read1(65536):
                received += piece
                if len(received) > MAX_REPLY_BYTES:
                    raise ServerRefused(f"an answer of more than {MAX_REPLY_BYTES} bytes")
                if time.monotonic() > deadline:
                    raise TimeoutError("the answer did not end in time")
            if response.length:
                # `read1` takes a connection that ended for the end of the answer.
                raise http.client.IncompleteRead(received, response.length)
            return received

    def _parsed(self, data: bytes) -> dict[str, Any]:
        try:
            reply = json.loads(data)
        except (ValueError, RecursionError):
            raise ServerRefused(f"the answer is not JSON: {self._start(data)!r}") from None
        if not isinstance(reply, dict):
            raise ServerRefused("the answer is not a JSON object")
        return reply

    def _start_of(self, error: urllib.error.HTTPError) -> str:
        try:
            # The key's length more, so that the cut does not divide a key.
            return self._start(error.read(MAX_WORDS + len(self.key)))
        except (OSError, http.client.HTTPException):
            return ""

    def _start(self, data: bytes) -> str:
        return self._words(data[: MAX_WORDS + len(self.key)].decode(errors="replace"))[:MAX_WORDS]

    def _words(self, text: str) -> str:
        # A server may quote the request.
        return text.replace(self.key, "***") if self.key else text


def proxies_to(url: str) -> urllib.request.ProxyHandler:
    """The environment's proxies, or none to ::1.

    NO_PROXY cannot name it for all: urllib wants [::1] there, which httpx refuses.
    """
    return urllib.request.ProxyHandler({} if urlsplit(url).hostname == "::1" else None)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: the key is only for the named server."""

    def redirect_request(self, *_: Any) -> None:
        return None


def read_key(variable: str, file: str) -> str:
    """Key of `variable` or `file`, else empty; raises ValueError if unreadable."""
    if variable:
        key = os.environ.get(variable, "")
        if not key:
            raise ValueError(f"the environment variable {variable} is not set here")
    elif file:
        try:
            with Path(file).open("rb") as stream:
                key = stream.read(MAX_KEY_BYTES).decode("ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"no key can be read from {file}: {type(error).__name__}") from None
    else:
        return ""
    if not key or not key.isprintable():
        raise ValueError(f"{variable or file} holds no key on one line")
    return key


def _seconds(text: str) -> float:
    try:
        # In this order NaN becomes 0; a wait beyond the deadline ends the call.
        return max(0.0, float(text))
    except ValueError:
        return 0.0
