"""Scores of reasoning-gym's datasets, by one sandboxed server a worker.

Verifiers of reasoning-gym run answers as Python, so no completion is scored in a service. A completion that raises,
hangs, takes too much or ends the server gets 0. A sandbox that cannot be built is an error, not a value. No completion
reaches the score of another. A prompt is held out by the digest of its text, so no seed or size shows a held-out prompt
in training.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import signal
import site
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heterorl.common.errors import ConfigError, DependencyMissing, RewardError
from heterorl.common.tasks.answer_extraction import answer_of
from heterorl.common.tasks.rewards.sandbox.bubblewrap import NoSandbox, SandboxLimits, find_sandbox
from heterorl.common.tasks.rewards.sandbox.gym_server import Entries, NoEntries
from heterorl.common.tasks.rewards.worker_pool import (
    NEAR,
    PATIENCE,
    LoadFailed,
    NearLimit,
    WorkerPool,
    children_of,
    converse,
)
from heterorl.common.tasks.task import Doubts, Prompt
from heterorl.common.types.common import Digest
from heterorl.common.types.rollout import RewardPart
from heterorl.common.wire.common_messages import bytes_digest

if TYPE_CHECKING:
    # A worker needs no pydantic.
    from heterorl.common.tasks.source_config import SourceConfig

LIMIT_S = 2.0
"""Most processor time for one completion."""
MEMORY_BYTES = 1 << 30
"""Memory of each process; importing reasoning-gym takes 0.3 GB of it."""
WORK_BYTES = 16 << 20
NUM_PROCESSES = 4
SERVE_TIMEOUT_S = 60.0
"""For importing reasoning-gym in a sandbox, and for finding a prompt; no completion pays for it."""
_GRACE_S = 10.0
"""Wait for an answer beyond the time of a completion."""
_ENVIRONMENT = {"LANG": "C.UTF-8", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
"""Environment variables without a sandbox."""
SERVE = Path(__file__).parent / "gym_server.py"

Answer = Callable[[dict[str, Any]], dict[str, Any]]


def limit_of(timeout_s: float) -> float:
    """Processor time for one completion, from task.reward_timeout_s."""
    return min(LIMIT_S, timeout_s / 2)


def load(job: dict[str, Any]) -> tuple[Answer, dict[str, Any]]:
    """Answers requests of a worker."""
    paths, shown = _places()
    command = [sys.executable, "-I", "-B", str(SERVE)]
    if job["sandbox"]:
        limits = SandboxLimits(
            # The server has these limits; each child sets its own.
            cpu_s=1e9, timeout_s=1e9, memory_bytes=MEMORY_BYTES, work_bytes=WORK_BYTES, output_bytes=0,
            num_processes=NUM_PROCESSES,
        )  # fmt: skip
        try:
            command = find_sandbox(python="", shown=shown, limits=limits).command(0, 1, serving=SERVE)
        except NoSandbox as error:
            raise ValueError(f"completions of reasoning_gym are scored in a sandbox: {error}") from error
    limit_s = limit_of(job["timeout_s"])
    order = {
        "kind": "serve", "paths": paths, "cpu_s": limit_s, "timeout_s": job["patience"] * limit_s,
        "memory_bytes": MEMORY_BYTES, "work_bytes": WORK_BYTES,
        **{key: job[key] for key in ("name", "size", "seed", "version")},
    }  # fmt: skip
    server = Server(command, json.dumps(order).encode() + b"\n")
    server.wait()

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        question = {"index": request["index"], "question": request["prompt"]}
        return server.score(question, request["completion"], timeout_s=job["patience"] * limit_s)

    return answer, {}


class Server:
    """Process that scores; restarted where a completion left traces or ended it."""

    def __init__(self, command: list[str], order: bytes) -> None:
        self._command, self._order = command, order
        self._is_ready = False
        self._process = self._start()

    def score(self, question: dict[str, Any], completion: str, *, timeout_s: float) -> dict[str, Any]:
        """Value of a completion, and its share of the time limit.

        `timeout_s` is by the clock, without a restart and the search for the prompt.

        Raises:
            ValueError: no such prompt, or no server.
            OSError: the server ended before it saw the completion.
            TimeoutError: the server did not find the prompt in time.
        """
        self.wait()
        try:
            found = self._exchange(question, SERVE_TIMEOUT_S)
        except TimeoutError:
            raise
        except OSError:
            # The server ended after the completion before, such as without memory; it has not seen this one.
            self.wait()
            found = self._exchange(question, SERVE_TIMEOUT_S)
        if "error" in found:
            raise ValueError(found["error"])
        try:
            reply = self._exchange({"completion": completion}, timeout_s + _GRACE_S)
        except (OSError, ValueError):
            reply = {"value": 0.0, "share": 1.0, "ends": True}
        if "error" in reply:
            raise ValueError(reply["error"])
        if reply["ends"]:
            self._end()
            # The next completion waits for the start.
            self._process = self._start()
        return {"value": reply["value"], "share": reply["share"]}

    def wait(self) -> None:
        """Wait until the server is ready; raise ValueError or TimeoutError."""
        if self._process.poll() is not None:
            self._end()
            self._process = self._start()
        if self._is_ready:
            return
        try:
            reply = json.loads(converse(self._process, b"", SERVE_TIMEOUT_S))
        except TimeoutError:
            self._end()
            raise
        except OSError as error:
            self._end()
            raise ValueError(f"the server of reasoning_gym does not start: {error}") from error
        if "failed" in reply:
            self._end()
            raise ValueError(f"the server of reasoning_gym does not start: {reply['failed']}")
        self._is_ready = True

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=_ENVIRONMENT,
            bufsize=0,
        )  # fmt: skip
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
        assert process.stdin is not None
        # A pipe holds far more; the reader of the answer notices a closed one.
        with suppress(OSError):
            os.write(process.stdin.fileno(), self._order)
        self._is_ready = False
        return process

    def _end(self) -> None:
        """Kill the server and its namespace's first process, and so all others."""
        # That process has another user, so it gets no signal when its parent ends.
        for number in children_of(self._process.pid):
            with suppress(OSError):
                os.kill(number, signal.SIGKILL)
        # The context closes its pipes and waits for it.
        with self._process:
            self._process.kill()

    def _exchange(self, message: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        try:
            reply: dict[str, Any] = json.loads(converse(self._process, json.dumps(message).encode() + b"\n", timeout_s))
        except (OSError, ValueError):
            # A late answer would be taken for the next one.
            self._end()
            raise
        return reply


def _places() -> tuple[list[str], list[str]]:
    """Import paths of packages, and the directories to show for them."""
    spec = importlib.util.find_spec("reasoning_gym")
    if spec is None or spec.origin is None:
        raise ValueError("reasoning-gym is not installed")
    package = Path(spec.origin).parent
    installed = [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
    paths = [path for path in installed if os.access(path, os.R_OK | os.X_OK)]
    if str(package.parent) in paths:
        return paths, paths
    # From a working copy: only the package.
    return [str(package.parent), *paths], [str(package), *paths]


_LOG = logging.getLogger(__name__)
_PART = "score"


class ReasoningGymTask:
    """A dataset of reasoning-gym; implements Task."""

    def __init__(self, name: str, config: SourceConfig) -> None:
        """Make the pool; the first score starts a worker.

        A completion has half of reward_timeout_s, at most 2 s of processor time.

        Raises:
            ConfigError: the dataset is unknown, or too small to be split.
            DependencyMissing: reasoning-gym is not installed.
        """
        try:
            import reasoning_gym
        except ImportError as error:
            raise DependencyMissing("reasoning-gym", "gym") from error
        version, timeout_s = getattr(reasoning_gym, "__version__", ""), config.reward_timeout_s
        entries: dict[str, Any] = {"name": name, "size": max(config.size, config.evaluation_size), "seed": config.seed}
        self._entries = Entries(reasoning_gym, **entries)
        self._limit_s = limit_of(timeout_s)
        self._near = NearLimit()
        self.num_workers = config.reward_workers
        self.num_prompts, self.num_evaluation_prompts = config.size, config.evaluation_size
        stated = f"{version} {name} {config.size} {config.evaluation_size} {config.seed} {self._limit_s:g}"
        self.digest: Digest = bytes_digest(f"reasoning_gym 6 {stated}".encode())
        job = {
            **entries, "kind": "gym", "version": version, "timeout_s": timeout_s, "sandbox": config.sandbox,
            "patience": PATIENCE,
        }  # fmt: skip
        # The worker counts the time; this limit ends a worker that fails to: two starts and two searches.
        patience_s = 4 * SERVE_TIMEOUT_S + PATIENCE * timeout_s
        self.pool = WorkerPool(job, timeout_s=patience_s, num_workers=self.num_workers)
        self.close = self.pool.close
        # Report a wrong name, or a dataset too small to be split, at the start.
        self._entry(0, False)
        self._entry(0, True)
        if not config.sandbox:
            _LOG.warning(
                "task.sandbox is false: a completion of reasoning_gym:%s may run any code as the user of this service"
                " (docs/rewards.md)",
                name,
            )

    def prompt(self, index: int) -> Prompt:
        return _prompt(index, self._entry(index, False))

    def evaluation_prompt(self, index: int) -> Prompt:
        return _prompt(index, self._entry(index, True))

    def score(self, prompt: Prompt, completion: str) -> tuple[RewardPart, ...]:
        """The dataset's own score in [0, 1]; 0 where its verifier fails.

        Raises:
            ConfigError: completions cannot be scored here, such as without a sandbox.
            RewardError: not a prompt of this dataset, or the server does not start again; that is not a score.
        """
        try:
            reply = self.pool.ask({"index": prompt.index, "prompt": prompt.text, "completion": answer_of(completion)})
        except LoadFailed as error:
            action = "docs/rewards.md says what a sandbox needs, and what task.sandbox = false gives away"
            raise ConfigError("task.name", str(error), action=action) from error
        except RewardError as error:
            raise RewardError(f"the reward of prompt {prompt.index} failed: {error}") from error
        if reply["share"] > NEAR:
            self._near.add(prompt.index, completion)
        return (RewardPart(name=_PART, value=float(reply["value"])),)

    def doubts(self, prompt: Prompt, completion: str) -> Doubts:
        return Doubts(near=self._near.names(_PART, prompt.index, completion))

    def _entry(self, index: int, held_out: bool) -> Any:
        try:
            return self._entries.find(index, held_out)
        except NoEntries as error:
            raise ConfigError("task.name", str(error), action="name another dataset of reasoning-gym") from error


def _prompt(index: int, entry: Any) -> Prompt:
    return Prompt(index=index, text=entry["question"], answer=str(entry["answer"]))
