"""Processes that compute rewards, or hold episodes, and are killed when they take too long.

A symbolic comparison of a hostile answer, or somebody's own function, can run for hours and ignore signals: no thread
and no alarm will do. What is loaded stays loaded from one reward to the next; a process that hung is replaced.

A request's limit begins when a worker that is ready is asked: neither the wait for a free worker nor a worker's start
counts. It is processor time, so that a busy machine gives the same values; a longer one by the clock ends what sleeps.
"""

from __future__ import annotations

import hashlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from heterorl.common.errors import RewardError
from heterorl.common.types.common import peer_words

SCRIPT = Path(__file__).parent / "worker_main.py"
START_TIMEOUT_S = 120.0
"""For what a reward imports; it counts against no answer."""
PATIENCE = 4.0
"""Seconds by the clock for each of processor time, for what sleeps or waits."""
MAX_REPLY_BYTES = 1 << 20
START_AFTER_S = 0.25
"""About what a start costs: for less, callers wait for the processes that run."""
MAX_WORDS = 600
"""Characters of an error and the line that raised it."""
_GRACE_S = 5.0
"""The worker's own limit comes so much later than its parent's, which it only replaces."""


class LoadFailed(RewardError):
    """The worker runs and cannot load what it was told to; `kind` says what is wrong."""

    def __init__(self, kind: str, text: str) -> None:
        self.kind = kind
        super().__init__(text)


class WorkerLost(RewardError):
    """The worker died or took too long, and what it held is gone."""


class OutOfTime(WorkerLost):
    """A request took all its processor time; the kernel counts it and ends the worker."""


