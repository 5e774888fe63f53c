"""A whole run on one card: coordinator, learner and two samplers 64 versions behind, as `heterorl demo` starts them."""

from __future__ import annotations

import json
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.gpu.rows import Place, Rows

STOPS_S = 30.0


def run(rows: Rows, place: Place) -> None:
    """Run it to its end, or end it in order at the limit."""
    with tempfile.TemporaryDirectory() as name:
        out = Path(name) / "demo"
        command = [sys.executable, "-m", "heterorl", "demo", "--out", str(out), "--device", place.device,
                   "--cache", ".cache/heterorl", *(["--tiny"] if place.is_small else [])]  # fmt: skip
        with subprocess.Popen(command) as child:
            try:
                child.wait(max(1.0, place.limit_s - STOPS_S))
            except subprocess.TimeoutExpired:
                child.send_signal(signal.SIGINT)
        _report(rows, out)


def _report(rows: Rows, out: Path) -> None:
    summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    rows.note("ended", f"{summary['status']}, {summary['steps']} of {summary['max_steps']} steps")
    for problem in [*summary["problems"], *filter(None, [summary["failure"]])]:
        rows.note("problem", problem)
    for what, key in (
        ("held-out accuracy at version 0", "warm_start_accuracy"),
        ("held-out accuracy at the end", "final_accuracy"),
        ("staleness of trained groups, steady mean", "staleness_versions_steady"),
        ("states that differ between learner and sampler", "digest_mismatches"),
        ("wall-clock seconds", "wall_s"),
    ):
        if summary[key] is not None:
            rows.add(what, summary[key], "")
    steps = _lines(out / "learner" / "steps.jsonl")
    if steps:
        rows.add("median step", statistics.median(row["step_s"] for row in steps), "s")
        busy = sum(row["step_s"] for row in steps) / max(summary["wall_s"], 1e-9)
        rows.add("learner busy, of the wall clock", busy, "")
    for row in _lines(out / "learner" / "evaluations.jsonl"):
        if row["accuracy"] is not None and row["version"] % 50 == 0:
            rows.add(f"held-out accuracy at version {row['version']}", row["accuracy"], "")


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
