"""How a table is written, where in a page it stands, and where the committed results lie."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "benchmarks" / "results"
_BLOCK = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown; every column but the first is of numbers."""
    lines = [f"| {' | '.join(header)} |", f"|---|{'---:|' * (len(header) - 1)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def filled(text: str, tables: Mapping[str, Callable[[], str]]) -> str:
    """A document with each of its tables made anew.

    Raises:
        KeyError: a marker names no table.
        ValueError: a marker has no end, or an end no marker.
    """
    blocks = _BLOCK.findall(text)
    if not len(blocks) == text.count("<!-- table:") == text.count("<!-- end of table -->"):
        raise ValueError("a table of the document has no end, or an end has no table")
    return _BLOCK.sub(lambda match: f"{match[1]}\n{tables[match[2]]()}\n\n{match[3]}", text)


def fill(documents: Iterable[str], tables: Mapping[str, Callable[[], str]]) -> None:
    """Write the tables of documents, each named by its path in the repository."""
    for name in documents:
        path = ROOT / name
        path.write_text(filled(path.read_text(encoding="utf-8"), tables), encoding="utf-8")
