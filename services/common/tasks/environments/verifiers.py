"""Environments of the package verifiers: `task.environment = "verifiers:NAME"` or `"verifiers:FILE.toml"`.

NAME is a module or installed package with a taskset; FILE.toml has verifiers' own table [env]. The environment plays
its rollouts in a thread of this worker. Its agent talks to the endpoint of the episode: each request is a turn. The
environment's rewards, times their weights, are the parts of the reward.
"""

from __future__ import annotations

import asyncio
import ctypes
import hashlib
import importlib
import itertools
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import tomllib
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from heterorl.common.process.address import is_loopback
from heterorl.common.tasks.environments.openai_chat import OVER, RequestRefused
from heterorl.common.tasks.environments.openai_endpoint import MODEL, Endpoint, EndpointEpisode, over
from heterorl.common.tasks.rewards.worker_main import LoadError, imported, refuse_two, reward_files
from heterorl.common.tasks.task import Message

_T = TypeVar("_T")
_PACKAGE = "verifiers"
_KEY_VARIABLE = "HETERORL_EPISODE_API_KEY"
"""verifiers hides variables with such a name from programs that it starts."""
_COUNTED = 64
"""Tasks of an endless taskset that its digest counts."""
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)
_FRAME = re.compile(r'^ *File "([^"]+)", line (\d+)', re.MULTILINE)


def load(name: str, directory: str) -> tuple[Callable[[], VerifiersEpisode], dict[str, Any]]:
    """Constructor of an environment's episodes, and its facts.

    Raises:
        ImportError: verifiers is not installed.
        ValueError: there is no such environment, or it cannot be played here.
    """
    vf = importlib.import_module("verifiers.v1")
    chat = importlib.import_module("heterorl.common.tasks.environments.verifiers_chat")
    raw = _configured(name, directory)
    top = _module(raw["taskset"]["id"], directory)
    try:
        config, seat = _adapted(vf, vf.resolve_env_config(raw), chat.HARNESS)
        environment = vf.load_environment(config)
    except (AttributeError, ImportError, TypeError) as error:
        # A module without __all__ or a taskset, or a plugin of the file that is not installed.
        raise ValueError(str(error)) from error
    _refuse_judges(vf, config)
    _bind_processes()
    played = Played(environment, seat)
    files = {} if top == _PACKAGE else reward_files(top)
    endless = {"build": played.build} if played.num_tasks is None else {}
    stated = [version(_PACKAGE), config.model_dump_json(), files.get("digest", ""), played.tasks_digest()]
    return lambda: VerifiersEpisode(played), {
        **files,
        **endless,
        "digest": hashlib.blake2b(json.dumps(stated).encode(), digest_size=32).hexdigest(),
        "is_deterministic": getattr(sys.modules[type(environment.taskset).__module__], "is_deterministic", None)
        is True,
        "num_rows": played.num_tasks,
        "learns_tools": True,
    }


def _configured(name: str, directory: str) -> dict[str, Any]:
    if not name.endswith(".toml"):
        return {"taskset": {"id": name}}
    file = Path(directory, name)
    try:
        env = tomllib.loads(file.read_text(encoding="utf-8")).get("env")
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    taskset = env.get("taskset") if isinstance(env, dict) else None
    if not isinstance(env, dict) or not isinstance(taskset, dict) or not isinstance(taskset.get("id"), str):
        raise ValueError(f"{file} has no table [env.taskset] with an id")
    return env


def _module(name: str, directory: str) -> str:
    """Import the module of an environment's name; its first word."""
    module = name.rpartition("/")[2].partition("@")[0].replace("-", "_").lower()
    if not module.isidentifier():
        raise ValueError(f"{name!r} is no name of an environment")
    if find_spec(f"verifiers.v1.tasksets.{module}") is not None:
        return _PACKAGE
    if directory not in sys.path:
        # Last: installed packages come first.
        sys.path.append(directory)
    # A tool's server imports the module in a process of its own.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), directory]))
    try:
        refuse_two(module, directory)
        imported(module, directory)
    except LoadError as error:
        hub = f", nor such a package; `prime env install OWNER/{module.replace('_', '-')}` installs one of the hub"
        raise ValueError(f"{error}{hub if error.kind == 'place' else ''}") from error
    return module


