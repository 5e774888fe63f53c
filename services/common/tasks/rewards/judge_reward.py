"""Reward by a language model that judges: a completion with a score.

Runs in a worker process. An answer without a score, or with one off the scale, is an error, not a score. The completion
stands in the question unchanged, so the rubric should mark its start and end.

An SQLite file caches scores by digest of the question, and holds the common request rate of a machine's processes. It
may be deleted at any time. In a running worker, a damaged, locked or full file costs requests, never scores. A worker
that starts, also in a run, refuses a file that it cannot open.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import sqlite3
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from heterorl.common.tasks.rewards.http_reward import Answer, Server, ServerRefused, deadline_of, read_key

_SCHEMA = """
CREATE TABLE IF NOT EXISTS judged (digest BLOB PRIMARY KEY, score REAL NOT NULL, number INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS judged_number ON judged (number);
CREATE TABLE IF NOT EXISTS places (server TEXT PRIMARY KEY, next REAL NOT NULL, taken REAL NOT NULL);
"""
_TRIMMED_SHARE = 16
_THOUGHTS = re.compile(r"\s*<think>.*?(?:</think>|\Z)|(?:(?!</?think>).)*+</think>\s*?(?=\n|\{|\Z)", re.DOTALL)
"""They begin a reply, perhaps in the prompt; elsewhere a judge writes of a completion's tags."""


class JudgeStore:
    """Cache file; one connection of one process."""

    def __init__(self, path: str, *, max_entries: int) -> None:
        """Open or create the file; raise ValueError except for a lock."""
        self._max_entries = max_entries
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            # Each statement is a transaction; transactions of other processes last milliseconds.
            self._connection = sqlite3.connect(path, timeout=1.0, isolation_level=None)
            self._connection.executescript("PRAGMA journal_mode = WAL; PRAGMA synchronous = OFF;" + _SCHEMA)
        except (OSError, sqlite3.Error) as error:
            # Processes that create it at once meet: only one of them changes its form.
            if getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY:
                return
            raise ValueError(f"cannot keep the judge's cache in {path}: {error}") from None

    def get(self, digest: bytes) -> float | None:
        row = None
        with suppress(sqlite3.Error):
            row = self._connection.execute("SELECT score FROM judged WHERE digest = ?", (digest,)).fetchone()
        # SQLite columns may hold any type.
        return float(row[0]) if row is not None and isinstance(row[0], int | float) else None

    def put(self, digest: bytes, score: float) -> None:
        with suppress(sqlite3.Error):
            number = self._connection.execute("SELECT coalesce(max(number), 0) + 1 FROM judged").fetchone()[0]
            self._connection.execute("INSERT OR REPLACE INTO judged VALUES (?, ?, ?)", (digest, score, number))
            if number % max(1, self._max_entries // _TRIMMED_SHARE) == 0:
                self._connection.execute("DELETE FROM judged WHERE number <= ?", (number - self._max_entries,))

    def take_place(self, server: str, *, interval_s: float, longest_s: float) -> float | None:
        """Reserve the next request to a server; requests are `interval_s` apart.

        Returns seconds until the request may be sent, 0 without a usable file. Beyond `longest_s` it
        returns None without a reservation.
        """
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                # One clock for all processes of the machine.
                now = time.monotonic()
                # The clock restarts with the machine: a reservation taken "later" than now is from before. An earlier
                # one lies at most as far ahead as its caller waited.
                row = self._connection.execute(
                    "SELECT next FROM places WHERE server = ? AND taken <= ?", (server, now)
                ).fetchone()
                place = now if row is None else max(now, row[0])
                if place - now > longest_s:
                    return None
                self._connection.execute(
                    "INSERT OR REPLACE INTO places VALUES (?, ?, ?)", (server, place + interval_s, now)
                )
                return place - now
            finally:
                self._connection.execute("COMMIT")
        except sqlite3.Error:
            return 0.0


def question_digest(parts: Sequence[object]) -> bytes:
    """Digest of all that a score depends on."""
    return hashlib.sha256(json.dumps(parts).encode()).digest()


FIELDS = ("prompt", "completion", "answer")
"""Placeholders of a rubric."""
_PLACE = re.compile(r"\{(" + "|".join(FIELDS) + r")\}")
_TRIES = 2
"""Requests for one score."""


def load(job: dict[str, Any]) -> tuple[Answer, dict[str, Any]]:
    """Answers requests of a worker."""
    key = read_key(job["api_key_env"], job["api_key_file"])
    server = Server(url=f"{job['url'].rstrip('/')}/chat/completions", key=key, ca_file=job["ca_file"])
    store = JudgeStore(job["cache_file"], max_entries=job["cache_entries"])

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        deadline = deadline_of(job)
        values = [
            _judged({**request, "completion": completion}, job, server=server, store=store, deadline=deadline)
            for completion in request["completions"]
        ]
        return {"values": values, "signatures": [""] * len(values)}

    return answer, {}


def _judged(
    request: dict[str, Any], job: dict[str, Any], *, server: Server, store: JudgeStore, deadline: float
) -> float:
    texts = [request[name] for name in FIELDS]
    low, high = float(job["low"]), float(job["high"])
    digest = question_digest([job["question"], low, high, *texts])
    score = store.get(digest)
    # Others may write the file: ignore a score off the scale.
    if score is None or not low <= score <= high:
        score = _asked(filled(job["rubric"], request), job, server=server, store=store, deadline=deadline)
        store.put(digest, score)
    return (score - low) / (high - low)


def _asked(question: str, job: dict[str, Any], *, server: Server, store: JudgeStore, deadline: float) -> float:
    document = {"model": job["model"], "messages": [{"role": "user", "content": question}], **job["request"]}
    problem = ""
    for _ in range(_TRIES):
        _wait(job, store, deadline=deadline)
        reply, words = server.post(document, deadline=deadline), ""
        try:
            words = words_of(reply)
            score = score_of(words, name=job["field"], pattern=job["pattern"])
        except ValueError as error:
            problem = f"{error} in the judge's words {words[-120:]!r}"
            continue
        if job["low"] <= score <= job["high"]:
            return score
        problem = f"the judge says {score:g}, outside [low, high] = [{job['low']:g}, {job['high']:g}]"
    raise ServerRefused(problem)


def _wait(job: dict[str, Any], store: JudgeStore, *, deadline: float) -> None:
    if not job["requests_per_minute"]:
        return
    left_s = deadline - time.monotonic()
    wait_s = store.take_place(job["url"], interval_s=60.0 / job["requests_per_minute"], longest_s=max(0.0, left_s))
    if wait_s is None:
        limit = f"{job['requests_per_minute']:g} requests_per_minute"
        raise ServerRefused(f"no place within {left_s:.1f} s under {limit}: raise them or task.reward_timeout_s")
    time.sleep(wait_s)  # noqa: TID251 - of a reward's worker, which is killed at its limit


def filled(rubric: str, texts: dict[str, Any]) -> str:
    """The rubric with its placeholders replaced; placeholders within the texts stay."""
    return _PLACE.sub(lambda place: str(texts[place[1]]), rubric)


def words_of(reply: dict[str, Any]) -> str:
    """Text of a chat completion; raises ValueError without one."""
    try:
        words = reply["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError):
        raise ServerRefused("the answer is not a chat completion") from None
    if not isinstance(words, str):
        raise ValueError("no text")
    return words


def score_of(words: str, *, name: str, pattern: str) -> float:
    """Score by the last match or object behind thoughts; raises ValueError otherwise."""
    if thoughts := _THOUGHTS.match(words):
        words = words[thoughts.end() :]
    if pattern:
        found = re.findall(pattern, words)
        if not found:
            raise ValueError(f"no match of {pattern!r}")
        value: Any = found[-1][0] if isinstance(found[-1], tuple) else found[-1]
    else:
        value = _last_object(words, name)
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"{name} is not a number")
    try:
        score = float(value)
    except (ValueError, OverflowError):
        raise ValueError(f"{value[:40]!r} is not a number" if isinstance(value, str) else "no number") from None
    if not math.isfinite(score):
        raise ValueError(f"{score} is not a finite number")
    return score


def _last_object(words: str, name: str) -> Any:
    # Models write line ends within texts.
    decoder = json.JSONDecoder(strict=False)
    found, last = None, -1
    place = len(words)
    while (place := words.rfind("{", 0, place)) >= 0:
        try:
            value, end = decoder.raw_decode(words, place)
        except (ValueError, RecursionError):
            continue
        # Only an object around it counts more than the last one.
        if name in value and end > last:
            found, last = value[name], end
    if last < 0:
        raise ValueError(f'no JSON object with "{name}"')
    stated = rf"""(?i)(?<!\w){re.escape(name)}["'*]*\s*[:=][\s"'*]*([-+]?(?:\d+\.?\d*|\.\d+)|null|none)"""
    later = re.findall(stated, words[last:])
    if any(one.lower() in ("null", "none") or float(one) != float(str(found)) for one in later):
        # A verdict that is cut or no JSON; the object before it may be an example.
        raise ValueError(f'the last "{name}" is in no JSON object')
    return found
