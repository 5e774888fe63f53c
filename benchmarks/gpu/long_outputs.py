"""The laboratory's experiment with completions of 301 tokens, as many runs as the time allows.

Runs go seed by seed and setting by setting. Finished ones stay in `.cache/heterorl/gpu-trial`, so that a call with
`--again` continues with the others.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.rows import Place, Rows

if TYPE_CHECKING:
    from heterorl_research.lab.config import ExperimentConfig

EXPERIMENT = "cliff301"
SMALL = (
    "seeds=[400, 401]",
    "protocol.least_seeds=2",
    "regime.max_steps=4",
    "regime.evaluate_every=4",
    'tasks=[{name="t31", task={name="progression", digits=2, terms=15}, max_new_tokens=31, warm_start_target=0.02}]',
)
DIRECTORY = Path(".cache/heterorl/gpu-trial")
STOPS_S = 30.0


def run(rows: Rows, place: Place) -> None:
    """Run pieces of the experiment until all are done or the limit is near."""
    try:
        from heterorl.common.process.config_file import load
        from heterorl_research.lab.config import ExperimentConfig
        from heterorl_research.lab.fast.orders import FAST, Means
        from heterorl_research.lab.run import INTERRUPTED, carry_out, find_experiment
    except ImportError as error:
        rows.note("not run", f"{error.name} is not installed")
        return
    experiment = load(ExperimentConfig, find_experiment(EXPERIMENT), SMALL if place.is_small else ())
    directory = DIRECTORY / f"{EXPERIMENT}-{place.device}{'-small' if place.is_small else ''}"
    means = Means(jobs=1, engine=FAST, device=place.device)
    with _interrupted_after(place.limit_s - STOPS_S), contextlib.suppress(KeyboardInterrupt):
        for piece in pieces(experiment):
            if carry_out(experiment, directory=directory, means=means, only=piece, is_reported=False) == INTERRUPTED:
                break
    path = directory / "results.json"
    _report(rows, json.loads(path.read_text(encoding="ascii"))["runs"] if path.exists() else [])


def pieces(experiment: ExperimentConfig) -> list[set[str]]:
    """Names of the runs of each seed under each variant; within one, all algorithms can be compared."""
    from heterorl_research.lab.cell import list_cells

    found: dict[tuple[int, str], set[str]] = defaultdict(set)
    for cell in list_cells(experiment):
        found[cell.seed, cell.variant].add(cell.run_id)
    return list(found.values())


@contextlib.contextmanager
def _interrupted_after(seconds: float) -> Iterator[None]:
    """SIGINT to this process at the limit: the laboratory ends its worker, which has a session of its own."""
    timer = threading.Timer(max(0.0, seconds), os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _report(rows: Rows, runs: list[dict[str, Any]]) -> None:
    rows.add("runs done", sum(not run["failed"] for run in runs), "")
    arms: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for run in runs:
        if run["failed"]:
            rows.note("failed", f"{run['run_id']}: {run['failed']}")
        else:
            arms[run["variant"], run["algorithm"]].append(run)
    for (variant, algorithm), found in arms.items():
        trained = [share for run in found for share in run["series"]["bad_trained"] if share is not None]
        rows.add(f"{variant}, {algorithm}: held-out accuracy", statistics.mean(run["last"] for run in found), "")
        if trained:
            rows.add(f"{variant}, {algorithm}: bad rollouts that train", statistics.mean(trained), "")
