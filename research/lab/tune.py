"""Chooses the learning rate of every arm on the tuning seeds and writes the table that `heterorl lab run` reads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from heterorl.common.process.config_file import load
from heterorl_research.lab.cell import list_cells
from heterorl_research.lab.config import ExperimentConfig
from heterorl_research.lab.fast.orders import Means
from heterorl_research.lab.protocol.rates import choose, standings, trials, write
from heterorl_research.lab.run import INTERRUPTED, carry_out, find_experiment


def tune_experiment(name: str, *, out: Path | None = None, overrides: Sequence[str] = (), means: Means) -> int:
    """Run what is missing of the trials, round by round, write the chosen rates and print them; returns the exit code.

    An arm with a trial that failed, on a second attempt too, gets no rate: the same command tries it again.

    Raises:
        ConfigError: the experiment is unknown or wrong, or nothing of it is tuned.
    """
    console = Console(stderr=True, markup=False, emoji=False, highlight=False)
    experiment = load(ExperimentConfig, find_experiment(name), overrides)
    directory = out or Path("runs/lab") / experiment.name
    tried = trials(experiment)
    cells, where = list_cells(tried), directory / "tuning"
    rows: list[dict[str, Any]] = []
    attempted: set[str] = set()
    found = standings(cells, rows, tried=attempted)
    while wanted := {cell.run_id for one in found.values() for cell in one.missing}:
        attempted |= wanted
        code = carry_out(tried, directory=where, means=means, only=wanted, is_reported=False)
        if code == INTERRUPTED:
            return INTERRUPTED
        rows = json.loads((where / "results.json").read_bytes())["runs"]
        found = standings(cells, rows, tried=attempted)
    chosen = choose(cells, rows)
    for rate in chosen:
        edge = "; the grid ends here" if rate.is_at_edge else ""
        console.print(f"{rate.arm}: lr {rate.lr:g}, last {rate.scores[rate.lr].last:.3f}{edge}")
    console.print(f"learning rates: {write(chosen, directory, engine=means.engine, device=means.device)}")
    without = [arm for arm, one in found.items() if one.lr is None]
    for arm in without:
        failed = ", ".join(cell.run_id for cell in found[arm].failed)
        console.print(f"no learning rate for {arm}: failed {failed}", style="red", soft_wrap=True)
    return 1 if without else 0
