"""Chooses the learning rate of every arm on the tuning seeds and writes the table that `heterorl lab run` reads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from heterorl.common.process.config import load
from heterorl.lab.cell import list_cells
from heterorl.lab.config import ExperimentConfig
from heterorl.lab.fast.orders import SERVICES
from heterorl.lab.protocol.rates import choose, trials, write
from heterorl.lab.run import INTERRUPTED, carry_out, find_experiment


def tune_experiment(
    name: str,
    *,
    out: Path | None,
    overrides: Sequence[str],
    jobs: int,
    reuse: Sequence[Path] = (),
    engine: str = SERVICES,
    device: str = "cpu",
) -> int:
    """Run what is missing of the trials, write the chosen rates and print them; returns the exit code.

    Raises:
        ConfigError: the experiment is unknown or wrong, or nothing of it is tuned.
    """
    console = Console(stderr=True, markup=False, emoji=False, highlight=False)
    experiment = load(ExperimentConfig, find_experiment(name), overrides)
    directory = out or Path("runs/lab") / experiment.name
    tried = trials(experiment)
    # A run that fails is a rate that is too large: it counts against the rate, not against the command.
    where = directory / "tuning"
    if carry_out(tried, directory=where, jobs=jobs, reuse=reuse, engine=engine, device=device) == INTERRUPTED:
        return INTERRUPTED
    rows = json.loads((where / "results.json").read_bytes())["runs"]
    found = choose(list_cells(tried), rows)
    for rate in found:
        edge = "; the grid ends here" if rate.is_at_edge else ""
        console.print(f"{rate.arm}: lr {rate.lr:g}, last {rate.scores[rate.lr]:.3f}{edge}")
    console.print(f"learning rates: {write(found, directory)}")
    return 0
