"""Worker side of episodes: makes, steps, scores and closes the author's environments.

`heterorl.common.tasks.rewards.worker_main` loads this module, reads requests and counts processor time. It also answers
an exception of the author's code with the line that raised.
"""

import functools
import importlib
import json
import random
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from heterorl.common.tasks.environments.environment import Action, Environment, Observation, Reset, Step, ToolCall
from heterorl.common.tasks.environments.tools import ToolEnvironment, column_names, functions_of, schemas_of
from heterorl.common.tasks.rewards.worker_main import numbers_of
from heterorl.common.tasks.task import ROLES

Answer = Callable[[dict[str, Any]], dict[str, Any]]
OBSERVED = ("user", "tool", "system")
"""Roles of an observation."""
_NEEDED = ("reset", "step", "score")
FIRST_CHARS = 131_072
"""Bound on first messages, which are a prompt; as JSON they fit into a reply."""
_DEFAULTS: dict[str, Any] = {"is_deterministic": True, "shares_process": False, "tools": [], "needs": []}
"""Facts of an environment that states none; see `Environment`."""


def load(job: Mapping[str, Any], found: Any) -> tuple[Answer, dict[str, Any]]:
    """Answers requests for episodes, and facts about the environment.

    `found` is the class, or the function `score` of a file of tools; else None.

    Raises:
        ImportError: a package is not installed.
        ValueError: it is not an environment.
    """
    most = int(job["max_observation_chars"])
    make: Callable[[], Any]
    facts: dict[str, Any]
    if job["what"] == "class":
        if missing := [name for name in _NEEDED if getattr(found, name, None) in (None, getattr(Environment, name))]:
            raise ValueError(f"{job['name']} has no {', '.join(missing)}; an environment needs reset, step and score")
        make = functools.partial(_made, found)
        facts = {flag: _flag(found, flag) for flag in ("is_deterministic", "shares_process")}
        facts["tools"] = schemas_of(getattr(found, "tools", ()))
    elif job["what"] == "function":
        file = sys.modules[job["module"]]
        functions = functions_of(file)
        make = functools.partial(ToolEnvironment, functions, found, most=most)
        facts = {"needs": column_names(found), "tools": schemas_of(functions)}
        facts["is_deterministic"] = _flag(file, "is_deterministic")
    else:
        module: Any = importlib.import_module(f"heterorl.common.tasks.environments.{job['what']}")
        make, facts = module.load(job["name"], job["directory"])
        if (build := facts.pop("build", None)) is not None:
            # Here, since an episode's time limit is too short for all tasks before its own.
            build(int(job["num_rows"]))
    _bound_memory(int(job["memory_bytes"]))
    return LiveEpisodes(make, most).answer, {**_DEFAULTS, **facts}


def _flag(found: Any, name: str) -> bool:
    value = getattr(found, name, _DEFAULTS[name])
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r:.80}: write {name} = True or False into the class or file")
    return value


def _made(found: Callable[[], Any]) -> Any:
    environment = found()
    # They are read from the class, before an episode begins.
    for name, value in getattr(environment, "__dict__", {}).items():
        is_flag = name in ("is_deterministic", "shares_process")
        is_tools = name == "tools" and isinstance(value, list | tuple) and any(map(callable, value))
        if (is_flag or is_tools) and value != getattr(found, name, _DEFAULTS[name]):
            raise ValueError(f"__init__ sets {name}: make it an attribute of the class")
    return environment


