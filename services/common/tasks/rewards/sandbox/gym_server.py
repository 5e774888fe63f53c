"""Sandboxed server that imports reasoning-gym once and forks for each completion.

Verifiers of reasoning-gym run answers as Python, so a child scores one completion. The parent reads a bounded answer
until a deadline, then kills and waits for all other processes of its namespace; the kernel tells their processor time.
The parent is the first process there, which signals of the others do not reach, and undumpable, so that none can trace
it. After each completion it checks what they could change (limits, priorities) or leave (files): then its answer says
that another server must take its place.

A worker loads it (`worker_main`), in the sandbox by itself, so it does not import heterorl; the service makes prompts
with `Entries` too.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import hashlib
import importlib
import math
import os
import random
import resource
import select
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_SEED_STRIDE = 1_000_003
"""Item i of a dataset has the seed seed + i; datasets this far apart share no item."""
_HELD_OUT_SHARE = 4
"""One of this many texts is held out."""
_MAX_TRIES = 200
"""(3/4)**200 = 1e-25: without a held-out text by then, the dataset has too few texts."""
_CACHED_ENTRIES = 4096


class NoEntries(Exception):
    """The dataset is unknown, or too small to be split."""


class Entries:
    """Entries of a dataset, drawn again where on the split's wrong side."""

    def __init__(self, gym: Any, *, name: str, size: int, seed: int) -> None:
        """Datasets are made on use; `size` and first `seed` decide the entries."""
        self._gym, self._name, self._size, self._seed = gym, name, size, seed
        self._datasets: list[Any] = []
        # A learner uses two threads: a dataset made twice would take the next one's place.
        self._making = threading.Lock()
        self.find = functools.lru_cache(maxsize=_CACHED_ENTRIES)(self._find)

    def score(self, entry: Any, completion: str) -> float:
        """The dataset's own score; may run Python, so only inside the sandbox."""
        return float(self.dataset(0).score_answer(answer=completion.strip(), entry=entry))

    def dataset(self, attempt: int) -> Any:
        """The dataset of an attempt; raises NoEntries for an unknown name."""
        with self._making:
            while attempt >= len(self._datasets):
                seed = self._seed + len(self._datasets) * _SEED_STRIDE
                try:
                    self._datasets.append(self._gym.create_dataset(self._name, size=self._size, seed=seed))
                except (ValueError, KeyError, TypeError, AssertionError) as error:
                    raise NoEntries(f"reasoning_gym:{self._name}: {error}") from error
            return self._datasets[attempt]

    def _find(self, index: int, held_out: bool) -> Any:
        for attempt in range(_MAX_TRIES):
            entry = self.dataset(attempt)[index]
            if is_held_out(entry["question"]) is held_out:
                return entry
        raise NoEntries(f"reasoning_gym:{self._name} has too few different prompts to hold some out")


def is_held_out(text: str) -> bool:
    """Whether a prompt is held out: a function of its text."""
    return hashlib.blake2b(text.encode(), digest_size=8).digest()[0] % _HELD_OUT_SHARE == 0


MAX_ANSWER_BYTES = 1024
_LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]
_WORK = Path("/tmp")
"""The only writable directory."""
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE = 1, 4


def load(job: dict[str, Any]) -> tuple[Callable[[dict[str, Any]], dict[str, Any]], dict[str, Any]]:
    """Load a dataset; find prompts, and score their completions."""
    # The first process of its namespace may kill all others there.
    assert os.getpid() == 1, "it is in the sandbox"
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    entries = _load(job)
    first = entries.find(0, False)
    # Score the dataset's own answer: late imports happen before the first child, and errors show now.
    entries.score(first, str(first["answer"]))
    if libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
    _clear_work()
    # Frozen objects are not copied for every child.
    gc.freeze()
    before = _state()

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        entry = entries.find(request["index"], is_held_out(request["prompt"]))
        if entry["question"] != request["prompt"]:
            raise ValueError(f"prompt {request['index']} is not of this data set")
        if "completion" not in request:
            return {}
        try:
            said, share = _scored(entries, entry, request["completion"], cpu_s=job["cpu_s"], timeout_s=job["timeout_s"])
            return {"value": _value(said), "share": share, "is_full": not _is_whole(before)}
        except (MemoryError, OSError) as error:
            # The completion lowered a limit of this process.
            if isinstance(error, OSError) and _is_whole(before):
                raise
            return {"value": 0.0, "share": 1.0, "is_full": True}

    return answer, {}


