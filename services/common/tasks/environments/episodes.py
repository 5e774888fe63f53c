"""Episodes of an environment in worker processes with time limits.

An error ends one episode; a killed process ends all its episodes. Calls block. A limit holds for one `reset`, `step` or
`score`. It counts processor time, so that a busy machine gives equal observations; four times the limit by the clock
ends code that sleeps.
"""

from __future__ import annotations

import itertools
import logging
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from heterorl.common.errors import (
    ConfigError,
    DependencyMissing,
    EnvironmentFailed,
    EpisodeError,
    RewardError,
    ToolLost,
)
from heterorl.common.tasks.environments.environment import Action, Observation
from heterorl.common.tasks.environments.tools import SCORE
from heterorl.common.tasks.rewards.function_reward import loaded_facts, parts_of
from heterorl.common.tasks.rewards.worker_pool import PATIENCE, LoadFailed, WorkerLost, WorkerPool, WorkerProcess
from heterorl.common.tasks.source_config import ToolParser
from heterorl.common.tasks.task import Message
from heterorl.common.types.rollout import RewardPart

_LOG = logging.getLogger(__name__)
RELEASE = "Python {}.{}".format(*sys.version_info)
"""Release of Python, which words its errors otherwise than others."""
EPISODES_A_PROCESS = 16
"""Most episodes in one process, where the class allows it."""
_KINDS = ("textarena", "program", "openenv", "verifiers")
"""Prefixes that name no module of the author; each is a module of this folder with `load`."""
_PACKAGES = {
    "textarena": ("textarena", "games"), "openenv": ("websockets", "openenv"), "verifiers": ("verifiers", "verifiers"),
}  # fmt: skip
"""Packages that a kind needs, and their extras."""
_FIELDS = {"open": {"first"}, "step": {"messages", "done"}, "score": {"parts"}, "close": set[str]()}
"""Fields of the reply to each kind of request."""
_KEY = "task.environment"
_EXAMPLES = (
    "for example mytask.games:Guess, a class in mytask/games.py; tools.py; textarena:GuessTheNumber-v0; "
    "program:agent.py:run"
)


@dataclass(slots=True, eq=False)
class _Place:
    """A worker process that holds episodes."""

    worker: WorkerProcess
    live: int = 1
    lock: threading.Lock = field(default_factory=threading.Lock)


class Episodes:
    """An environment by its name, and the processes of its episodes."""

    def __init__(
        self,
        name: str,
        *,
        directory: Path,
        step_timeout_s: float,
        memory_bytes: int,
        max_observation_chars: int,
        num_processes: int,
        num_rows: int = 0,
        tool_parser: ToolParser = "auto",
    ) -> None:
        """Load the environment once.

        `name` is as in `task.environment`. `memory_bytes` is address space beyond what a loaded process has,
        `max_observation_chars` counts all messages that answer one turn. A process that starts builds `num_rows` rows
        of an endless data set.

        Raises:
            ConfigError: it cannot be found or loaded.
            DependencyMissing: a package that its kind needs is not installed.
        """
        job: dict[str, Any] = {
            **_parsed(name), "kind": "environment", "directory": str(directory), "memory_bytes": memory_bytes,
            "max_observation_chars": max_observation_chars, "num_rows": num_rows,
        }  # fmt: skip
        self._pool = WorkerPool(
            job, timeout_s=PATIENCE * step_timeout_s, cpu_s=step_timeout_s, num_workers=num_processes
        )
        try:
            facts = loaded_facts(self._pool, name, key=_KEY, path_key="task.environment_path")
        except ConfigError as error:
            if isinstance(error.__cause__, LoadFailed) and error.__cause__.kind == "missing":
                raise DependencyMissing(*_PACKAGES[job["what"]]) from error
            raise
        self.name, self.num_processes, self.max_observation_chars = name, num_processes, max_observation_chars
        self.tool_parser = tool_parser
        self.files_digest = str(facts["digest"])
        self.is_deterministic = bool(facts["is_deterministic"])
        self.tools: tuple[Mapping[str, Any], ...] = tuple(facts["tools"])
        """JSON schemas of the tools; the schemas of a program are known after its first episode."""
        self.learns_tools = bool(facts.get("learns_tools", False))
        """Whether only the first episode shows the tools."""
        self._has_learned = False
        self.needs: tuple[str, ...] = tuple(facts["needs"])
        """Columns that the score function of a file of tools needs."""
        self.keeps_prompts = job["what"] == "function"
        """Whether episodes never replace the prompt."""
        self.release = RELEASE if self.keeps_prompts and self.is_deterministic else ""
        """Release that words errors of tools, which the policy reads; empty where no learner compares them."""
        self.has_rows = "num_rows" in facts
        """Whether the environment brings its own data set."""
        self.num_rows: int | None = facts.get("num_rows")
        """Rows of its data set; None: without an end."""
        self.shares_process = bool(facts["shares_process"])
        self._places: list[_Place] = []
        self._num_shared = 0
        """Processes of the places, and of those that begin."""
        self._changed = threading.Condition()
        self._is_closed = False
        self._numbers = itertools.count()
        files = f"{facts['num_files']} files of {facts['place']}" if "num_files" in facts else ""
        stated = ", ".join(filter(None, (files, self.release, f"digest {self.files_digest:.12}")))
        _LOG.info("environment %s: %s", name, stated)

    @property
    def max_live(self) -> int:
        return self.num_processes * (EPISODES_A_PROCESS if self.shares_process else 1)

    def open(self, row: Mapping[str, Any], seed: int) -> Episode:
        """Begin an episode; wait while all processes are in use.

        Raises:
            EnvironmentFailed: its code raised.
            ToolLost: its process took too long or died.
        """
        place = self._enter()
        episode = Episode(self, place, next(self._numbers))
        try:
            reply = episode.ask("open", row=dict(row), seed=seed)
            first = reply["first"]
            if self.learns_tools:
                tools = tuple(reply["tools"])
                if self._has_learned and tools != self.tools:
                    raise EnvironmentFailed(f"{self.name}, open: it shows other tools than in its first episode")
                self.tools, self._has_learned = tools, True
            episode.first = None if first is None else _messages(first)
        except BaseException:
            episode.close()
            raise
        return episode

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._pool.close()

    def _enter(self) -> _Place:
        if self.shares_process and (shared := self._shared()) is not None:
            return shared
        try:
            place = _Place(self._pool.take())
        except RewardError as error:
            raise ToolLost(f"{self.name}: no episode begins any more") from error
        if self.shares_process:
            with self._changed:
                self._places.append(place)
                self._changed.notify_all()
        return place

    def _shared(self) -> _Place | None:
        """A place with room; None: a process is free for another one."""
        with self._changed:
            while not self._is_closed:
                roomy = [each for each in self._places if each.live < EPISODES_A_PROCESS and not each.worker.is_full]
                running = [place for place in roomy if place.worker.is_running]
                if not running and self._num_shared < self.num_processes:
                    self._num_shared += 1
                    return None
                # A process that ended starts again.
                if roomy:
                    place = (running or roomy)[0]
                    place.live += 1
                    return place
                self._changed.wait()
            return None

    def leave(self, place: _Place) -> None:
        with self._changed:
            place.live -= 1
            # A caller may wait for room in this process.
            self._changed.notify_all()
            if place.live:
                return
            self._pool.give(place.worker)
            if place in self._places:
                self._places.remove(place)
                self._num_shared -= 1