def _adapted(vf: Any, config: Any, harness: str) -> tuple[Any, str]:
    """Configuration with the policy in its only free seat; the seat."""
    seats = {name: value for name, value in config if isinstance(value, vf.AgentConfig)}
    free = [name for name, seat in seats.items() if seat.client is None]
    if len(free) != 1:
        words = f"its agents {', '.join(seats)}: one is trained, so all others need a client and a model"
        raise ValueError(f"{words} of their own ([env.NAME.client] and model in a FILE.toml)")
    changes: dict[str, Any] = {"model": MODEL}
    for name in free:
        # verifiers' own defaults are a rented sandbox, and a harness that runs the policy's commands.
        if "runtime" not in seats[name].model_fields_set:
            changes["runtime"] = vf.SubprocessConfig()
        if seats[name].harness is None and vf.default_harness_id(config.taskset.id) == "bash":
            changes["harness"] = vf.HarnessConfig(id=harness)
    return config.model_copy(update={free[0]: seats[free[0]].model_copy(update=changes)}), free[0]


def _refuse_judges(vf: Any, config: Any) -> None:
    """Raise ValueError for a judging model that cannot be asked."""
    task = config.taskset.task
    judges = [*task.judges, *(value for _, value in task if isinstance(value, vf.JudgeConfig))]
    for judge in judges:
        if not is_loopback(f"{urlsplit(judge.base_url).hostname}:0") and not os.environ.get(judge.api_key_var):
            words = f"its rubric asks the model {judge.model} at {judge.base_url}, over the network"
            raise ValueError(f"{words}: set {judge.api_key_var} on every node, or the base_url of a server of yours")


