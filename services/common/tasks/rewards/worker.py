"""A process that computes rewards or holds episodes: `python -P worker.py`, started and killed by `process`.

For a reward of somebody's own it imports nothing of heterorl, so that the packages of whoever wrote it meet none of
ours, not even by name; an environment, and a task that comes with heterorl, are loaded from there.
JSON lines only: the first says what to load, the next are requests, and each has one answer. What is loaded may print
what it likes; that is no answer. The process ends by itself when nobody is left to kill it.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

Answer = Callable[[dict[str, Any]], dict[str, Any]]
MAX_WORDS = 300
"""Characters of an error's text."""
_MODULES = {
    "math_verify": "rewards.expressions", "exact": "completions", "task": "registry", "http": "rewards.service",
    "judge": "rewards.judge", "code": "rewards.sandbox.code", "gym": "rewards.sandbox.gym",
}  # fmt: skip
"""Below heterorl.common.tasks, by the kind of a job; each has `load(job)`, which gives an Answer and facts.

Beside these, a `function` and an `environment` are somebody's own."""


class LoadError(Exception):
    """What cannot be loaded: `kind` is place, name, error or missing."""

    def __init__(self, kind: str, text: str) -> None:
        self.kind = kind
        super().__init__(text)


def main() -> None:
    """Load what the first line says, then answer until the input ends."""
    # Print statements and reads of what is loaded must not meet the two pipes.
    out, requests = os.fdopen(os.dup(1), "wb", buffering=0), os.fdopen(os.dup(0), "rb")
    os.dup2(2, 1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    # A process that takes too much memory shall be this one, not the service that started it.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("500", encoding="ascii")
    # An alarm without a handler ends the process even inside one long step of C, where Python never gets its turn.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    job = json.loads(requests.readline())
    try:
        answer, facts = _loaded(job)
    except LoadError as error:
        _write(out, {"failed": error.kind, "text": str(error)})
        return
    _write(out, {"ready": True, **facts})
    for line in requests:
        request = json.loads(line)
        # The parent's own limit is shorter; this one counts when the parent is gone.
        signal.setitimer(signal.ITIMER_REAL, request["limit_s"])
        began_s = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, request["cpu_s"])
        try:
            reply = answer(request)
            text = json.dumps({"used_s": time.process_time() - began_s, **reply})
        except Exception as error:  # noqa: BLE001 - reported to the parent, which raises it
            text = json.dumps({"error": words_of(error)})
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _write_line(out, text)


def _write(out: Any, reply: dict[str, Any]) -> None:
    _write_line(out, json.dumps(reply))


def _write_line(out: Any, text: str) -> None:
    try:
        out.write(text.encode() + b"\n")
    except BrokenPipeError:
        # Who asked was killed: nothing is wrong here, and nobody is left to answer.
        os._exit(0)


def _loaded(job: dict[str, Any]) -> tuple[Answer, dict[str, Any]]:
    """What answers the requests of a job, and what is known of what it loaded.

    Raises:
        LoadError: it cannot be loaded.
    """
    if job["kind"] == "function":
        return _function(job)
    try:
        if job["kind"] == "environment":
            return _environment(job)
        module: Any = importlib.import_module(f"heterorl.common.tasks.{_MODULES[job['kind']]}")
        loaded: tuple[Answer, dict[str, Any]] = module.load(job)
        return loaded
    except LoadError:
        raise
    except ImportError as error:
        raise LoadError("missing", str(error)) from error
    except (OSError, ValueError) as error:
        raise LoadError("error", str(error)) from error
    except Exception as error:
        raise LoadError("error", words_of(error)) from error


def _function(job: dict[str, Any]) -> tuple[Answer, dict[str, Any]]:
    module, name = job["module"], job["name"]
    function = load_function(module, name, job["directory"])
    ways = _beside("functions")
    try:
        calling = ways.Calling(function)
    except ways.Unanswerable as error:
        raise LoadError("error", f"{sys.modules[module].__file__}, {name}: {error}") from error

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        return {"parts": calling.parts(request)}

    return answer, {**_files_of(module), **calling.facts}


def _environment(job: dict[str, Any]) -> tuple[Answer, dict[str, Any]]:
    inside: Any = importlib.import_module("heterorl.common.tasks.environments.inside")
    found, facts = None, {}
    if job["module"]:
        found = load_function(job["module"], job["name"], job["directory"], what=job["what"])
        facts = _files_of(job["module"])
    answer, more = inside.load(job, found)
    return answer, {**facts, **more}


def _files_of(module: str) -> dict[str, Any]:
    files: dict[str, Any] = _beside("functions").reward_files(module.partition(".")[0])
    return files


def load_function(module: str, name: str, directory: str, what: str = "function") -> Callable[..., Any]:
    """A function or class of a module that lies in a directory or is installed.

    Raises:
        LoadError: it cannot be found, imported or called.
    """
    _refuse_two(module.partition(".")[0], directory)
    if directory not in sys.path:
        # Last: what is installed keeps its names.
        sys.path.append(directory)
    loaded = _imported(module, directory)
    function: Callable[..., Any] | None = getattr(loaded, name, None)
    if function is None or not callable(function):
        raise LoadError("name", f"{loaded.__file__} has no {what} {name}{_near(name, loaded)}")
    return function


def _refuse_two(top: str, directory: str) -> None:
    """A name that stands for two things would be one of them at one site and the other at another."""
    installed, own = importlib.util.find_spec(top), PathFinder.find_spec(top, [directory])
    if installed is None or own is None or _places(installed) & _places(own) or installed.origin == own.origin is None:
        return
    first, second = (min(_places(spec)) for spec in (installed, own))
    raise LoadError("error", f"the name {top} stands for {first} and for {second}: rename one of them")


def _places(spec: ModuleSpec) -> set[str]:
    return {os.path.realpath(place) for place in [*(spec.submodule_search_locations or ()), spec.origin or ""] if place}


def _imported(module: str, directory: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        parents = {module.rsplit(".", count)[0] for count in range(module.count(".") + 1)}
        if error.name in parents:
            raise LoadError("place", f"there is no module {error.name} in {directory}") from error
        raise LoadError("error", f"{module} cannot be imported: {words_of(error)}") from error
    except BaseException as error:
        raise LoadError("error", f"{module} cannot be imported: {words_of(error)}") from error


def words_of(error: BaseException) -> str:
    """An error of the user's code, and the line that raised it."""
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    own = [frame for frame in own if not frame.filename.startswith("<frozen")]
    place = f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""
    # A reward that raises with the completion in its words must not push the place out.
    return f"{type(error).__name__}: {str(error)[:MAX_WORDS]}{place}"


def _near(name: str, module: ModuleType) -> str:
    import difflib

    near = difflib.get_close_matches(name, [key for key, value in vars(module).items() if callable(value)], n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _beside(name: str) -> Any:
    """A module in this file's directory, which is on no path."""
    spec = importlib.util.spec_from_file_location(f"_heterorl_{name}", Path(__file__).parent / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