class WorkerProcess:
    """One worker process, started when it is first needed."""

    def __init__(self, job: Mapping[str, Any], *, timeout_s: float, cpu_s: float) -> None:
        self.timeout_s, self.cpu_s = timeout_s, cpu_s
        self.process: subprocess.Popen[bytes] | None = None
        self._job = dict(job)
        self._end: Any = None

    def start(self) -> dict[str, Any]:
        """Start it anew; returns what it says of what it loaded.

        Raises:
            LoadFailed: it cannot load it.
            RewardError: it ended or said nothing in time.
        """
        self.close()
        # -P: no file of the working directory stands for a package. A session of its own: Ctrl-C is the service's.
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-P", str(SCRIPT)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
                # Sets of texts have one order in all of them.
                env={**os.environ, "PYTHONHASHSEED": "0"},
            )
        except OSError as error:
            raise RewardError(f"the system starts no process that computes rewards: {error}") from error
        self._end = weakref.finalize(self, _kill, self.process)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
        try:
            reply = self._exchange(self._job, START_TIMEOUT_S)
        except (OSError, ValueError, TimeoutError) as error:
            self.close()
            raise RewardError(f"the process that computes rewards does not start: {error}") from error
        if "failed" in reply:
            self.close()
            raise LoadFailed(reply["failed"], reply["text"])
        return reply

    @property
    def is_running(self) -> bool:
        """Whether it was started and has not ended."""
        return self.process is not None and self.process.poll() is None

    def ask(self, request: Mapping[str, Any], *, starts: bool = True) -> dict[str, Any]:
        """The answer to one request.

        A process that has ended is not started again where it held something (`starts` is false).

        Raises:
            OutOfTime: it took all its processor time.
            WorkerLost: it died or took too long.
            RewardError: it answered that it failed.
        """
        if not self.is_running:
            if not starts:
                raise WorkerLost("its process has ended")
            self.start()
        try:
            limits = {"cpu_s": self.cpu_s, "limit_s": self.timeout_s + _GRACE_S}
            reply = self._exchange({**request, **limits}, self.timeout_s)
        except (OSError, ValueError, TimeoutError) as error:
            is_spent = self.process is not None and self.process.poll() == -signal.SIGPROF
            self.close()
            if is_spent:
                raise OutOfTime(f"no answer in {self.cpu_s:g} s of processor time") from error
            raise WorkerLost(str(error) or "no answer") from error
        if "error" in reply:
            # It may hold a completion, which is a peer's.
            raise RewardError(peer_words(str(reply["error"]), most=MAX_WORDS))
        return reply

    def kill(self) -> None:
        """Kill it while another thread waits for its answer, which gets an error."""
        process = self.process
        if process is not None:
            _signal(process)

    def close(self) -> None:
        """Kill it, with whatever it started."""
        if self._end is not None:
            self._end()
        self.process = self._end = None

    def _exchange(self, message: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        assert self.process is not None
        reply = json.loads(converse(self.process, json.dumps(message).encode() + b"\n", timeout_s))
        if not isinstance(reply, dict):
            raise ValueError("the answer is no object")
        return reply


class WorkerPool:
    """So many processes of one kind; callers in other threads wait for a free one.

    What is not needed is never started: another process only when somebody had to wait all the time for START_AFTER_S.
    """

    def __init__(
        self,
        job: Mapping[str, Any],
        *,
        timeout_s: float,
        cpu_s: float = 0.0,
        num_workers: int = 1,
        start_after_s: float | None = None,
    ) -> None:
        """Start nothing yet.

        `job` is what a worker loads (`worker_main.py`). An answer takes at most `timeout_s` by the clock and `cpu_s` of
        processor time; 0 is no bound. Callers wait `start_after_s` for a running process before another starts; None is
        START_AFTER_S.
        """
        self._start_after_s = start_after_s
        self.workers = [WorkerProcess(job, timeout_s=timeout_s, cpu_s=cpu_s) for _ in range(num_workers)]
        self._idle = list(reversed(self.workers))
        self._running: list[WorkerProcess] = []
        self._changed = threading.Condition()
        self._num_waiting = 0
        self._busy_since: float | None = None
        self._is_closed = False
        self._has_loaded = False

    def start(self) -> dict[str, Any]:
        """Start the first worker; see WorkerProcess.start."""
        with self._one() as worker:
            facts = worker.start()
            self._has_loaded = True
            return facts

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The answer of a free worker; see WorkerProcess.ask. Each of those before ends by its own time limit.

        Raises:
            LoadFailed: no worker could load its job yet.
            RewardError: there is no answer.
        """
        with self._one() as worker:
            try:
                reply = worker.ask(request)
            except LoadFailed as error:
                if not self._has_loaded:
                    raise
                # What it needs was there before; a full memory, say, is no mistake of a configuration.
                raise RewardError(f"the process that computes rewards does not start again: {error}") from error
            self._has_loaded = True
            return reply

    def close(self) -> None:
        """Kill all workers; who waits for an answer gets an error, and nothing starts again."""
        with self._changed:
            self._is_closed = True
            free, self._idle, self._running = self._idle + self._running, [], []
            for worker in self.workers:
                # Its caller closes what is in use: a number of a pipe may be another file's at once.
                worker.close() if worker in free else worker.kill()
            self._changed.notify_all()

    @contextmanager
    def _one(self) -> Iterator[WorkerProcess]:
        worker = self.take()
        try:
            yield worker
        finally:
            self.give(worker)

    def give(self, worker: WorkerProcess) -> None:
        """Give back a process that was taken."""
        with self._changed:
            if self._is_closed:
                worker.close()
            else:
                (self._idle if worker.process is None else self._running).append(worker)
                self._changed.notify()

    def take(self) -> WorkerProcess:
        """A process that runs; one that does not yet where none does, or those that do were all in use for long.

        Raises:
            RewardError: the pool is closed.
        """
        with self._changed:
            if self._running and not self._num_waiting:
                self._busy_since = None
            elif not self._running and len(self._idle) < len(self.workers):
                self._wait()
            if self._is_closed:
                raise RewardError("rewards are computed no longer")
            # The last one used first.
            return (self._running or self._idle).pop()

    def _wait(self) -> None:
        self._num_waiting += 1
        self._busy_since = self._busy_since or time.monotonic()
        after_s = START_AFTER_S if self._start_after_s is None else self._start_after_s
        while not (self._running or self._is_closed):
            left_s = self._busy_since + after_s - time.monotonic()
            if self._idle and left_s <= 0:
                self._busy_since = time.monotonic()
                break
            self._changed.wait(left_s if self._idle else None)
        self._num_waiting -= 1


def _signal(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError, PermissionError):
        # Until it is waited for, its number is nobody else's.
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)


def _kill(process: subprocess.Popen[bytes]) -> None:
    _signal(process)
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with suppress(OSError):
            pipe.close()
    # A daemon thread where the kernel does not let the process go at once.
    try:
        process.wait(1.0)
    except subprocess.TimeoutExpired:
        threading.Thread(target=process.wait, daemon=True).start()


def converse(process: subprocess.Popen[bytes], line: bytes, timeout_s: float) -> bytes:
    """Write a line and read one, both within one limit: the other side may read nothing while it hangs. Its pipes do
    not block.

    Raises:
        OSError: it ended.
        TimeoutError: it did not answer in time.
        ValueError: it answered too much.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    deadline = time.monotonic() + timeout_s
    # poll, not select: a process with many connections has descriptors beyond select's 1024.
    poll = select.poll()
    poll.register(process.stdout, select.POLLIN)
    poll.register(process.stdin, select.POLLOUT)
    unsent, received = memoryview(line), b""
    while not received.endswith(b"\n"):
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError(f"no answer in {timeout_s:g} s")
        for descriptor, _ in poll.poll(left_s * 1000):
            if descriptor == process.stdin.fileno():
                try:
                    unsent = unsent[os.write(descriptor, unsent) :]
                except BrokenPipeError as error:
                    raise OSError(_how_it_ended(process)) from error
                if not unsent:
                    poll.unregister(process.stdin)
                continue
            piece = os.read(descriptor, 65536)
            if not piece:
                raise OSError(_how_it_ended(process))
            received += piece
            if len(received) > MAX_REPLY_BYTES:
                raise ValueError(f"an answer of more than {MAX_REPLY_BYTES} bytes")
    return received


def _how_it_ended(process: subprocess.Popen[bytes]) -> str:
    try:
        code = process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        return "the process closed its pipe"
    return f"the process was ended by {signal.Signals(-code).name}" if code < 0 else f"the process ended: code {code}"


NEAR = 0.25
"""Share of a time limit beyond which another machine may come to another result."""
_REMEMBERED = 4096


class NearLimit:
    """The last ones of them."""

    def __init__(self) -> None:
        self._names: OrderedDict[bytes, None] = OrderedDict()

    def add(self, prompt: object, completion: str) -> None:
        """Remember one of a prompt's number, or of its answer; the oldest is forgotten for it."""
        self._names[_name(prompt, completion)] = None
        while len(self._names) > _REMEMBERED:
            self._names.popitem(last=False)

    def names(self, part: str, prompt: object, completion: str) -> tuple[str, ...]:
        """The part of a reward, if it is one of them."""
        return (part,) if _name(prompt, completion) in self._names else ()


def _name(prompt: object, completion: str) -> bytes:
    return hashlib.sha256(f"{prompt}\n{completion}".encode(errors="surrogatepass")).digest()
