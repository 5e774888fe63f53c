"""Worker processes for rewards and episodes, killed when they take too long.

A symbolic comparison of a hostile answer, or a user's function, can run for hours and ignore signals, so threads and
alarms do not suffice. Loaded code stays loaded; a process that hung is replaced. A request's limit starts when a ready
worker gets it. The limit is processor time, so that a busy machine gives equal values; a longer limit by the clock ends
code that sleeps.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from heterorl.common.errors import RewardError
from heterorl.common.process.threads import how_it_ended
from heterorl.common.types.common import peer_words

_LOG = logging.getLogger(__name__)
SCRIPT = Path(__file__).parent / "worker_main.py"
START_TIMEOUT_S = 300.0
"""For imports; no answer counts it. verifiers takes 11 s of a core, and a busy machine ten times as long."""
PATIENCE = 4.0
"""Seconds by the clock for each second of processor time."""
MAX_REPLY_BYTES = 1 << 20
MAX_PRINTED = 8192
"""Bytes that a worker may print into the log from one request to the next."""
MAX_WORDS = 600
"""Longest error with its line, characters."""
CHANGED = "its files changed since the start: put them back, or restart this process"
_GRACE_S = 5.0
"""The worker's own limit, which counts without a parent, is so much later."""


class LoadFailed(RewardError):
    """The worker runs but cannot load its job; `kind` as in worker_main.LoadError."""

    def __init__(self, kind: str, text: str) -> None:
        self.kind = kind
        super().__init__(text)


class WorkerLost(RewardError):
    """The worker died or took too long; its state is lost."""


class OutOfTime(WorkerLost):
    """The kernel ended a worker that used all its processor time."""


class NoAnswer(RewardError):
    """A server that the code asks does not answer for now."""


def is_outage(error: BaseException | None) -> bool:
    """Whether NoAnswer is an error's cause."""
    while error is not None and not isinstance(error, NoAnswer):
        error = error.__cause__
    return error is not None


