"""Who imports whom in `services` and `research`, read from the sources: modules, rooms, circles."""

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
SERVICES = ROOT / "services"
RESEARCH = ROOT / "research"
NAME = "heterorl"
ELSEWHERE = {"v1", "benchmarks", "docs", "tests"}
"""Folders of generated modules, and of programs that no module imports."""


def modules(root: Path = SERVICES, name: str = NAME) -> dict[str, Path]:
    """Every module of a package by its name."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if parts[0] not in ELSEWHERE:
            found[".".join((name, *(parts[:-1] if parts[-1] == "__init__" else parts)))] = path
    return found


def imports(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Import statements at any depth; expressions, which have none, are most of a tree and stay unread."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            below = getattr(node, name, ())
            waiting += below if isinstance(below, list) else ()


def edges(found: Mapping[str, Path]) -> set[tuple[str, str]]:
    """Pairs of modules of which the first imports the second, anywhere in its text."""
    pairs = set()
    for name, path in found.items():
        for node in imports(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                named = [f"{node.module}.{alias.name}" for alias in node.names]
                wanted = [module if module in found else node.module or "" for module in named]
            else:
                wanted = [alias.name for alias in node.names]
            pairs |= {(name, module) for module in wanted if module in found}
    return pairs


def between_rooms(pairs: Iterable[tuple[str, str]], package: str) -> dict[str, set[str]]:
    """What a package holds directly, modules and folders alike, and which of it imports which."""
    depth = package.count(".") + 2
    graph = defaultdict(set)
    for first, second in pairs:
        if first.startswith(package + ".") and second.startswith(package + "."):
            one, other = (".".join(module.split(".")[:depth]) for module in (first, second))
            if one != other:
                graph[one].add(other)
    return dict(graph)


def circles(graph: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Sets of nodes that reach each other, each sorted, in order."""
    reach = {node: _reached(graph, node) for node in graph}
    found = {
        tuple(sorted({node} | {other for other in reach[node] if node in reach.get(other, ())}))
        for node in graph
        if node in reach[node]
    }
    return [list(circle) for circle in sorted(found)]


def _reached(graph: Mapping[str, Iterable[str]], start: str) -> set[str]:
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        new = set(graph.get(waiting.pop(), ())) - seen
        seen |= new
        waiting += new
    return seen
