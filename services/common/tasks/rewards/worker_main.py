"""Worker process of rewards and episodes.

`worker_pool` starts it by `python -P worker_main.py`, and kills it.

For a user's reward function it does not import heterorl, so that the user's packages meet none of ours. Other jobs
are loaded from heterorl. Loaded code may print; that is not an answer. The process ends with its
parent.

JSON lines: the first names what to load; each later one is a request with one answer. A job may become another
program, which answers by `serve` too.

    f(prompt, completion, answer)            also f(completion, difficulty): parameters by name, columns among them
    f(p, c, a)                               three parameters of other names: in this order
    f(prompts, completions, **columns)       TRL's: lists of one entry each, and a list of one number back

A function's digest covers its module or package, and its imports from the same directory; installed packages elsewhere
are not counted.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib
import importlib.util
import inspect
import json
import os
import signal
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

Answer = Callable[[dict[str, Any]], dict[str, Any]]
MAX_WORDS = 300
"""Longest error text, characters."""
_OUTAGES = (ConnectionError, TimeoutError)
"""Errors of a server that does not answer for now."""
_SERVICES = os.path.normpath(f"{__file__}/../../../..") + os.sep
"""Directory of heterorl's code, which is never the line that raised."""
_MODULES = {
    "math_verify": "rewards.math_comparison", "http": "rewards.http_reward", "judge": "rewards.judge_reward",
    "code": "rewards.sandbox.code_reward", "gym": "rewards.sandbox.gym_reward",
}  # fmt: skip
"""Modules below heterorl.common.tasks by kind of job; each has `load(job)`, which gives an Answer and facts. The fact
`becomes` is a program to become. Kinds `function` and `environment` load user code; any other kind is a module."""


class LoadError(Exception):
    """Code that cannot be loaded; `kind`: place, name, error, missing or outage."""

    def __init__(self, kind: str, text: str) -> None:
        self.kind = kind
        super().__init__(text)


def serve(job: dict[str, Any] | None = None) -> None:
    """Load a job, by default the first line; answer until input ends."""
    # Loaded code must not read or write the two pipes.
    out, requests = os.fdopen(os.dup(1), "wb", buffering=0), os.fdopen(os.dup(0), "rb")
    os.dup2(2, 1)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)

    served = os.getpid()

    def leave_pipes() -> None:
        for pipe in (out, requests) if os.getppid() == served else ():
            os.dup2(nothing, pipe.fileno(), inheritable=False)

    # A forked child that returns from its code must neither read requests nor answer them.
    os.register_at_fork(after_in_child=leave_pipes)
    # Out of memory, the kernel should kill this process, not its service.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("500", encoding="ascii")
    # An alarm without a handler ends the process even inside a long call of C.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    job = job or json.loads(requests.readline())
    # What a user's function reaches, or not, is its own matter.
    outages = () if job["kind"] == "function" else _OUTAGES
    try:
        answer, facts = _loaded(job)
    except LoadError as error:
        _write_line(out, json.dumps({"failed": error.kind, "text": str(error)}))
        return
    if command := facts.get("becomes"):
        os.dup2(requests.fileno(), 0)
        os.dup2(out.fileno(), 1)
        os.execve(command[0], command, {})
    _write_line(out, json.dumps({"ready": True, **facts}))
    for line in requests:
        request = json.loads(line)
        # The parent's limit is shorter; this one counts without a parent.
        signal.setitimer(signal.ITIMER_REAL, request["limit_s"])
        began_s = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, request["cpu_s"])
        try:
            reply = answer(request)
            # Escaped, a character beyond U+FFFF takes 12 bytes in place of 4.
            text = json.dumps({"used_s": time.process_time() - began_s, **reply}, ensure_ascii=False)
        except BaseException as error:  # noqa: BLE001 - reported to the parent, which raises it; sys.exit too
            kinds = {"is_full": isinstance(error, MemoryError), "is_outage": isinstance(error, outages)}
            text = json.dumps({"error": words_of(error), **kinds})
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _write_line(out, text)


