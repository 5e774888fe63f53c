"""Which files make a reward: its module or whole package, and what it imports of the same directory.

Two nodes whose digests agree compute the same, as far as files can tell: what is installed elsewhere is not counted.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

OURS = "heterorl"
"""The package that this file is of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardFiles:
    """The digest of the files' names and bytes, how many they are, and the directory that they lie in."""

    digest: str
    count: int
    place: str


def reward_files(top: str) -> RewardFiles:
    """The files behind the module or package `top`, which can be imported."""
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
    return RewardFiles(digest=total.hexdigest(), count=len(files), place=str(root))


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
