"""Results of evaluations as tables for people and JSON values for programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from heterorl.common.evaluation.summary import Standing, standing
from heterorl.common.types.evaluation import Estimate
from heterorl.evaluation.evaluate_sets import Row


def tables(rows: Sequence[Row]) -> list[Table]:
    """A table of all rows; also one of best and last if a set was evaluated on several versions."""
    shown = Table(title="evaluation, 95 % intervals over prompts")
    for name in ("of", "set", "prompts", "n", "avg@n"):
        shown.add_column(name)
    ks = sorted({entry.k for row in rows for entry in row.summary.passes if entry.k > 1})
    for k in ks:
        shown.add_column(f"pass@{k}")
    for name in ("tokens", "cut", "unscored", "s"):
        shown.add_column(name, justify="right")
    for row in rows:
        passes = {entry.k: entry.estimate for entry in row.summary.passes}
        cells = [
            row.subject, row.set.name, str(row.summary.num_prompts), str(row.set.draws.num_samples),
            estimate_text(row.summary.average), *(estimate_text(passes.get(k)) for k in ks),
            f"{row.summary.mean_tokens:.0f}", str(row.summary.num_truncated), str(row.summary.num_errors),
            f"{row.seconds:.1f}",
        ]  # fmt: skip
        shown.add_row(*map(Text, cells))
    standings = _standings(rows)
    if not standings:
        return [shown]
    best = Table("set", "best", "of version", "last", "of version", "gap", title="best and last")
    for name, found in standings.items():
        best.add_row(Text(name), *standing_cells(found))
    return [shown, best]


def estimate_text(found: Estimate | None) -> str:
    """`0.420 [0.380, 0.460]`; a dash for None."""
    return "-" if found is None else f"{found.mean:.3f} [{found.low:.3f}, {found.high:.3f}]"


def standing_cells(found: Standing) -> list[str]:
    """Best, its version, last, its version, gap."""
    return [
        f"{found.best:.3f}", str(found.best_version), f"{found.last:.3f}", str(found.last_version), f"{found.gap:.3f}"
    ]  # fmt: skip


def as_json(rows: Sequence[Row], *, with_texts: bool) -> dict[str, Any]:
    """All results as plain JSON values; `with_texts` adds every completion."""
    return {
        "evaluations": [_row_json(row, with_texts=with_texts) for row in rows],
        "standings": {
            name: {**dataclasses.asdict(found), "gap": found.gap} for name, found in _standings(rows).items()
        },
    }


def _row_json(row: Row, *, with_texts: bool) -> dict[str, Any]:
    found: dict[str, Any] = {
        "of": row.subject,
        "version": row.version if row.version >= 0 else None,
        "set": row.set.name,
        "task_digest": row.set.task.digest,
        "draws": dataclasses.asdict(row.set.draws),
        "seconds": row.seconds,
        **dataclasses.asdict(row.summary),
    }
    if with_texts:
        found["prompts"] = [dataclasses.asdict(result) for result in row.results]
    return found


def _standings(rows: Sequence[Row]) -> dict[str, Standing]:
    found = {}
    for name in dict.fromkeys(row.set.name for row in rows):
        of_set = [(row.version, row.summary.average) for row in rows if row.set.name == name and row.version >= 0]
        both = standing(of_set) if len({version for version, _ in of_set}) > 1 else None
        if both is not None:
            found[name] = both
    return found
