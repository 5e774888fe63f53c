"""Picture and table of the curves: `python -m benchmarks.curves.picture RESULTS.json PICTURE.png`.

The table of Markdown goes to standard output.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from docs.markdown import table

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9")
_TRL = "#999999"
_COLUMNS = 3
_SMOOTH = 8
"""Steps of a mean on the training curve."""


def draw(found: Mapping[str, Any], path: Path) -> None:
    """One panel for each environment and lag, one colour for each seed, TRL in grey; dots are held-out episodes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    cells = [(one["environment"], one["lag"]) for one in found["environments"] if one["trainer"] == "heterorl"]
    columns, rows = max(1, min(_COLUMNS, len(cells))), max(1, math.ceil(len(cells) / _COLUMNS))
    figure = Figure(figsize=(3.6 * columns, 3.2 * rows), dpi=200, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(rows, columns, sharey=True, squeeze=False).flatten()
    for axes, (environment, lag) in zip(panels, cells, strict=False):
        here = [run for run in found["runs"] if run["environment"] == environment]
        peers = [run for run in here if run["trainer"] == "trl"]
        own = [run for run in here if run["trainer"] == "heterorl" and run["lag"] == lag]
        colours = [(run, _TRL) for run in peers] + list(zip(own, _COLOURS, strict=False))
        for run, colour in colours:
            steps, rewards = smooth(run["curve"])
            label = f"seed {run['seed']}" if run in own else "TRL, online" if run is peers[0] else None
            axes.plot(steps, rewards, color=colour, alpha=0.5, linewidth=1, label=label)
            dots = [(row["version"], row["mean"]) for row in run["held_out"]]
            if dots:
                line = {"marker": "o", "markersize": 3.5, "linewidth": 0 if colour == _TRL else 1.4}
                axes.plot(*zip(*dots, strict=True), color=colour, **line)
        axes.set_title(f"{environment}, {lag} versions behind", fontsize=10)
        axes.set_xlabel("step")
        axes.set_ylim(0, 1)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if peers or axes is panels[0]:
            axes.legend(frameon=False, fontsize=8)
    for axes in panels[len(cells) :]:
        axes.set_axis_off()
    for axes in panels[::columns]:
        axes.set_ylabel("mean reward")
    figure.savefig(path, metadata={"Software": None})


def smooth(curve: list[dict[str, Any]]) -> tuple[list[int], list[float]]:
    """Last step and mean reward of each full window of steps."""
    windows = [curve[end - _SMOOTH : end] for end in range(_SMOOTH, len(curve) + 1, _SMOOTH)]
    return [rows[-1]["step"] for rows in windows], [sum(row["reward"] for row in rows) / _SMOOTH for rows in windows]


def rows_of(found: Mapping[str, Any]) -> str:
    """Table of Markdown with one row for each run."""
    head = ["trainer", "environment", "lag", "seed", "steps", "turns", "held out, version 0", "held out, last", "gain"]
    body = [
        [
            one["trainer"], one["environment"], str(one["lag"]), str(one["seed"]), str(one["steps"]),
            f"{_number(one['turns_first'])} to {_number(one['turns_last'])}", _number(one["held_out_first"]),
            _number(one["held_out_last"]), _number(one["gain"]),
        ]
        for one in found["summaries"]
    ]  # fmt: skip
    return table(head, body)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def main() -> None:
    """Draw the picture and print the table."""
    found = json.loads(Path(sys.argv[1]).read_bytes())
    draw(found, Path(sys.argv[2]))
    print(rows_of(found))


if __name__ == "__main__":
    main()