class Episode:
    """One episode. An error ends it: all later calls raise it again."""

    def __init__(self, episodes: Episodes, place: _Place, number: int) -> None:
        self.first: tuple[Message, ...] | None = None
        """First messages, which replace the row's prompt; None keeps the prompt."""
        self._episodes, self._place, self._number = episodes, place, number
        self._process: object = None
        self._error: EpisodeError | None = None
        self._is_closed = False

    def __enter__(self) -> Episode:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def step(self, action: Action) -> Observation:
        calls = [[call.name, dict(call.arguments)] for call in action.tool_calls]
        reply = self.ask("step", action={"text": action.text, "tool_calls": calls, "is_cut": action.is_cut})
        return Observation(_messages(reply["messages"]), bool(reply["done"]))

    def score(self) -> tuple[RewardPart, ...]:
        """Parts of the reward, also after a limit ended the episode."""
        reply = self.ask("score")
        try:
            return parts_of(reply["parts"])
        except RewardError as error:
            self._error = EnvironmentFailed(f"{self._episodes.name}, score: it returned {error}")
            raise self._error from error

    def close(self) -> None:
        """End the episode; kill its own process if that fails. Idempotent."""
        if self._is_closed:
            return
        if not isinstance(self._error, ToolLost):
            try:
                self.ask("close", is_last=True)
            except ToolLost:
                pass
            except EnvironmentFailed as error:
                _LOG.warning("an episode ended, but its close failed: %s", error)
                if not self._episodes.shares_process:
                    self._place.worker.close()
        self._is_closed = True
        self._episodes.leave(self._place)

    def ask(self, do: str, *, is_last: bool = False, **words: Any) -> dict[str, Any]:
        """One request to its process (see episode_worker.py); raises EnvironmentFailed or ToolLost."""
        if self._is_closed:
            raise ValueError("the episode is closed")
        if self._error is not None and not is_last:
            raise self._error
        request, name = {"do": do, "episode": self._number, **words}, f"{self._episodes.name}, {do}"
        try:
            with self._place.lock:
                return self._asked(request, starts=do == "open")
        except WorkerLost as error:
            self._error = ToolLost(f"{name}: {error}")
            raise self._error from error
        except (RewardError, RecursionError, TypeError) as error:
            # Arguments that JSON cannot hold, such as too deep ones, end the episode in the same way.
            self._error = EnvironmentFailed(f"{name}: {error}")
            raise self._error from error

    def _asked(self, request: Mapping[str, Any], *, starts: bool) -> dict[str, Any]:
        worker = self._place.worker
        if not starts and worker.process is not self._process:
            # Another episode of this place started a new one.
            raise WorkerLost("its process has ended")
        try:
            reply = worker.ask(request, starts=starts)
        finally:
            if starts:
                self._process = worker.process
        if not reply.keys() >= _FIELDS[request["do"]]:
            # Its next answers could belong to other requests too.
            worker.close()
            raise WorkerLost("its process answered another request")
        return reply


def _parsed(name: str) -> dict[str, str]:
    kind, _, rest = name.partition(":")
    if kind in _KINDS and rest:
        return {"what": kind, "module": "", "name": rest}
    path = name.removesuffix(".py")
    found = {"what": "class", "module": kind, "name": rest}
    if path != name:
        found = {"what": "function", "module": path.replace("/", "."), "name": SCORE}
    if not all(word.isidentifier() for word in [*found["module"].split("."), found["name"]]):
        known = "package.module:Class, file.py, textarena:ID, program:COMMAND, openenv:URL, verifiers:NAME"
        raise ConfigError(_KEY, f"{name!r} is none of {known}", action=_EXAMPLES)
    return found


def _messages(written: Any) -> tuple[Message, ...]:
    return tuple(Message(role=role, content=content, name=name) for role, content, name in written)
