"""Break one guard at a time in a copy of the tree, and see which tests notice.

    python -m campaigns.mutants --count 25 --seed 0 --json benchmarks/results/mutants.json

A guard is an `if` that ends in `raise`, or a `min` or `max` of a value and a constant. The broken `if` never raises;
the broken clamp is its bare value. Tests that import the module run nearest first, those of the landing tier before the
slow ones. A test counts if it fails again alone and passes on the whole tree. The result is unknown if the time ends
before all of them ran. Rows already in the file are kept.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import hashlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from tests.support.import_graph import NAME, edges, modules

ROOT = Path(__file__).parents[1]
TIERS = {"landing": "not slow and not nodes", "second": "slow and not compiler and not image and not nodes"}
"""Marker expressions, in the order in which tests run."""
BATCHES = (4, 16, 64)
"""Files in each run of pytest, the rest in the last: pytest collects all its files before it runs one."""
ELSEWHERE = {"engines", "gpu", "trackers"}
"""Folders of tests that need another environment or device."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """One guard; the text between bytes `start` and `end` is replaced to break it."""

    file: str
    line: int
    kind: str
    text: str
    nth: int
    """Index among equal texts in the file; it stays when lines move."""
    start: int
    end: int
    replacement: str

    @property
    def key(self) -> tuple[str, str, int]:
        """Name of the guard across commits."""
        return self.file, self.text, self.nth


def guards_of(source: str, file: str) -> list[Guard]:
    """All guards of a source, in order."""
    data = source.encode()
    starts = [0]
    for line in data.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found: list[Guard] = []
    counts: dict[str, int] = defaultdict(int)
    for node in sorted(_places(ast.parse(source)), key=lambda node: (node.lineno, node.col_offset)):
        target = node.test if isinstance(node, ast.If) else node
        first, last = target.lineno - 1, (target.end_lineno or 0) - 1
        start, end = starts[first] + target.col_offset, starts[last] + (target.end_col_offset or 0)
        whole = data[start:end].decode()
        if isinstance(node, ast.If):
            # The condition is still computed: a name that it binds is needed below.
            kind, replacement = "raise", f"({whole}) and False"
        else:
            kind, replacement = "clamp", f"({ast.get_source_segment(source, _value(node))})"
        text = " ".join(whole.split())
        found.append(
            Guard(
                file=file, line=node.lineno, kind=kind, text=text, nth=counts[text], start=start, end=end,
                replacement=replacement,
            )
        )  # fmt: skip
        counts[text] += 1
    return found


def _places(tree: ast.AST) -> Iterable[ast.If | ast.Call]:
    for node in ast.walk(tree):
        is_refusal = isinstance(node, ast.If) and isinstance(node.body[-1], ast.Raise)
        if isinstance(node, ast.If | ast.Call) and (is_refusal or _is_clamp(node)):
            yield node


def _is_clamp(node: ast.If | ast.Call) -> bool:
    """Whether it is `min` or `max` of a value and a bound in the source."""
    if isinstance(node, ast.If) or not isinstance(node.func, ast.Name) or node.func.id not in ("min", "max"):
        return False
    return len(node.args) == 2 and not node.keywords and sum(_is_bound(arg) for arg in node.args) == 1


def _value(call: ast.Call) -> ast.expr:
    return next(arg for arg in call.args if not _is_bound(arg))


def _is_bound(node: ast.expr) -> bool:
    """Whether it is a number or the name of a constant."""
    return isinstance(node, ast.Constant) or (isinstance(node, ast.Name) and node.id.isupper())


def all_guards(root: Path = ROOT) -> list[Guard]:
    paths = modules(root / "services").values()
    return [guard for path in paths for guard in guards_of(path.read_text(), path.relative_to(root).as_posix())]


def draw(guards: Iterable[Guard], *, count: int, seed: int) -> list[Guard]:
    """Guards drawn by chance; a change elsewhere in the tree keeps most of a seed's draw."""
    return sorted(guards, key=lambda guard: hashlib.sha256(repr((seed, guard.key)).encode()).digest())[:count]


def broken(source: str, guard: Guard) -> str:
    data = source.encode()
    return (data[: guard.start] + guard.replacement.encode() + data[guard.end :]).decode()