def _write_line(out: Any, text: str) -> None:
    try:
        out.write(text.encode(errors="surrogatepass") + b"\n")
    except BrokenPipeError:
        # The parent was killed.
        os._exit(0)


def _loaded(job: dict[str, Any]) -> tuple[Answer, dict[str, Any]]:
    """Function that answers a job's requests, and its facts; raises LoadError."""
    if job.get("module"):
        # Relative files of user code are the same wherever the service starts.
        job["directory"] = os.path.realpath(job["directory"])
        try:
            os.chdir(job["directory"])
        except OSError as error:
            raise LoadError("place", f"there is no directory {job['directory']}") from error
    if job["kind"] == "function":
        return _function(job)
    try:
        if job["kind"] == "environment":
            return _environment(job)
        below = _MODULES.get(job["kind"])
        module: Any = importlib.import_module(f"heterorl.common.tasks.{below}" if below else job["kind"])
        loaded: tuple[Answer, dict[str, Any]] = module.load(job)
        return loaded
    except LoadError:
        raise
    except ImportError as error:
        raise LoadError("missing", str(error)) from error
    except _OUTAGES as error:
        raise LoadError("outage", str(error)) from error
    except (OSError, ValueError) as error:
        raise LoadError("error", str(error)) from error
    except Exception as error:
        raise LoadError("error", words_of(error)) from error


def _function(job: dict[str, Any]) -> tuple[Answer, dict[str, Any]]:
    module, name = job["module"], job["name"]
    function = load_function(module, name, job["directory"])
    try:
        calling = Calling(function)
    except ValueError as error:
        raise LoadError("error", f"{sys.modules[module].__file__}, {name}: {error}") from error

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        return {"parts": calling.parts(request)}

    return answer, {**reward_files(module.partition(".")[0]), **calling.facts}


def _environment(job: dict[str, Any]) -> tuple[Answer, dict[str, Any]]:
    episode_worker: Any = importlib.import_module("heterorl.common.tasks.environments.episode_worker")
    found, facts = None, {}
    if job["module"]:
        found = load_function(job["module"], job["name"], job["directory"], what=job["what"])
        facts = reward_files(job["module"].partition(".")[0])
    answer, more = episode_worker.load(job, found)
    return answer, {**facts, **more}


def load_function(module: str, name: str, directory: str, what: str = "function") -> Callable[..., Any]:
    """Function or class of a module in `directory` or installed; raises LoadError."""
    refuse_two(module.partition(".")[0], directory)
    if directory not in sys.path:
        # Last: installed packages come first.
        sys.path.append(directory)
    loaded = imported(module, directory)
    function: Callable[..., Any] | None = getattr(loaded, name, None)
    if function is None or not callable(function):
        raise LoadError("name", f"{loaded.__file__} has no {what} {name}{_near(name, loaded)}")
    return function


def refuse_two(top: str, directory: str) -> None:
    """Refuse a name with two meanings: sites could load different code."""
    installed, own = importlib.util.find_spec(top), PathFinder.find_spec(top, [directory])
    if installed is None or own is None or _places(installed) & _places(own) or installed.origin == own.origin is None:
        return
    first, second = (min(_places(spec)) for spec in (installed, own))
    raise LoadError("error", f"the name {top} stands for {first} and for {second}: rename one of them")


def _places(spec: ModuleSpec) -> set[str]:
    return {os.path.realpath(place) for place in [*(spec.submodule_search_locations or ()), spec.origin or ""] if place}


def imported(module: str, directory: str) -> ModuleType:
    """A module in a directory or installed; raises LoadError."""
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
    """An error of user code, with the line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith((_SERVICES, "<frozen"))]
    place = f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""
    # A long text must not push the place out.
    return f"{type(error).__name__}: {message_of(error)[:MAX_WORDS]}{place}"


def message_of(error: BaseException) -> str:
    """Message of an error, whose own code may fail."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - the error itself is what counts
        return "its message cannot be read"


