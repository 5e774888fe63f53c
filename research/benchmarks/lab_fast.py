"""The vectorised lab beside the services' lab: the same cells, their last accuracies and what each costs.

Both engines run the same experiment as `heterorl lab run` does, one after the other on the same cores; warm starts are
made before. A cell's seconds are its share of the machine's time with all processes at work: its process's seconds
divided by the number of processes. Equal streams of tokens do not stay equal for hundreds of steps, because products
are summed in another order; so the two engines are compared by the paired differences of `last` over the seeds.

    python -m research.benchmarks.lab_fast --out research/results/fast.json
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

EXPERIMENT = """
name = "bench-{engine}"
seeds = [{seeds}]

[[algorithms]]
name = "gepo"
loss = {{ kind = "gepo" }}

[[algorithms]]
name = "grpo"
loss = {{ kind = "grpo" }}

[[delays]]
kind = "fixed"
unit = "versions"
value = 64

[[tasks]]
name = "add3"
task = {{ name = "arithmetic", digits = 3 }}
max_new_tokens = 5

[regime]
max_steps = {steps}
groups_per_step = 24
group_size = 8
lr = 7e-4
warmup_steps = 20
num_samplers = 1
evaluate_every = 20
num_evaluation = 256
probe_every = 20
"""
"""Two cells of `stale64` under a name of its own."""
GOAL = 20.0


def run(engine: str, directory: Path, *, seeds: int, steps: int, jobs: int) -> list[dict[str, Any]]:
    """Rows of the experiment, run where they are not there yet."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{engine}.toml"
    path.write_text(EXPERIMENT.format(engine=engine, seeds=", ".join(map(str, range(seeds))), steps=steps))
    command = [sys.executable, "-m", "heterorl", "lab", "run", str(path), "--engine", engine, "--jobs", str(jobs)]
    subprocess.run([*command, "--out", str(directory / engine)], check=True)
    return [json.loads(found.read_text()) for found in sorted((directory / engine / "runs").glob("*.json"))]


def compare(services: list[dict[str, Any]], fast: list[dict[str, Any]], *, jobs: int) -> list[dict[str, Any]]:
    """A row a cell, in the order of the names."""
    theirs = {row["run_id"]: row for row in services}
    return [
        {
            "cell": row["run_id"],
            "seconds_services": round(theirs[row["run_id"]]["wall_s"] / jobs, 3),
            "seconds_fast": round(row["wall_s"] / jobs, 3),
            "last_services": theirs[row["run_id"]]["last"],
            "last_fast": row["last"],
        }
        for row in fast
    ]


def differences(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each algorithm the mean of last_fast - last_services over the seeds and its standard error."""
    found: dict[str, list[float]] = {}
    for row in rows:
        found.setdefault(row["cell"].rpartition("-s")[0], []).append(row["last_fast"] - row["last_services"])
    return [
        {
            "arm": arm,
            "seeds": len(values),
            "difference": statistics.mean(values),
            "standard_error": statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None,
        }
        for arm, values in found.items()
    ]


def main() -> None:
    """Run both, compare, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--directory", type=Path, default=Path("runs/bench-lab"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=220)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    found = {
        engine: run(engine, options.directory, seeds=options.seeds, steps=options.steps, jobs=options.jobs)
        for engine in ("services", "fast")
    }
    rows = compare(found["services"], found["fast"], jobs=options.jobs)
    faster = sum(row["seconds_services"] for row in rows) / sum(row["seconds_fast"] for row in rows)
    arms = differences(rows)
    content = {
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "jobs": options.jobs,
        "steps": options.steps,
        "times_faster": round(faster, 1),
        "arms": arms,
        "rows": rows,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(content, indent=1) + "\n", encoding="ascii")
    print(f"{faster:.1f} times faster; goal {GOAL:g}")
    for arm in arms:
        print(f"{arm['arm']}: fast - services {arm['difference']:+.3f} +- {arm['standard_error'] or 0.0:.3f} (s.e.)")


if __name__ == "__main__":
    main()
