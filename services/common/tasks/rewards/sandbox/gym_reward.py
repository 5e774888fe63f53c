"""Scores of reasoning-gym's datasets, by one sandboxed server a worker.

Verifiers of reasoning-gym run answers as Python, so no completion is scored in a service. A completion that raises,
hangs, takes too much or ends the server gets 0. A sandbox that cannot be built is an error, not a value. No completion
reaches the score of another. A prompt is held out by the digest of its text, so no seed or size shows a held-out prompt
in training.
"""

from __future__ import annotations

import importlib.util
import json
import os
import site
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heterorl.common.errors import ConfigError, DependencyMissing, RewardError
from heterorl.common.tasks.answer_extraction import answer_of
from heterorl.common.tasks.rewards.sandbox import gym_server
from heterorl.common.tasks.rewards.sandbox.bubblewrap import NoSandbox, SandboxLimits, find_sandbox
from heterorl.common.tasks.rewards.sandbox.gym_server import Entries, NoEntries
from heterorl.common.tasks.rewards.worker_pool import (
    NEAR,
    PATIENCE,
    SCRIPT,
    LoadFailed,
    NearLimit,
    WorkerLost,
    WorkerPool,
)
from heterorl.common.tasks.task import Doubts, Prompt, Task
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
"""For finding a prompt, or for an answer beyond the time of a completion."""
SERVE = Path(gym_server.__file__)

Answer = Callable[[dict[str, Any]], dict[str, Any]]


def limit_of(timeout_s: float) -> float:
    """Processor time for one completion, from task.reward_timeout_s."""
    return min(LIMIT_S, timeout_s / 2)


def load(job: dict[str, Any]) -> tuple[Answer, dict[str, Any]]:
    """The sandbox that a worker becomes."""
    paths, shown = _places()
    job = {**job, "kind": SERVE.stem, "paths": paths}
    limits = SandboxLimits(
        # The server has these limits; each child sets its own.
        cpu_s=1e9, timeout_s=1e9, memory_bytes=MEMORY_BYTES, work_bytes=WORK_BYTES, output_bytes=0,
        num_processes=NUM_PROCESSES,
    )  # fmt: skip
    try:
        sandbox = find_sandbox(python="", shown=shown, limits=limits)
    except NoSandbox as error:
        raise ValueError(f"completions of reasoning_gym are scored in a sandbox: {error}") from error
    # A pipe holds far more than the order.
    order, into = os.pipe()
    os.write(into, json.dumps({"kind": "serve", "job": job}).encode())
    os.close(into)
    os.set_inheritable(order, True)
    return dict, {"becomes": sandbox.command(order, 1, serving=(SERVE, SCRIPT))}


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


_PART = "score"


class ReasoningGymTask(Task):
    """A dataset of reasoning-gym."""

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
        self.digest = bytes_digest(f"reasoning_gym 8 {stated}".encode())
        job = {
            **entries, "kind": "gym", "version": version, "cpu_s": self._limit_s, "timeout_s": PATIENCE * self._limit_s,
        }  # fmt: skip
        # The worker counts the time; this limit ends a worker that fails to.
        patience_s = SERVE_TIMEOUT_S + PATIENCE * self._limit_s
        self.pool = WorkerPool(job, timeout_s=patience_s, num_workers=self.num_workers)
        # Report a wrong name, or a dataset too small to be split, at the start.
        self._entry(0, False)
        self._entry(0, True)

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
        asked: dict[str, Any] = {"index": prompt.index, "prompt": prompt.text}
        try:
            with self.pool.one() as worker:
                # The search for the prompt: no completion took part in its errors.
                try:
                    worker.ask(asked)
                except WorkerLost:
                    # It ended after the completion before, such as without memory.
                    worker.ask(asked)
                try:
                    reply = worker.ask({**asked, "completion": _stated(completion)}, starts=False)
                except WorkerLost:
                    reply = {"value": 0.0, "share": 1.0}
        except LoadFailed as error:
            raise ConfigError("task.name", str(error), action="docs/rewards.md says what a sandbox needs") from error
        except RewardError as error:
            raise RewardError(f"the reward of prompt {prompt.index} failed: {error}") from error
        if reply["share"] > NEAR:
            self._near.add(prompt.index, completion)
        return (RewardPart(name=_PART, value=float(reply["value"])),)

    def close(self) -> None:
        self.pool.close()

    def doubts(self, prompt: Prompt, completion: str) -> Doubts:
        return Doubts(near=self._near.names(_PART, prompt.index, completion))

    def _entry(self, index: int, held_out: bool) -> Any:
        try:
            return self._entries.find(index, held_out)
        except NoEntries as error:
            raise ConfigError("task.name", str(error), action="name another dataset of reasoning-gym") from error


def _stated(completion: str) -> str:
    """Text of the last <answer>, else all without thoughts."""
    answer = answer_of(completion)
    _, opened, text = answer.rpartition("</answer>")[0].rpartition("<answer>")
    return text.strip() if opened else answer


def _prompt(index: int, entry: Any) -> Prompt:
    return Prompt(index=index, text=entry["question"], answer=str(entry["answer"]))