def _near(name: str, module: ModuleType) -> str:
    import difflib

    near = difflib.get_close_matches(name, [key for key, value in vars(module).items() if callable(value)], n=1)
    return f"; did you mean {near[0]}?" if near else ""


_NAMES = ("prompt", "completion", "answer", "messages", "whole")
_IN_ORDER = 3
"""Most parameters of other names."""
_OF_TRL = ("prompts", "completions")
_UNKNOWN_HERE = frozenset({"completion_ids", "prompt_ids", "trainer_state", "log_extra", "log_metric", "environments"})
"""Arguments of TRL's trainer that do not exist here."""


class Calling:
    """A reward function and its arguments."""

    def __init__(self, function: Callable[..., Any]) -> None:
        """Read the signature; raise ValueError for arguments that do not exist here."""
        self._function = function
        named, self.takes_all, num_in_order = _parameters(function)
        self._is_batch = "completions" in named
        self._num_in_order = num_in_order if _is_in_order(list(named), num_in_order) else 0
        # By its place, or by its name.
        needed = list(named.values())[_IN_ORDER - 1 : self._num_in_order]
        self.needs_answer = needed[0] if needed else named.get("answer", False)
        own: tuple[str, ...] = _OF_TRL if self._is_batch else _NAMES
        # Columns of the same names as parameters in order stay out, also where the function takes all others.
        self._taken = (*_NAMES, *list(named)[: self._num_in_order])
        if self._num_in_order:
            named = dict(list(named.items())[self._num_in_order :])
            own = _NAMES[_IN_ORDER:]
        self.asks = sorted(name for name in named if name not in own)
        self.needs = [name for name in self.asks if named[name]]
        self._own = list(own) if self.takes_all else [name for name in named if name in own]
        if unknown := sorted(_UNKNOWN_HERE & set(self.needs)):
            raise ValueError(f"it asks for {', '.join(unknown)}, which does not exist here")
        if self._is_batch:
            # To TRL the answer is a column.
            self.needs = [name for name in self.needs if name != "answer"]

    @property
    def facts(self) -> dict[str, Any]:
        named = {"asks": self.asks, "needs": self.needs, "takes_all": self.takes_all}
        return {**named, "needs_answer": self.needs_answer}

    def parts(self, request: Mapping[str, Any]) -> dict[str, float]:
        """Values of one completion, by name.

        `request` has prompt, completion, answer, messages, whole (the completion with its thoughts), and columns if
        any. Raises ValueError for other than numbers, or a list of one number where it is called with lists.
        """
        if self._is_batch:
            return {"reward": _number(self._of_batch(request))}
        columns = {name: value for name, value in request.get("columns", {}).items() if name not in self._taken}
        named = {name: request[name] for name in self._own} | columns
        return numbers_of(self._function(*[request[name] for name in _NAMES[: self._num_in_order]], **named))

    def _of_batch(self, request: Mapping[str, Any]) -> Any:
        prompt, completion = request["prompt"], request["whole"]
        if request["is_conversation"]:
            prompt, completion = request["messages"], [{"role": "assistant", "content": completion}]
        columns = {name: [value] for name, value in request.get("columns", {}).items() if name not in _OF_TRL}
        if "answer" in self.asks:
            columns.setdefault("answer", [request["answer"]])
        own = {"prompts": [prompt], "completions": [completion]}
        values = self._function(**{name: own[name] for name in self._own}, **columns)
        try:
            (value,) = values
        except (TypeError, ValueError):
            raise ValueError(f"it was asked for a list of one number, and returned {values!r:.80}") from None
        return value


def numbers_of(value: Any) -> dict[str, float]:
    """Named parts that user code returned; raises ValueError for other than numbers."""
    parts = value if isinstance(value, Mapping) else {"reward": value}
    return {str(name): _number(part) for name, part in parts.items()}


