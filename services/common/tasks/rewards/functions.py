"""A reward function of somebody's own: how it wants to be called, and which files it is made of.

It is called by the names of its parameters, in order, or with lists as TRL calls one.

    f(prompt, completion, answer)            also f(completion, difficulty): parameters by name, columns among them
    f(p, c, a)                               three parameters of other names: in this order
    f(prompts, completions, **columns)       TRL's: lists of one entry each, and a list of one number back

Its files are its module or whole package, and what it imports of the same directory. Two nodes whose digests agree
compute the same, as far as files can tell: what is installed elsewhere is not counted.

Imports nothing of heterorl: it is loaded by the process that runs foreign code.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import inspect
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

_NAMES = ("prompt", "completion", "answer", "messages", "whole")
_IN_ORDER = 3
"""So many of them may be parameters of other names."""
_OF_TRL = ("prompts", "completions")
_UNKNOWN_HERE = frozenset({"completion_ids", "prompt_ids", "trainer_state", "log_extra", "log_metric", "environments"})
"""What TRL's trainer gives besides, and no reward is given here."""


class Unanswerable(Exception):
    """The function asks for what it cannot be given."""


class Calling:
    """One function, and what it asks for."""

    def __init__(self, function: Callable[..., Any]) -> None:
        """Look at its signature.

        Raises:
            Unanswerable: it needs what is given to no reward here.
        """
        self._function = function
        named, self.takes_all, num_in_order = _parameters(function)
        self._is_batch = "completions" in named
        self._num_in_order = 0 if self._is_batch or "completion" in named else num_in_order
        own: tuple[str, ...] = _OF_TRL if self._is_batch else _NAMES
        if self._num_in_order:
            named = dict(list(named.items())[self._num_in_order :])
            own = _NAMES[_IN_ORDER:]
        self.asks = sorted(name for name in named if name not in own)
        self.needs = [name for name in self.asks if named[name]]
        self._own = list(own) if self.takes_all else [name for name in named if name in own]
        if unknown := sorted(_UNKNOWN_HERE & set(self.needs)):
            raise Unanswerable(f"it asks for {', '.join(unknown)}, which no reward is given here")
        if self._is_batch:
            # An answer is a column to TRL, whatever the set calls it.
            self.needs = [name for name in self.needs if name != "answer"]

    @property
    def facts(self) -> dict[str, Any]:
        """What whoever calls it should know."""
        return {"asks": self.asks, "needs": self.needs, "takes_all": self.takes_all}

    def parts(self, request: Mapping[str, Any]) -> dict[str, float]:
        """The values of one completion, by name.

        Args:
            request: prompt, completion, answer, messages, whole (the completion with its thoughts), and columns if any.

        Raises:
            ValueError: it returned text, or no list of one number where it is called with lists.
        """
        if self._is_batch:
            return {"reward": _number(self._of_batch(request))}
        columns = {name: value for name, value in request.get("columns", {}).items() if name not in _NAMES}
        named = {name: request[name] for name in self._own} | columns
        value = self._function(*[request[name] for name in _NAMES[: self._num_in_order]], **named)
        parts = value if isinstance(value, dict) else {"reward": value}
        return {str(part): _number(number) for part, number in parts.items()}

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
        if value is None:
            raise ValueError("it returned None for a completion, and no number")
        return value


def _number(value: Any) -> float:
    if isinstance(value, str | bytes):
        raise ValueError(f"it returned the text {value!r:.80}, and no number")
    return float(value)


def _parameters(function: Callable[..., Any]) -> tuple[dict[str, bool], bool, int]:
    """Parameters by name, each with whether it is needed; whether others are taken; how many may be given in order."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        # Of a function in C nothing is known.
        return {}, False, _IN_ORDER
    in_order = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    by_name = [one for one in parameters if one.kind == one.KEYWORD_ONLY]
    named = {one.name: one.default is one.empty for one in [*in_order, *by_name]}
    kinds = {one.kind for one in parameters}
    count = _IN_ORDER if inspect.Parameter.VAR_POSITIONAL in kinds else min(_IN_ORDER, len(in_order))
    return named, inspect.Parameter.VAR_KEYWORD in kinds, count


OURS = "heterorl"
"""The package that this file is of."""


def reward_files(top: str) -> dict[str, Any]:
    """The files behind a module or package that can be imported: `digest` of names and bytes, `num_files`, `place`."""
    found = _home(top)
    assert found is not None, "it was imported"
    root = found.parent
    paths = {key: os.path.realpath(place) for key, place in sysconfig.get_paths().items()}
    # Beside an installed package lie other people's.
    own_only = str(root) in paths.values()
    # An environment of Python may lie below the author's directory.
    installed = [paths[key] for key in ("purelib", "platlib", "stdlib", "platstdlib")]
    files: dict[str, Path] = {}
    # A node's own release is none of the author's files, wherever it lies.
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
        # What was imported by a name that no text shows.
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
    """The file of a module, or the directory of a package."""
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
    """The first words of all absolute imports, in functions too."""
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