def _load(job: dict[str, Any]) -> Entries:
    # Only packages that the service itself would import.
    sys.path[:] = [path for path in sys.path if Path(path).name not in ("site-packages", "dist-packages")]
    sys.path.extend(job["paths"])
    gym = importlib.import_module("reasoning_gym")
    version = getattr(gym, "__version__", "")
    if version != job["version"]:
        raise RuntimeError(f"it is reasoning-gym {version} there and {job['version']} here")
    return Entries(gym, name=job["name"], size=job["size"], seed=job["seed"])


def _scored(entries: Any, entry: Any, completion: str, *, cpu_s: float, timeout_s: float) -> tuple[str, float]:
    answer_out, answer_in = os.pipe()
    try:
        child = os.fork()
    except OSError:
        os.close(answer_out)
        os.close(answer_in)
        raise
    if child == 0:
        try:
            _score(answer_in, entries, entry, completion, cpu_s)
        finally:
            os._exit(0)
    os.close(answer_in)
    began = time.monotonic()
    try:
        answer = _read(answer_out, began + timeout_s).decode(errors="replace")
    finally:
        took_s = time.monotonic() - began
        os.close(answer_out)
        used_s = _end()
    return answer if used_s <= cpu_s else "", max(used_s / cpu_s, took_s / timeout_s)


def _score(answer_in: int, entries: Any, entry: Any, completion: str, cpu_s: float) -> None:
    """In the child, which keeps only its pipe."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nothing, number)
    answer = os.dup2(answer_in, 3)
    os.closerange(4, 256)
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # A second limit: a completion may stop the timer.
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(cpu_s) + 1,) * 2)
    # Equal texts get equal scores.
    random.seed(0)
    # A verifier that raises gives 0, as an empty answer does.
    os.write(answer, f"value {entries.score(entry, completion)!r}\n".encode())


def _read(number: int, deadline: float) -> bytes:
    """A line, or what arrived before deadline, bound or end."""
    poll = select.poll()
    poll.register(number, select.POLLIN)
    read = b""
    while b"\n" not in read and len(read) <= MAX_ANSWER_BYTES:
        # Text from before the deadline still counts.
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            break
        piece = os.read(number, MAX_ANSWER_BYTES)
        if not piece:
            break
        read += piece
    return read.partition(b"\n")[0]


def _end() -> float:
    """Kill and wait for a completion's processes; their processor time in seconds."""
    used_s = 0.0
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    while True:
        try:
            used = os.wait4(-1, 0)[2]
        except ChildProcessError:
            return used_s
        used_s += used.ru_utime + used.ru_stime


def _value(answer: str) -> float:
    kind, _, number = answer.partition(" ")
    try:
        value = float(number) if kind == "value" else 0.0
    except ValueError:
        return 0.0
    return min(max(value, 0.0), 1.0) if math.isfinite(value) else 0.0


def _state() -> list[Any]:
    """State that a completion could change for later ones."""
    limits = [resource.getrlimit(limit) for limit in _LIMITS]
    turns = [os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0), os.sched_getaffinity(0)]
    return [limits, turns, list(_WORK.iterdir())]


def _is_whole(before: list[Any]) -> bool:
    try:
        return _state() == before
    except OSError:
        return False


def _clear_work() -> None:
    """Remove files that imports wrote, so that a completion's files are seen."""
    for place in _WORK.iterdir():
        # An interpreter that lies here is mounted.
        if place.is_dir() and not place.is_mount():
            shutil.rmtree(place)
        elif not place.is_dir():
            place.unlink()
