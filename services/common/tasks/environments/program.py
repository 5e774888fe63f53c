"""Agent programs as environments: `task.environment = "program:agent.py:run"` or `"program:python agent.py"`.

The program talks to an OpenAI-compatible endpoint in this worker, which lives as long as the episode. Each request is
one turn: its new messages are the observation, and the policy's turn is the answer. The episode ends with the program,
whose reward is in the file HETERORL_REWARD, or its last line. No process that an episode started outlives it.
"""

from __future__ import annotations

import ast
import ctypes
import hashlib
import importlib
import json
import os
import queue
import re
import resource
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from heterorl.common.tasks.environments.openai_endpoint import Endpoint, EndpointEpisode, over
from heterorl.common.tasks.rewards.worker_main import reward_files
from heterorl.common.tasks.rewards.worker_pool import CHANGED, kill_started
from heterorl.common.tasks.task import Message
from heterorl.common.types.common import peer_words

CALLED = Path(__file__).parent / "call_function.py"
MAX_TAIL_BYTES = 65_536
"""Kept end of the output; the worker prints all of it."""
_PIECE = 65_536
_OF_FUNCTION, _PLACE = "HETERORL", "HETERORL_REWARD"
"""Prefix of a function's variables, and the variable with the file of the reward."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_LIBC = ctypes.CDLL(None)
_LAST = 50
"""Lines of a program's end in which its error is looked for."""
_ERROR = re.compile(r"(\w+\.)*\w*Error\b")
_FULL = re.compile(r"out of memory|MemoryError|cannot allocate|can't start new thread", re.IGNORECASE)
_MISSING = re.compile(r"ModuleNotFoundError: No module named '(\w+)")
"""A program's last words without a package."""


def load(name: str, directory: str) -> tuple[Callable[[], ProgramEnvironment], dict[str, Any]]:
    """Constructor of a program's episodes, and its facts; does not run it.

    `name` is `file.py:function`, or a command that runs in the directory. Raises ValueError without such a file,
    function or command.
    """
    path, _, function = name.rpartition(":")
    is_deterministic = False
    is_file = path.endswith(".py") and " " not in name
    if (name.endswith(".py") and not set(name) & set(" /")) or (is_file and not function.isidentifier()):
        raise ValueError(f"{name} is no program: name a function, as agent.py:run, or a command, as python agent.py")
    if is_file:
        path = os.path.normpath(path)
        file = Path(directory, path)
        is_deterministic = _read(file, function)
        command = [sys.executable, "-P", str(CALLED), str(file.resolve()), function]
    else:
        command = shlex.split(name)
        if not command:
            raise ValueError("the command is empty")

    def digest() -> str:
        return _files_of(path, directory) if is_file else _named_files(command, directory)

    first = digest()
    facts = {"is_deterministic": is_deterministic, "digest": first, "learns_tools": True}
    # A function gets both as arguments, and keeps the variables of its own clients.
    prefix = _OF_FUNCTION if is_file else "OPENAI"

    def make() -> ProgramEnvironment:
        # Each episode reads the files again.
        if digest() != first:
            raise RuntimeError(CHANGED)
        return ProgramEnvironment(command, directory, prefix=prefix)

    return make, facts


