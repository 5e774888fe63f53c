"""Episodes on an OpenEnv server, over its web socket: `task.environment = "openenv:http://127.0.0.1:8000"`.

The server's /schema lists the fields of an action. An action of one text field is the policy's answer; for any other
the policy writes a JSON object. The score is the sum of all rewards.
"""

from __future__ import annotations

import hashlib
import json
import ssl
from collections.abc import Callable, Mapping
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit, urlunsplit
from urllib.request import build_opener

from heterorl.common.tasks.environments.environment import Action, Observation
from heterorl.common.tasks.rewards.http_reward import RETRIED, proxies_to
from heterorl.common.tasks.task import Message
from heterorl.common.types.common import peer_words

MAX_BYTES = 1 << 20
"""Largest message of the server."""
TIMEOUT_S = 10.0
"""For the schema and for opening a socket."""
_OPTIONAL = ("metadata",)
"""Fields of an action that its environment ignores."""


def load(url: str, _directory: str) -> tuple[Callable[[], OpenEnvEpisode], dict[str, Any]]:
    """Constructor of episodes on a server, and facts about it.

    Raises:
        ImportError: websockets is not installed.
        ConnectionError: nothing answers there for now.
        ValueError: no OpenEnv server answers there.
    """
    from websockets.sync.client import connect

    url = url.rstrip("/")
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ValueError(f"{url} is not a server address, such as http://127.0.0.1:8000")
    try:
        with build_opener(proxies_to(url)).open(f"{url}/schema", timeout=TIMEOUT_S) as reply:
            action = json.loads(reply.read(MAX_BYTES))["action"]
        fields = {name: each for name, each in action["properties"].items() if name not in _OPTIONAL}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        kind = ConnectionError if _is_outage(error) else ValueError
        raise kind(f"no OpenEnv server answers at {url}/schema: {error}") from error
    if not fields:
        raise ValueError(f"the actions at {url} have no fields")
    socket = urlunsplit(parts._replace(scheme=parts.scheme.replace("http", "ws"), path=f"{parts.path}/ws"))
    digest = hashlib.blake2b(json.dumps([url, action], sort_keys=True).encode(), digest_size=32).hexdigest()

    def open_socket() -> Any:
        return connect(socket, max_size=MAX_BYTES, open_timeout=TIMEOUT_S)

    return lambda: OpenEnvEpisode(open_socket, fields), {"digest": digest, "is_deterministic": False}


def _is_outage(error: Exception) -> bool:
    if isinstance(error, HTTPError):
        return error.code in RETRIED
    return isinstance(error, OSError) and not isinstance(getattr(error, "reason", error), ssl.SSLError)


class OpenEnvEpisode:
    """One session of the server, taken as not deterministic; implements Environment."""

    def __init__(self, open_socket: Callable[[], Any], fields: Mapping[str, Any]) -> None:
        self._open_socket, self._fields = open_socket, fields
        only = next(iter(fields))
        self._text = only if len(fields) == 1 and fields[only].get("type") == "string" else ""
        self._form = f"Write a JSON object with {', '.join(fields)} and nothing else."
        self._socket: Any = None
        self._total = 0.0

    def reset(self, row: Mapping[str, Any], *, seed: int) -> str:  # noqa: ARG002 - of the Protocol
        self._socket = self._open_socket()
        shown = _shown(self._asked("reset", {"seed": seed})["observation"])
        return shown if self._text else f"{shown}\n\n{self._form}".strip()

    def step(self, action: Action) -> Observation:
        """Take the answer's action; the policy reads errors of an invalid one."""
        try:
            stated = {self._text: action.answer.strip()} if self._text else _object(action.answer)
            said = self._asked("step", stated)
        except _NoActionError as error:
            return Observation((Message(role="user", content=f"{error} {self._form}"),))
        self._total += float(said.get("reward") or 0.0)
        return Observation((Message(role="user", content=_shown(said["observation"])),), done=said.get("done") is True)

    def score(self) -> float:
        return self._total

    def close(self) -> None:
        if self._socket is not None:
            self._socket.send(json.dumps({"type": "close"}))
            self._socket.close()

    def _asked(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        self._socket.send(json.dumps({"type": kind, "data": data}))
        reply = json.loads(self._socket.recv())
        said: dict[str, Any] = reply["data"]
        if reply["type"] == "error":
            words = peer_words(str(said.get("message")), most=200)
            if kind == "step" and said.get("code") == "VALIDATION_ERROR":
                raise _NoActionError(f"No action was taken: {words}")
            raise RuntimeError(f"the server answers {kind} by {said.get('code')}: {words}")
        return said


class _NoActionError(Exception):
    """A turn without a valid action; its argument is the reason."""


def _object(answer: str) -> dict[str, Any]:
    try:
        stated = json.loads(answer)
    except (ValueError, RecursionError):
        stated = None
    if not isinstance(stated, dict):
        raise _NoActionError("No action was taken: the answer is not a JSON object.")
    return stated


def _shown(observation: Mapping[str, Any]) -> str:
    values = list(observation.values())
    return values[0] if len(values) == 1 and isinstance(values[0], str) else json.dumps(observation, ensure_ascii=False)