def reaching(root: Path = ROOT) -> dict[str, list[str]]:
    """For each file of services, the test files that reach it through imports, nearest first."""
    ours = modules(root / "services")
    theirs = {
        ".".join(path.relative_to(root).with_suffix("").parts): path
        for path in sorted((root / "tests").rglob("*.py"))
        if path.relative_to(root).parts[1] not in ELSEWHERE
    }
    graph: dict[str, set[str]] = defaultdict(set)
    for first, second in edges(ours | theirs):
        graph[first].add(second)
    # The command line loads a service by its name, and `children` starts the command line.
    graph[f"{NAME}.cli.main"] |= {name for name in ours if name.endswith("_app")}
    graph[f"{NAME}.common.process.threads"].add(f"{NAME}.__main__")
    for name, path in (ours | theirs).items():
        graph[name] |= _started(name, path) & (ours.keys() | theirs.keys())
        graph[name] |= {f"{folder}.conftest" for folder in _folders(name)} & theirs.keys()
    by_file: dict[str, list[tuple[bool, bool, int, int, str]]] = defaultdict(list)
    for name, path in theirs.items():
        if path.name.startswith("test_"):
            far, test = _distances(graph, name), path.relative_to(root).as_posix()
            # Some modules are loaded by their names.
            far |= {module: 1 for module in ours if path.stem == f"test_{ours[module].stem}" and module not in far}
            for module in far.keys() & ours.keys():
                file = ours[module].relative_to(root)
                is_own = test.startswith(f"tests/unit/{file.parts[1]}/")
                # Importers first, then tests of its service; of two equally near, the one that reaches less.
                by_file[file.as_posix()].append((far[module] > 1, not is_own, far[module], len(far), test))
    return {file: [test for *_, test in sorted(tests)] for file, tests in by_file.items()}


def _started(name: str, path: Path) -> set[str]:
    """Programs that a file starts: whole module names, or files in its folder."""
    constants = {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}
    words = {value for value in constants if isinstance(value, str) and "." in value}
    return words | {f"{name.rpartition('.')[0]}.{word.removesuffix('.py')}" for word in words if word.endswith(".py")}


def _folders(name: str) -> list[str]:
    parts = name.split(".")[:-1]
    return [".".join(parts[:length]) for length in range(1, len(parts) + 1)]


def _distances(graph: Mapping[str, Iterable[str]], start: str) -> dict[str, int]:
    far, edge = {start: 0}, [start]
    while edge:
        edge = [
            other for name in edge for other in graph.get(name, ()) if far.setdefault(other, far[name] + 1) > far[name]
        ]
        edge = list(dict.fromkeys(edge))
    return far


class Copy:
    """A clone of the committed tree for broken guards and their tests."""

    def __init__(self, directory: Path, python: str) -> None:
        self.root = directory / "tree"
        subprocess.run(["git", "clone", "-q", "--shared", str(ROOT), str(self.root)], check=True)
        if (ROOT / ".venv").exists():
            (self.root / ".venv").symlink_to((ROOT / ".venv").resolve())
        self._python = python
        self.commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=self.root, capture_output=True, text=True, check=True
        ).stdout.strip()

    @contextlib.contextmanager
    def without(self, guard: Guard) -> Iterator[None]:
        """Break one guard until the block ends."""
        path = self.root / guard.file
        source = path.read_text()
        self._write(path, broken(source, guard))
        try:
            yield
        finally:
            self._write(path, source)

    def _write(self, path: Path, source: str) -> None:
        path.write_text(source)
        # It is known by size and whole seconds: two guards broken within a second may look alike.
        Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)

    def first_failure(self, tests: Sequence[str], *, marker: str, skip: Iterable[str], limit_s: float) -> str | None:
        """The first failing test; empty if none fails, None if the time ends first."""
        command = [
            self._python, "-m", "pytest", "-x", "-q", "--tb=no", "-rfE", "-p", "no:cacheprovider", "-p", "no:randomly",
            "-m", marker, *(f"--deselect={test}" for test in skip), *tests,
        ]  # fmt: skip
        paths = {"PYTHONPATH": f"{self.root / 'src'}:{self.root}", "OMP_NUM_THREADS": "1", "CI": "1"}
        process = subprocess.Popen(
            command, cwd=self.root, env=os.environ | paths, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )  # fmt: skip
        try:
            output, _ = process.communicate(timeout=max(limit_s, 1.0))
        except subprocess.TimeoutExpired:
            return None
        finally:
            end(process)
        return failed(output, process.returncode)


