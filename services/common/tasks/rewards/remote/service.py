"""A reward service: prompt and completions are posted as JSON, values come back. Runs in a worker process.

    request   {"version": 1, "reward": "style", "prompt_index": 7, "prompt": "...",
               "messages": [{"role": "user", "content": "..."}], "answer": "...", "completions": ["...", ...]}
    answer    {"rewards": [0.5, ...], "signatures": ["64 bytes in hex", ...]}

One value for each completion, in order; `signatures` may be left out (heterorl.common.tasks.rewards.remote.proof).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from heterorl.common.tasks.rewards.remote.post import Refused, Server, read_key

VERSION = 1
MARGIN_S = 0.25
"""What is left of the time limit for the way back."""

Answer = Callable[[dict[str, Any]], dict[str, Any]]


def load(job: dict[str, Any]) -> Answer:
    """What answers requests.

    Raises:
        ValueError: its key cannot be read.
    """
    server = Server(url=job["url"], key=read_key(job["key_env"], job["key_file"]), ca_file=job["ca_file"])

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        document = {"version": VERSION, "reward": job["name"], **{name: request[name] for name in _ASKED}}
        reply = server.post(document, deadline=deadline_of(job))
        return values_of(reply, count=len(request["completions"]), low=job["low"], high=job["high"])

    return answer


_ASKED = ("prompt_index", "prompt", "messages", "answer", "completions")


def deadline_of(job: dict[str, Any]) -> float:
    """When to give up, by the monotonic clock: a little before this process is killed."""
    timeout_s = float(job["timeout_s"])
    return time.monotonic() + timeout_s - min(MARGIN_S, 0.1 * timeout_s)


def values_of(reply: dict[str, Any], *, count: int, low: float, high: float) -> dict[str, Any]:
    """The values of an answer, with their signatures.

    Raises:
        Refused: it has other than one number within the bounds for each completion.
    """
    values, signatures = reply.get("rewards"), reply.get("signatures", [])
    if not isinstance(values, list) or len(values) != count:
        raise Refused(f'"rewards" is no list of {count} numbers')
    for value in values:
        # A bool is an int to Python.
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise Refused(f'"rewards" holds {value!r:.60}, which is no finite number')
        if not low <= value <= high:
            raise Refused(f"a reward of {value:g}, outside [low, high] = [{low:g}, {high:g}]")
    is_list = isinstance(signatures, list) and len(signatures) in (0, count)
    if not is_list or not all(isinstance(text, str) and len(text) <= 128 for text in signatures):
        raise Refused('"signatures" is no list of one text for each reward')
    return {"values": [float(value) for value in values], "signatures": signatures or [""] * count}
