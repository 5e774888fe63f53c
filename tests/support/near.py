"""Which test files stand nearest to a change: those that changed, and those that import or name a file that changed."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePath

ROOT = Path(__file__).parents[2]
FOLDERS = ("tests", "research/tests")
PACKAGES = {"services": "heterorl", "research": "heterorl_research"}
"""Folders that are imported by another name."""
PROGRAMS = {"benchmarks", "docs", "tests"}
"""Folders of `research` that are imported by their paths."""


def changed(base: str = "") -> list[str]:
    """Files that differ from a commit, new ones included; from HEAD by default, from its parent where nothing does."""
    names = _git("diff", "--name-only", base or "HEAD") + _git("ls-files", "--others", "--exclude-standard")
    return names or _git("diff", "--name-only", "HEAD~1")


def files_near(names: Iterable[str], root: Path = ROOT) -> list[str]:
    """The test files that are among these, import or test one of these modules by name, or name one of these other files.

    A text of tests stands for its suffix where it looks for all files that have it, such as `*.md`.
    """
    names = sorted(set(names))
    modules = {_module(name) for name in names if name.endswith(".py")}
    others = {name for name in names if not name.endswith(".py")}
    tests = {f"test_{PurePath(name).name}" for name in names if name.endswith(".py")}
    told = {PurePath(name).name for name in others} | {f"*{PurePath(name).suffix}" for name in others}
    found = []
    for path in sorted(path for folder in FOLDERS for path in (root / folder).rglob("test_*.py")):
        name, text = str(path.relative_to(root)), path.read_text()
        if (
            {name, path.name} & {*names, *tests}
            or _imported(text) & modules
            or any(f'{word}"' in text for word in told)
        ):
            found.append(name)
    return found


def _module(name: str) -> str:
    """`services/learner/learner_app.py` is imported as heterorl.learner.learner_app, tests and benchmarks by their paths."""
    parts = PurePath(name).with_suffix("").parts
    if parts[0] in PACKAGES and parts[1] not in PROGRAMS:
        parts = (PACKAGES[parts[0]], *parts[1:])
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported(text: str) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names


def _git(*words: str) -> Sequence[str]:
    command = ["git", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