class WorkerProcess:
    """One worker process, started at its first request."""

    def __init__(self, job: Mapping[str, Any], *, timeout_s: float, cpu_s: float, first: dict[str, Any]) -> None:
        """Make it without a process; `first` holds the pool's first digest."""
        self.timeout_s, self.cpu_s = timeout_s, cpu_s
        self.process: subprocess.Popen[bytes] | None = None
        self.is_full = False
        """Whether another one must take its place: it ran out of memory, or a completion left traces."""
        self._job, self._first = dict(job), first
        self._end: Any = None

    def start(self) -> dict[str, Any]:
        """(Re)start the process; facts about what it loaded.

        Raises:
            LoadFailed: it cannot load its job, and no process of the pool did before.
            RewardError: it does not start, or loaded other files than the first process.
        """
        self.close()
        # -P: no file of the working directory shadows a package. Own session: Ctrl-C goes to the service.
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-P", str(SCRIPT)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
                env=_variables(),
            )
        except OSError as error:
            raise RewardError(f"the system starts no process that computes rewards: {error}") from error
        self._end = weakref.finalize(self, _kill, self.process)
        assert self.process.stderr is not None
        self._printed = _Printed(self.process.stderr, str(self._job.get("name") or self._job["kind"]))
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
            failure = LoadFailed(reply["failed"], reply["text"])
            if self._first:
                # It loaded before, so the configuration is right; memory may be full.
                raise RewardError(f"the process that computes rewards does not start again: {failure}") from failure
            raise failure
        if reply.get("digest") != self._first.setdefault("digest", reply.get("digest")):
            self.close()
            raise RewardError(CHANGED)
        return reply

    @property
    def is_running(self) -> bool:
        return self.process is not None and _status(self.process) is None

    def ask(self, request: Mapping[str, Any], *, starts: bool = True) -> dict[str, Any]:
        """The answer to a request; `starts` starts an ended process again.

        Raises:
            OutOfTime: it used all its processor time.
            WorkerLost: it died or took too long.
            NoAnswer: its code reached no server.
            RewardError: it answered with an error.
        """
        if not self.is_running:
            if not starts:
                raise WorkerLost("its process has ended")
            self.start()
        try:
            limits = {"cpu_s": self.cpu_s, "limit_s": self.timeout_s + _GRACE_S}
            reply = self._exchange({**request, **limits}, self.timeout_s)
        except (OSError, ValueError, TimeoutError) as error:
            is_spent = self.process is not None and _status(self.process) == -signal.SIGPROF
            self.close()
            if is_spent:
                raise OutOfTime(f"no answer in {self.cpu_s:g} s of processor time") from error
            raise WorkerLost(str(error) or "no answer") from error
        self.is_full = self.is_full or bool(reply.get("is_full"))
        if "error" in reply:
            kind = NoAnswer if reply.get("is_outage") else RewardError
            # It may hold a completion of a peer.
            raise kind(peer_words(str(reply["error"]), most=MAX_WORDS))
        return reply

    def kill(self) -> None:
        process = self.process
        if process is not None:
            _signal(process)

    def close(self) -> None:
        if self._end is not None:
            self._end()
        self.process, self._end, self.is_full = None, None, False

    def _exchange(self, message: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        assert self.process is not None
        self._printed.left = MAX_PRINTED
        reply = json.loads(converse(self.process, json.dumps(message).encode() + b"\n", timeout_s))
        if not isinstance(reply, dict):
            raise ValueError("the answer is not an object")
        return reply


class _Printed:
    """Thread that logs what a worker prints, up to `left` bytes."""

    def __init__(self, pipe: IO[bytes], name: str) -> None:
        self._pipe, self._name, self.left = pipe, name, MAX_PRINTED
        threading.Thread(target=self._follow, daemon=True).start()

    def _follow(self) -> None:
        begun = b""
        with self._pipe:
            while piece := os.read(self._pipe.fileno(), 1 << 16):
                kept, was_left = piece[: self.left], self.left
                self.left -= len(kept)
                *lines, begun = (begun + kept).split(b"\n")
                if len(kept) < len(piece) and was_left:
                    lines, begun = [*lines, begun, b"... more is left out"], b""
                self._say(lines)
        self._say([begun])

    def _say(self, lines: Sequence[bytes]) -> None:
        # A command that configures no log, as `heterorl env try`, shows warnings.
        level = logging.INFO if _LOG.hasHandlers() else logging.WARNING
        for line in lines:
            if line.strip():
                words = peer_words(line.decode(errors="replace"), most=MAX_PRINTED)
                _LOG.log(level, "%s prints: %s", self._name, words)


class WorkerPool:
    """Worker processes of one kind; callers wait for a free one."""

    def __init__(self, job: Mapping[str, Any], *, timeout_s: float, cpu_s: float = 0.0, num_workers: int = 1) -> None:
        """Make the workers; requests start their processes.

        `job` is what a worker loads (`worker_main.py`). An answer takes at most `timeout_s` by the clock and `cpu_s` of
        processor time; 0 is no bound.
        """
        first: dict[str, Any] = {}
        self.workers = [WorkerProcess(job, timeout_s=timeout_s, cpu_s=cpu_s, first=first) for _ in range(num_workers)]
        self._idle = list(reversed(self.workers))
        self._running: list[WorkerProcess] = []
        self._changed = threading.Condition()
        self._is_closed = False

    def start(self) -> dict[str, Any]:
        with self.one() as worker:
            return worker.start()

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Answer of a free worker; raises as WorkerProcess.ask and start."""
        with self.one() as worker:
            return worker.ask(request)

    def close(self) -> None:
        """Kill all workers; waiting and later callers get an error."""
        with self._changed:
            self._is_closed = True
            free, self._idle, self._running = self._idle + self._running, [], []
            for worker in self.workers:
                # The caller closes a busy worker: its pipe's number could be reused at once.
                worker.close() if worker in free else worker.kill()
            self._changed.notify_all()

    @contextmanager
    def one(self) -> Iterator[WorkerProcess]:
        worker = self.take()
        try:
            yield worker
        finally:
            self.give(worker)

    def give(self, worker: WorkerProcess) -> None:
        if worker.is_full:
            worker.close()
        with self._changed:
            if self._is_closed:
                worker.close()
            else:
                (self._idle if worker.process is None else self._running).append(worker)
                self._changed.notify()

    def take(self) -> WorkerProcess:
        """A running process, or one to start where none is free."""
        with self._changed:
            self._changed.wait_for(lambda: self._running or self._idle or self._is_closed)
            if self._is_closed:
                raise RewardError("the pool of reward workers is closed")
            # Last used first.
            return (self._running or self._idle).pop()


def _variables() -> dict[str, str]:
    """Environment of a worker: no proxy between processes of this machine."""
    known = [name for key in ("NO_PROXY", "no_proxy") for name in os.environ.get(key, "").split(",")]
    direct = ",".join(dict.fromkeys(filter(None, [*known, "127.0.0.1", "::1", "localhost"])))
    # Equal order of sets in all workers.
    return {**os.environ, "NO_PROXY": direct, "no_proxy": direct, "PYTHONHASHSEED": "0"}


def _status(process: subprocess.Popen[bytes]) -> int | None:
    """`poll` that keeps the process's number, which names its group."""
    if process.returncode is None:
        with suppress(ChildProcessError):
            found = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if found is None:
                return None
            return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
    return process.poll()


def _signal(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError, PermissionError):
        # No other process has its number before it is waited for.
        if process.returncode is None:
            # Its children may have a session of their own. Without descriptors only its group can be ended.
            with suppress(OSError):
                os.kill(process.pid, signal.SIGSTOP)
                kill_started(process.pid)
            os.killpg(process.pid, signal.SIGKILL)


def kill_started(pid: int) -> None:
    """Kill all processes below this one, in any group.

    Also those that they start meanwhile.
    """
    killed: set[int] = set()
    while found := _started(pid) - killed:
        for each in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(each, signal.SIGKILL)
        killed |= found


def children_of(number: int) -> list[int]:
    """Numbers of the processes that a process started, in any thread."""
    found: list[int] = []
    for path in Path(f"/proc/{number}/task").glob("*/children"):
        # The process may end meanwhile.
        with suppress(OSError):
            found += map(int, path.read_text(encoding="ascii").split())
    return found


def _started(pid: int) -> set[int]:
    found, parents = set[int](), [pid]
    while parents:
        own = set(children_of(parents.pop())) - found
        found |= own
        parents += own
    return found


def _kill(process: subprocess.Popen[bytes]) -> None:
    _signal(process)
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with suppress(OSError):
            pipe.close()
    # The kernel may release the process late.
    try:
        process.wait(1.0)
    except subprocess.TimeoutExpired:
        threading.Thread(target=process.wait, daemon=True).start()


def converse(process: subprocess.Popen[bytes], line: bytes, timeout_s: float) -> bytes:
    """Write a line and read one within `timeout_s` by non-blocking pipes.

    Raises:
        OSError: the process ended.
        TimeoutError: no answer in time.
        ValueError: the answer is too long.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    deadline = time.monotonic() + timeout_s
    # poll, since descriptors may exceed the 1024 of select.
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
    descriptor, poll = os.pidfd_open(process.pid), select.poll()
    try:
        poll.register(descriptor, select.POLLIN)
        poll.poll(_GRACE_S * 1000)
    finally:
        os.close(descriptor)
    code = _status(process)
    return "the process closed its pipe" if code is None else f"the process {how_it_ended(code)}"


NEAR = 0.25
"""Share of a time limit beyond which another machine may get another result."""
_REMEMBERED = 4096


class NearLimit:
    """The last results near their time limit."""

    def __init__(self) -> None:
        self._names: OrderedDict[bytes, None] = OrderedDict()

    def add(self, prompt: object, completion: str) -> None:
        """Remember a result by the prompt's number or answer; forget the oldest."""
        self._names[_name(prompt, completion)] = None
        while len(self._names) > _REMEMBERED:
            self._names.popitem(last=False)

    def names(self, part: str, prompt: object, completion: str) -> tuple[str, ...]:
        """The name of the reward, if its result was near."""
        return (part,) if _name(prompt, completion) in self._names else ()


def _name(prompt: object, completion: str) -> bytes:
    return hashlib.sha256(f"{prompt}\n{completion}".encode(errors="surrogatepass")).digest()
