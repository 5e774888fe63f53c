"""Synthetic results of an experiment, written as the report reads them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

SERIES = (
    "reward", "kl", "iw_var", "iw_var_gepo", "iw_var_gspo", "ess", "clip_fraction", "grad_norm", "staleness",
    "advantage_error", "bias_gepo", "bias_gspo", "entropy",
)  # fmt: skip


def make_run(algorithm: str, delay: float, seed: int, *, last: float = 0.5, **changes: Any) -> dict[str, Any]:
    """One run with plausible numbers; `changes` replace any of them."""
    variant = changes.get("variant", "")
    run = {
        "run_id": f"{algorithm}{'-' if variant else ''}{variant}-d{delay:g}-s{seed}",
        "algorithm": algorithm,
        "delay": delay,
        "delay_kind": "fixed" if delay else "none",
        "delay_unit": "versions",
        "seed": seed,
        "task": "addition",
        "variant": variant,
        "warm_start_accuracy": 0.3,
        "best": max(last, 0.6),
        "last": last,
        "gap": max(last, 0.6) - last,
        "best_per_benchmark": max(last, 0.6) + 0.01,
        "kl_mean": 0.01 * (1 + delay) + 0.001 * seed,
        "iw_var_mean": 0.02 * (1 + delay) ** 2 + 0.001 * seed,
        "ess_mean": 0.9,
        "clip_fraction_mean": 0.1,
        "grad_norm_p95": 1.5 + 0.1 * seed,
        "advantage_error_mean": 0.02 + 0.001 * delay,
        "bias_gepo_mean": 0.07,
        "bias_gspo_mean": -0.07,
        "staleness_mean": float(delay),
        "staleness_max": float(delay),
        "steps": 3,
        "groups": 24,
        "ledger_balanced": True,
        "wall_s": 1.0,
        "failed": None,
        "series": {"step": [1, 2, 3], **{name: [0.1, None, 0.3] for name in SERIES}},
        "evaluations": [
            {"step": step, "accuracy": accuracy, "benchmarks": {"b": accuracy}}
            for step, accuracy in ((1, 0.35), (2, 0.6), (3, last))
        ],
    }
    return {**run, **changes}


def write_results(directory: Path, runs: Iterable[dict[str, Any]], *, title: str = "Synthetic") -> Path:
    """Write results.json and runs/*.json; returns `directory`."""
    (directory / "runs").mkdir(parents=True, exist_ok=True)
    rows = []
    for run in runs:
        (directory / "runs" / f"{run['run_id']}.json").write_text(json.dumps(run))
        rows.append({key: value for key, value in run.items() if key not in {"series", "evaluations"}})
    results = {"experiment": "synthetic", "title": title, "heterorl_version": "0", "config_digest": "d", "runs": rows}
    (directory / "results.json").write_text(json.dumps(results))
    return directory
