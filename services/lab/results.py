"""Outcome of a run -> the numbers that tables and figures show. Pure; every number is finite or null."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from heterorl.common.wire.common import bytes_digest
from heterorl.lab.cell import Cell
from heterorl.lab.world import Outcome

_MEANS = {
    "kl_mean": "kl",
    "iw_var_mean": "iw_var",
    "ess_mean": "ess",
    "clip_fraction_mean": "clip_fraction",
    "advantage_error_mean": "advantage_error",
    "bias_gepo_mean": "bias_gepo",
    "bias_gspo_mean": "bias_gspo",
    "staleness_mean": "staleness",
}


def cell_digest(cell: Cell) -> str:
    """Digest of everything that a run depends on."""
    parts = (cell.algorithm, cell.delay, cell.task, cell.regime)
    return bytes_digest("\n".join([cell.run_id, *(part.model_dump_json() for part in parts)]).encode())


def identity(cell: Cell) -> dict[str, Any]:
    """Which run it is."""
    kind: str = cell.delay.kind
    if cell.is_refreshed:
        kind = f"{kind} refresh"
    return {
        "run_id": cell.run_id,
        "algorithm": cell.algorithm.name,
        "delay": cell.delay_value,
        "delay_kind": kind,
        "delay_unit": cell.delay_unit,
        "seed": cell.seed,
        "task": cell.task.name,
        "variant": cell.variant,
        "cell_digest": cell_digest(cell),
    }


def summarise(cell: Cell, outcome: Outcome, *, wall_s: float) -> dict[str, Any]:
    """The row of a finished run, with its series and evaluations.

    `best` is that of a single checkpoint; `best_per_benchmark` is the mean over benchmarks of each one's own best
    checkpoint, which is never smaller. `warm_start_accuracy` is the evaluation of version 0.
    """
    columns = {name: [_finite(row[name]) for row in outcome.steps] for name in (outcome.steps or [{}])[0]}
    accuracies = [row["accuracy"] for row in outcome.evaluations if row["accuracy"] is not None]
    best, last = (max(accuracies), accuracies[-1]) if accuracies else (None, None)
    norms = [value for value in columns.get("grad_norm", []) if value is not None]
    staleness = [value for value in columns.get("staleness", []) if value is not None]
    return {
        **identity(cell),
        "warm_start_accuracy": accuracies[0] if accuracies else None,
        "best": best,
        "last": last,
        "gap": None if best is None or last is None else best - last,
        "best_per_benchmark": _best_per_benchmark(outcome.evaluations),
        **{name: _mean(columns.get(source, [])) for name, source in _MEANS.items()},
        "grad_norm_p95": float(np.percentile(norms, 95)) if norms else None,
        "staleness_max": max(staleness, default=None),
        "steps": len(outcome.steps),
        "groups": None if outcome.status is None else outcome.status.ledger.acked,
        "ledger_balanced": outcome.ledger_balanced,
        "wall_s": round(wall_s, 2),
        "failed": None,
        "series": columns,
        "evaluations": outcome.evaluations,
    }


def failure(cell: Cell, *, problem: str, wall_s: float) -> dict[str, Any]:
    """The row of a run that did not end."""
    return {**identity(cell), "failed": problem, "wall_s": round(wall_s, 2), "series": {}, "evaluations": []}


def _best_per_benchmark(evaluations: list[dict[str, Any]]) -> float | None:
    names = {name for row in evaluations for name in row["benchmarks"]}
    bests = [
        max((row["benchmarks"][name] for row in evaluations if row["benchmarks"].get(name) is not None), default=None)
        for name in sorted(names)
    ]
    return _mean(bests)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _mean(values: Iterable[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return float(np.mean(present)) if present else None
