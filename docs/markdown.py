"""How a table is written, and where the committed results lie."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

SOURCES = Path(__file__).parents[1] / "benchmarks" / "results"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown; every column but the first is of numbers."""
    lines = [f"| {' | '.join(header)} |", f"|---|{'---:|' * (len(header) - 1)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])