def _number(part: Any) -> float:
    if not isinstance(part, str | bytes):
        with contextlib.suppress(TypeError):
            return float(part)
    if inspect.iscoroutine(part):
        part.close()
        raise ValueError("it is async: a reward is a plain function")
    raise ValueError(f"it returned {part!r:.80}, and no number")


def _is_in_order(names: Sequence[str], count: int) -> bool:
    """Whether the first parameters get prompt, completion and answer by their place.
    Two do so only where the first is `prompt`. A known name at another place makes all go by name."""
    first = names[:count]
    if "completion" in names or "completions" in names:
        return False
    if any(name in _NAMES and _NAMES.index(name) != place for place, name in enumerate(first)):
        return False
    return count == _IN_ORDER or (len(first) == _IN_ORDER - 1 and first[0] == _NAMES[0])


def _parameters(function: Callable[..., Any]) -> tuple[dict[str, bool], bool, int]:
    """Parameters, true where needed; whether it takes others; how many in order."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        # A function in C may have no signature.
        return {}, False, _IN_ORDER
    in_order = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    by_name = [one for one in parameters if one.kind == one.KEYWORD_ONLY]
    named = {one.name: one.default is one.empty for one in [*in_order, *by_name]}
    kinds = {one.kind for one in parameters}
    count = _IN_ORDER if inspect.Parameter.VAR_POSITIONAL in kinds else min(_IN_ORDER, len(in_order))
    return named, inspect.Parameter.VAR_KEYWORD in kinds, count


OURS = "heterorl"
"""Package of this file."""


def reward_files(top: str) -> dict[str, Any]:
    """A module's or package's files: `digest` of names and bytes, `num_files`, `place`."""
    found = _home(top)
    assert found is not None, "it was imported"
    root = found.parent
    paths = {key: os.path.realpath(place) for key, place in sysconfig.get_paths().items()}
    # Other packages lie next to an installed one.
    own_only = str(root) in paths.values()
    # A virtual environment may lie below the author's directory.
    installed = [paths[key] for key in ("purelib", "platlib", "stdlib", "platstdlib")]
    files: dict[str, Path] = {}
    # heterorl itself does not count, wherever it lies.
    waiting, seen = [top], {top, OURS}
    while waiting:
        home = _home(waiting.pop())
        if home is None or home.parent != root:
            continue
        for path in _files(home):
            files[path.relative_to(root).as_posix()] = path
            names = set() if own_only or path.suffix != ".py" else _imported_names(path)
            waiting += names - seen
            seen |= names
    for name, module in () if own_only else list(sys.modules.items()):
        # Imports by computed names.
        path = Path(os.path.realpath(getattr(module, "__file__", None) or ""))
        if name.partition(".")[0] == OURS or any(path.is_relative_to(place) for place in installed):
            continue
        if path.is_file() and path.is_relative_to(root) and path.suffix == ".py" and not path.samefile(__file__):
            files[path.relative_to(root).as_posix()] = path
    total = hashlib.blake2b(digest_size=32)
    for name in sorted(files):
        content = hashlib.blake2b(files[name].read_bytes(), digest_size=32).hexdigest()
        total.update(f"{name}\0{content}\n".encode(errors="surrogateescape"))
    return {"digest": total.hexdigest(), "num_files": len(files), "place": str(root)}


def _home(top: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    places = list(spec.submodule_search_locations or ())
    if not places and not spec.has_location:
        return None
    return Path(os.path.realpath(places[0] if places else spec.origin or ""))


def _files(home: Path) -> Iterator[Path]:
    if home.is_file():
        yield home
        return
    for directory, names, files in os.walk(home):
        names[:] = sorted(name for name in names if name != "__pycache__" and not name.startswith("."))
        for name in files:
            if not name.startswith(".") and not name.endswith((".pyc", "~")):
                yield Path(directory) / name


def _imported_names(path: Path) -> set[str]:
    """First words of all absolute imports, in functions too."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return set()
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names - sys.stdlib_module_names


if __name__ == "__main__":
    serve()