class LiveEpisodes:
    """Episodes that live in this process, by number."""

    def __init__(self, make: Callable[[], Any], most: int) -> None:
        self._make, self._most = make, most
        self._live: dict[int, Any] = {}
        self._states: dict[int, tuple[Any, Any]] = {}
        """State of `random` and `numpy.random` of each episode."""

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        number = request["episode"]
        if (states := self._states.get(number)) is not None:
            random.setstate(states[0])
            np.random.set_state(states[1])
        try:
            return self._answered(number, request)
        finally:
            self._states[number] = random.getstate(), np.random.get_state()
            if request["do"] == "close":
                del self._states[number]

    def _answered(self, number: int, request: dict[str, Any]) -> dict[str, Any]:
        if (what := request["do"]) == "open":
            return self._opened(number, request["row"], request["seed"])
        if what == "close":
            # Without an environment where its class raised.
            if (close := getattr(self._live.pop(number, None), "close", None)) is not None:
                close()
            return {}
        environment = self._live[number]
        if what == "step":
            observation = observation_of(environment.step(_action(request["action"])))
            if not (observation.messages or observation.done):
                raise ValueError("step returned no message, and the episode is not done")
            bound = f"task.max_observation_chars is {self._most}"
            messages = self._written(observation.messages, OBSERVED, most=self._most, bound=bound)
            return {"messages": messages, "done": bool(observation.done)}
        return {"parts": numbers_of(environment.score())}

    def _opened(self, number: int, row: Any, seed: int) -> dict[str, Any]:
        random.seed(seed)
        np.random.seed([seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF])
        self._live[number] = environment = self._make()
        first = environment.reset(row, seed=seed)
        if first is None:
            return {"first": None}
        shown = {"tools": environment.shown_tools} if hasattr(environment, "shown_tools") else {}
        bound = f"first messages have at most {FIRST_CHARS}"
        messages = self._written(_messages(first), ROLES, most=FIRST_CHARS, bound=bound)
        if not messages or messages[-1][0] == "assistant":
            raise ValueError("reset returned no messages, or the last one is the assistant's")
        return {"first": messages, **shown}

    @staticmethod
    def _written(messages: Sequence[Any], roles: Sequence[str], *, most: int, bound: str) -> list[list[str]]:
        written = [_message(each, roles) for each in messages]
        size = sum(len(content) for _, content, _ in written)
        if size > most:
            raise ValueError(f"{size} characters; {bound}")
        return written


def observation_of(said: Step) -> Observation:
    """The return value of `step` as an observation."""
    if said is None:
        return Observation((), done=True)
    if isinstance(said, str):
        return Observation(tuple(_messages(said)))
    if not isinstance(said, Observation):
        raise ValueError(f"step returned {said!r:.80}, and neither an Observation, a text nor None")
    return said


def _messages(first: Reset) -> Sequence[Any]:
    if not isinstance(first, str | Sequence):
        raise ValueError(f"reset returned {first!r:.80}, and neither a text nor messages")
    return [{"role": "user", "content": first}] if isinstance(first, str) else list(first or ())


def _message(entry: Any, roles: Sequence[str]) -> list[str]:
    fields = entry if isinstance(entry, Mapping) else {
        name: getattr(entry, name, None) for name in ("role", "content", "name")
    }  # fmt: skip
    role, content, name = fields.get("role"), fields.get("content"), fields.get("name") or ""
    if not isinstance(role, str) or role not in roles or not isinstance(content, str) or not isinstance(name, str):
        raise ValueError(f"{entry!r:.80} is not a message with a role ({', '.join(roles)}) and a text as content")
    # Raises for half a surrogate pair.
    f"{content}{name}".encode()
    return [role, content, name]


def _action(written: Mapping[str, Any]) -> Action:
    # A policy can write half a surrogate pair in JSON, and the author may echo it.
    fields = json.loads(json.dumps(written, ensure_ascii=False).encode(errors="replace"))
    calls = tuple(ToolCall(name, arguments) for name, arguments in fields["tool_calls"])
    return Action(fields["text"], calls, fields["is_cut"])


def _bound_memory(most: int) -> None:
    """Bound the address space to its current size and `most` bytes.
    A program has another bound (program.py)."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    total = pages * resource.getpagesize() + most
    resource.setrlimit(resource.RLIMIT_AS, (total, resource.getrlimit(resource.RLIMIT_AS)[1]))