class Played:
    """A loaded environment, its tasks, and the loop of its rollouts."""

    def __init__(self, environment: Any, seat: str) -> None:
        """Read the tasks and start what all episodes share.

        It reads the first ones of an endless taskset. Raises ValueError without a task.
        """
        self.environment, self.seat = environment, seat
        taskset = environment.taskset
        self._more: Iterator[Any] = iter(taskset)
        self._tasks = list(itertools.islice(self._more, None if taskset.bounded else _COUNTED))
        self.num_tasks = len(self._tasks) if taskset.bounded else None
        """None: without an end."""
        if not self._tasks:
            raise ValueError(f"its data set is empty: load of {type(taskset).__name__} yields no task")
        self.task(0)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="rollouts")
        self._thread.start()
        self._serving = environment.serving()
        self.begin(self._serving.__aenter__()).result()
        # A server that episodes share would keep a client for the address of each.
        environment._interception = None

    def begin(self, work: Coroutine[Any, Any, _T]) -> Future[_T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def task(self, number: int) -> Any:
        """Task by number; raises ValueError for one that is not text."""
        self.build(number + 1)
        task = self._tasks[number]
        for message in task.data.prompt if isinstance(task.data.prompt, list) else ():
            if any(part.type != "text" for part in message.content if not isinstance(part, str)):
                raise ValueError(f"task {number} has an image; only texts are played")
        return task

    def build(self, count: int) -> None:
        """Read the first `count` tasks of an endless taskset.

        Raises ValueError: it ends before.
        """
        wanted = max(0, count - len(self._tasks))
        self._tasks += itertools.islice(self._more, wanted)
        if count > len(self._tasks):
            raise ValueError(f"its data set ends after {len(self._tasks)} tasks of {count}: lower task.size")

    def tasks_digest(self) -> list[str]:
        return [task.hash for task in self._tasks]


class VerifiersEpisode(EndpointEpisode):
    """One episode, in its own worker; implements Environment."""

    def __init__(self, played: Played) -> None:
        self._played = played
        self._events: queue.SimpleQueue[tuple[Message, ...] | dict[str, float] | Exception] = queue.SimpleQueue()
        """Messages of each request; last, the parts of the reward or the failure."""
        self._endpoint = Endpoint(self._events.put)
        self._rollout: Future[None] | None = None
        self._has_ended = threading.Event()
        self._parts: dict[str, float] | None = None

    def reset(self, row: Mapping[str, Any], *, seed: int) -> tuple[Message, ...]:  # noqa: ARG002 - of the Protocol
        task = self._played.task(int(row["task"]))
        os.environ[_KEY_VARIABLE] = self._endpoint.api_key
        self._endpoint.start()
        self._rollout = self._played.begin(self._play(task))
        return self._first("the environment")

    def score(self) -> dict[str, float] | float:
        """Parts of the reward; after a limit of what was reached."""
        if self._parts is None:
            self._endpoint.refuse_rest(over())
            try:
                while self._next() is not None:
                    pass
            except _OverError:
                return 0.0
        assert self._parts is not None, "the rollout has ended"
        return self._parts

    def close(self) -> None:
        self._endpoint.refuse_rest(RequestRefused("the episode has ended", status=500))
        if self._rollout is not None:
            self._rollout.cancel()
            self._has_ended.wait()
        self._endpoint.close()

    def _next(self) -> tuple[Message, ...] | None:
        event = self._events.get()
        if isinstance(event, tuple):
            return event
        if isinstance(event, Exception):
            raise event
        self._parts = event
        return None

    async def _play(self, task: Any) -> None:
        vf = sys.modules["verifiers.v1"]
        client = vf.EvalClientConfig(base_url=self._endpoint.base_url, api_key_var=_KEY_VARIABLE)
        try:
            episode = await self._played.environment.run_episode(task, vf.ModelContext(model=MODEL, client=client))
            self._events.put(_parts_of(episode, self._played.seat))
        except Exception as error:  # noqa: BLE001 - the main thread raises it
            self._events.put(error)
        finally:
            self._has_ended.set()


class _OverError(RuntimeError):
    """A rollout that a limit ended and that did not catch it."""


def _parts_of(episode: Any, seat: str) -> dict[str, float]:
    """Weighted rewards of an episode; raises RuntimeError for a failed one."""
    traces = [trace for trace in episode.traces if trace.agent.name == seat]
    errors = [*episode.errors, *(error for trace in episode.traces if not trace.ok for error in trace.errors)]
    if errors:
        kind = _OverError if any(OVER in error.message for error in errors) else RuntimeError
        first = errors[0]
        raise kind(f"{_author_place(first.traceback or '')}{first.type}: {first.message}")
    parts: dict[str, float] = {}
    for trace in traces:
        for name, reward in trace.rewards.items():
            if reward is not None:
                parts[name] = parts.get(name, 0.0) + reward.value
    if not parts:
        raise RuntimeError("the rollout has no reward: give its task a method with @vf.reward")
    return parts


def _author_place(text: str) -> str:
    """Last line of a traceback that is neither verifiers', Python's nor ours."""
    own = str(Path(sys.modules[_PACKAGE].__file__ or "").parent)
    others = (own, str(Path(os.__file__).parent), str(Path(__file__).parent), "<")
    for path, line in reversed(_FRAME.findall(text)):
        if not path.startswith(others) or ("site-packages" in path and not path.startswith(own)):
            return f"{path}, line {line}: "
    return ""


class _BoundProcess(subprocess.Popen[Any]):
    """A process that ends with the thread that started it."""

    def __init__(self, *args: Any, **words: Any) -> None:
        super().__init__(*args, **{"preexec_fn": _end_with_parent, **words})


def _end_with_parent() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _bind_processes() -> None:
    """End tool servers and programs, which leave its group, with this worker."""
    subprocess.Popen = _BoundProcess  # type: ignore[misc]