def end(process: subprocess.Popen[str]) -> None:
    """Kill pytest and all processes of its tests, also those in groups of their own."""
    found: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        pytest = psutil.Process(process.pid)
        found = [pytest, *pytest.children(recursive=True)]
    # What outlived its parent is no child any more, but of pytest's group.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for one in found:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    process.wait()


def failed(output: str, code: int) -> str:
    """The test in pytest's summary; empty if all passed or none was selected. Raises RuntimeError if pytest itself
    failed.
    """
    # 0: all passed; 5: none was chosen.
    if code in (0, 5):
        return ""
    for line in output.splitlines():
        if line.startswith(("FAILED ", "ERROR ")):
            return line.split(" ", 1)[1].split(" - ")[0].strip()
    raise RuntimeError(f"pytest ended with {code} and names no test:\n{output[-2000:]}")


def judge(copy: Copy, guard: Guard, tests: Sequence[str], *, known: set[str], limit_s: float) -> dict[str, Any]:
    """The row of one guard; adds tests that prove nothing to `known`."""
    row: dict[str, Any] = {
        "file": guard.file, "line": guard.line, "kind": guard.kind, "guard": guard.text, "nth": guard.nth,
        "commit": copy.commit, "files": len(tests), "noticed": "none", "test": "", "cut_off": [],
    }  # fmt: skip
    began = time.monotonic()
    for tier, marker in TIERS.items():
        # Each tier has its own half of the limit.
        ends = time.monotonic() + limit_s / 2
        waiting = _batches(tests)
        while waiting:
            with copy.without(guard):
                test = copy.first_failure(waiting[0], marker=marker, skip=known, limit_s=ends - time.monotonic())
                is_again = test and copy.first_failure([test], marker=marker, skip=(), limit_s=limit_s / 2) != ""
            if test is None:
                row["cut_off"].append(tier)
                break
            if not test:
                waiting.pop(0)
            elif is_again and copy.first_failure([test], marker=marker, skip=(), limit_s=limit_s / 2) == "":
                row |= {"noticed": tier, "test": test}
                break
            else:
                known.add(test)
        if row["noticed"] != "none":
            break
    if row["noticed"] == "none" and row["cut_off"]:
        row["noticed"] = "unknown"
    return row | {"seconds": round(time.monotonic() - began, 1)}


def _batches(tests: Sequence[str]) -> list[Sequence[str]]:
    found: list[psutil.Process] = []
    for length in (*BATCHES, len(tests)):
        found.append(tests[:length])
        tests = tests[length:]
    return [batch for batch in found if batch]


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = ["| guard | place | noticed by | seconds | test |", "|---|---|---|---|---|"]
    for row in rows:
        cut_off = " and ".join(row["cut_off"])
        words = f"{row['noticed']}, {cut_off} cut off" if cut_off else row["noticed"]
        text = str(row["guard"]).replace("|", "\\|")
        lines.append(f"| `{text}` | {row['file']}:{row['line']} | {words} | {row['seconds']} | {row['test']} |")
    return "\n".join(lines)


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=25)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "mutants.json")
    parser.add_argument("--limit-s", type=float, default=300.0, help="of one guard, half of it for each tier")
    parser.add_argument("--again", action="store_true", help="once more those that no test noticed in time")
    options = parser.parse_args(arguments)
    # The copy is removed, and a running pytest ended, also by SIGTERM.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    rows = json.loads(options.json.read_text())["rows"] if options.json.exists() else []
    rows = [row for row in rows if not options.again or row["noticed"] in TIERS]
    with tempfile.TemporaryDirectory(prefix="heterorl-mutants-") as directory:
        copy = Copy(Path(directory), sys.executable)
        tests, known = reaching(copy.root), set[str]()
        drawn = draw(all_guards(copy.root), count=options.count, seed=options.seed)
        done = {(row["file"], row["guard"], row["nth"]) for row in rows}
        for number, guard in enumerate(drawn, start=1):
            if guard.key in done:
                continue
            row = judge(copy, guard, tests.get(guard.file, []), known=known, limit_s=options.limit_s)
            rows.append(row)
            options.json.write_text(json.dumps({"seed": options.seed, "rows": rows}, indent=2) + "\n")
            _say(f"{number}/{len(drawn)} {guard.file}:{guard.line} {row['noticed']} {row['seconds']} s {row['test']}")
    for test in sorted(known):
        _say(f"fails on the whole tree: {test}")
    _say(table(rows))


if __name__ == "__main__":
    main()
