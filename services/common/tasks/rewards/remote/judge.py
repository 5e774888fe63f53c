"""A language model that judges: one chat completion for each text, from whose words a score is read.

Runs in a worker process. Guarantees: what the judge says without a score, or with one off its scale, is an error and no
score; the completion stands in the question as it is, so a rubric says where it begins and ends.
"""

from __future__ import annotations

import json
import math
import re
import time
from typing import Any

from heterorl.common.tasks.rewards.remote.post import Refused, Server, read_key
from heterorl.common.tasks.rewards.remote.service import Answer, deadline_of
from heterorl.common.tasks.rewards.remote.store import JudgeStore, question_digest

FIELDS = ("prompt", "completion", "answer")
"""What a rubric may name in braces."""
_PLACE = re.compile(r"\{(" + "|".join(FIELDS) + r")\}")
_TRIES = 2
"""Questions until a judge's words have a score."""


def load(job: dict[str, Any]) -> Answer:
    """What answers requests.

    Raises:
        ValueError: its key cannot be read, or its cache not opened.
    """
    key = read_key(job["key_env"], job["key_file"])
    server = Server(url=f"{job['url'].rstrip('/')}/chat/completions", key=key, ca_file=job["ca_file"])
    store = JudgeStore(job["cache_file"], max_entries=job["cache_entries"])

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        deadline = deadline_of(job)
        values = [
            _judged({**request, "completion": completion}, job, server=server, store=store, deadline=deadline)
            for completion in request["completions"]
        ]
        return {"values": values, "signatures": [""] * len(values)}

    return answer


def _judged(
    request: dict[str, Any], job: dict[str, Any], *, server: Server, store: JudgeStore, deadline: float
) -> float:
    texts = [request[name] for name in FIELDS]
    low, high = float(job["low"]), float(job["high"])
    digest = question_digest([job["question"], low, high, *texts])
    score = store.get(digest)
    # A file can be written by others: what no judge may say was not said.
    if score is None or not low <= score <= high:
        score = _asked(filled(job["rubric"], request), job, server=server, store=store, deadline=deadline)
        store.put(digest, score)
    return (score - low) / (high - low)


def _asked(question: str, job: dict[str, Any], *, server: Server, store: JudgeStore, deadline: float) -> float:
    document = {
        "model": job["model"],
        "messages": [{"role": "user", "content": question}],
        "temperature": job["temperature"],
        "max_tokens": job["max_tokens"],
    }
    problem = ""
    for _ in range(_TRIES):
        _wait(job, store, deadline=deadline)
        words = words_of(server.post(document, deadline=deadline))
        try:
            score = score_of(words, name=job["field"], pattern=job["pattern"])
        except ValueError as error:
            problem = f"{error} in the judge's words {words[-120:]!r}"
            continue
        if job["low"] <= score <= job["high"]:
            return score
        problem = f"the judge says {score:g}, outside [low, high] = [{job['low']:g}, {job['high']:g}]"
    raise Refused(problem)


def _wait(job: dict[str, Any], store: JudgeStore, *, deadline: float) -> None:
    if not job["requests_per_minute"]:
        return
    left_s = deadline - time.monotonic()
    wait_s = store.take_place(job["url"], interval_s=60.0 / job["requests_per_minute"], longest_s=max(0.0, left_s))
    if wait_s is None:
        limit = f"{job['requests_per_minute']:g} requests_per_minute"
        raise Refused(f"no place within {left_s:.1f} s under {limit}: raise them or task.reward_timeout_s")
    time.sleep(wait_s)  # noqa: TID251 - of a reward's worker, which is killed at its limit


def filled(rubric: str, texts: dict[str, Any]) -> str:
    """The rubric with texts in their places; what stands in a text is no place."""
    return _PLACE.sub(lambda place: str(texts[place[1]]), rubric)


def words_of(reply: dict[str, Any]) -> str:
    """The text of a chat completion.

    Raises:
        Refused: it has none.
    """
    try:
        words = reply["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError):
        raise Refused("the answer is no chat completion") from None
    if not isinstance(words, str):
        raise Refused("the chat completion has no text")
    return words


def score_of(words: str, *, name: str, pattern: str) -> float:
    """The score in a judge's words: the last match of a pattern, or else a field of the last JSON object.

    Raises:
        ValueError: there is none.
    """
    if pattern:
        found = re.findall(pattern, words)
        if not found:
            raise ValueError(f"no match of {pattern!r}")
        value: Any = found[-1][0] if isinstance(found[-1], tuple) else found[-1]
    else:
        value = _last_object(words, name)
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"{name} is no number")
    try:
        score = float(value)
    except ValueError:
        raise ValueError(f"{value[:40]!r} is no number" if isinstance(value, str) else "no number") from None
    if not math.isfinite(score):
        raise ValueError(f"{score} is no finite number")
    return score


def _last_object(words: str, name: str) -> Any:
    decoder = json.JSONDecoder()
    place = len(words)
    while (place := words.rfind("{", 0, place)) >= 0:
        try:
            value, _ = decoder.raw_decode(words, place)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict) and name in value:
            return value[name]
    raise ValueError(f'no JSON object with "{name}"')