def _read(file: Path, function: str) -> bool:
    try:
        body = ast.parse(file.read_bytes()).body
    except (OSError, SyntaxError, ValueError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    if function not in {each.name for each in body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}:
        raise ValueError(f"{file} has no function {function}")
    said = [
        each.value
        for each in body
        if isinstance(each, ast.Assign)
        and [one.id for one in each.targets if isinstance(one, ast.Name)] == ["is_deterministic"]
    ]
    return bool(said) and isinstance(said[-1], ast.Constant) and said[-1].value is True


def _files_of(path: str, directory: str) -> str:
    if directory not in sys.path:
        sys.path.append(directory)
    importlib.invalidate_caches()
    top = path.removesuffix(".py").partition("/")[0]
    files = reward_files(top)
    if files["place"] != os.path.realpath(directory):
        raise ValueError(f"the name {top} stands for {files['place']} too: rename the file")
    return str(files["digest"])


def _named_files(command: Sequence[str], directory: str) -> str:
    total = hashlib.blake2b(digest_size=32)
    for word in command:
        path = Path(directory, word)
        content = hashlib.blake2b(path.read_bytes(), digest_size=32).hexdigest() if path.is_file() else ""
        total.update(f"{word}\0{content}\n".encode(errors="surrogateescape"))
    return total.hexdigest()


class _Tail:
    """Thread that prints what a pipe has and keeps its end."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self._pipe, self._kept = pipe, b""
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        while piece := os.read(self._pipe.fileno(), _PIECE):
            self._kept = (self._kept + piece)[-MAX_TAIL_BYTES:]
            with suppress(OSError):
                os.write(2, piece)

    def lines(self) -> list[str]:
        """Nonempty lines, last ones first, after the end of the pipe."""
        self._thread.join()
        self._pipe.close()
        lines = self._kept.decode(errors="replace").split("\n")
        return [line.strip() for line in reversed(lines) if line.strip()]


class ProgramEnvironment(EndpointEpisode):
    """One run of a program, in its own worker; implements Environment."""

    def __init__(self, command: Sequence[str], directory: str, *, prefix: str) -> None:
        self._command, self._directory, self._prefix = command, directory, prefix
        self._reward = os.memfd_create("reward")
        self._events: queue.SimpleQueue[tuple[Message, ...] | int] = queue.SimpleQueue()
        """Messages of each request; last, the exit code."""
        self._endpoint = Endpoint(self._events.put)
        self._process: subprocess.Popen[bytes] | None = None
        self._code: int | None = None
        self._is_over = False

    def reset(self, row: Mapping[str, Any], *, seed: int) -> tuple[Message, ...]:
        self._start(row, seed)
        return self._first("the program")

    def score(self) -> Any:
        if self._code is None:
            self._is_over = True
            self._endpoint.refuse_rest(over())
            while self._next() is not None:
                pass
            if self._code:
                return 0.0
        stated = os.pread(self._reward, MAX_TAIL_BYTES, 0).decode(errors="replace").strip()
        is_function = self._prefix == _OF_FUNCTION
        # A function that ends its process returns nothing; its last line may be the policy's.
        text = stated or ("" if is_function else next(iter(self._out.lines()), ""))
        try:
            return _reward(text, has_truths=bool(stated))
        except ValueError as error:
            if not text:
                why = "ended before its function returned" if is_function else "wrote no reward, and printed nothing"
                raise ValueError(f"the program {why}") from None
            place = (
                "is what the function returned" if is_function else f"is in {_PLACE}" if stated else "is its last line"
            )
            raise ValueError(f"{text[:80]!r} {place}, and no reward: {error}") from None

    def close(self) -> None:
        kill_started(os.getpid())
        self._endpoint.close()
        os.close(self._reward)
        if self._process is not None:
            self._process.wait()
        # A process that lost its parent became a child of this one.
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass

    def _next(self) -> tuple[Message, ...] | None:
        """Messages of the next request; None after success or past a limit."""
        event = self._events.get()
        if not isinstance(event, int):
            return event
        self._code = event
        # Its children would hold its pipes open.
        kill_started(os.getpid())
        if event and not self._is_over:
            words = f"it was ended by {signal.Signals(-event).name}" if event < 0 else f"it ended with code {event}"
            lines = self._err.lines()[:_LAST]
            last = next(iter(lines), "")
            # Node's last line is its version.
            error = next((line for line in lines if _ERROR.match(line)), last)
            last = peer_words(last if error == last else f"{error} ... {last}", most=200)
            missing = _MISSING.match(last)
            remedy = f": install {missing[1]} into the environment of heterorl" if missing else ""
            if any(map(_FULL.search, lines)):
                remedy = ": raise task.environment_memory_bytes"
            raise RuntimeError(f"the program failed: {words}{last and f'; {last}'}{remedy}")
        return None

    def _start(self, row: Mapping[str, Any], seed: int) -> None:
        # A child that leaves the program's session and loses its parent stays below this process, which can end it.
        _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)
        # A file in memory: the program need not read it.
        task = os.memfd_create("task")
        # Programs in other languages read no NaN and no Infinity.
        finite = json.loads(json.dumps(dict(row)), parse_constant=lambda _: None)
        os.write(task, json.dumps(finite).encode() + b"\n")
        os.lseek(task, 0, os.SEEK_SET)
        try:
            self._process = subprocess.Popen(
                self._command,
                cwd=self._directory,
                env=self._variables(seed),
                stdin=task,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                # No other thread runs here now.
                preexec_fn=_prepare,
            )
        finally:
            os.close(task)
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._out, self._err = _Tail(self._process.stdout), _Tail(self._process.stderr)
        self._endpoint.start()
        threading.Thread(target=self._wait, args=(self._process,), daemon=True).start()

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        self._events.put(process.wait())

    def _variables(self, seed: int) -> dict[str, str]:
        return {
            **os.environ,
            f"{self._prefix}_BASE_URL": self._endpoint.base_url, f"{self._prefix}_API_KEY": self._endpoint.api_key,
            "HETERORL_SEED": str(seed), _PLACE: f"/proc/{os.getpid()}/fd/{self._reward}",
        }  # fmt: skip


def _prepare() -> None:
    """Let a program die with its worker; bound data, not addresses.
    Node and Go reserve far more addresses than they use."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    total, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (total if hard == resource.RLIM_INFINITY else min(total, hard), hard))


def _reward(line: str, *, has_truths: bool) -> Any:
    """A number, or an object of named numbers."""
    value = json.loads(line)
    parts = value.values() if isinstance(value, dict) else [value]
    # A last line may be the policy's text.
    if not all(isinstance(part, int | float) and (has_truths or not isinstance(part, bool)) for part in parts):
        raise ValueError("it is neither a number nor an object of numbers")
    return value
