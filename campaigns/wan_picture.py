"""Picture of an outage: groups of each site, its silence, and its lag in versions.

`python -m campaigns.wan_picture runs/wan/images/outage.json docs/wan.png` draws it from the numbers of a run.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

PANELS = {
    "groups": "groups accepted\na minute",
    "silence": "seconds since the last\nsign of life",
    "behind": "versions behind\nthe learner",
}
"""Panels and their labels."""
WITNESS = "witness"
"""The site next to the learner, whose link is never cut."""
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
_DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1)), (0, (6, 1.5, 1, 1.5)))
_SHADE = "#57606a"
Series = Mapping[str, Mapping[str, Sequence[tuple[float, float]]]]
"""Panel to site to (seconds since the begin, value)."""


def since(times: Mapping[str, float], rows: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """Prometheus rows of each panel in seconds since the begin, with the span of the outage."""
    begin = times["begin"]
    series: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for panel, found in rows.items():
        series[panel] = {
            row["metric"]["site"]: [
                (round(float(at) - begin, 1), float(value))
                for at, value in row["values"]
                if math.isfinite(float(value))
            ]
            for row in sorted(found, key=lambda row: (row["metric"]["site"] == WITNESS, row["metric"]["site"]))
        }
    return {"cut_s": round(times["cut"] - begin, 1), "heal_s": round(times["heal"] - begin, 1), "series": series}


def draw(found: Mapping[str, Any], path: Path) -> None:
    """Write the picture: three panels over one time axis."""
    series: Series = found["series"]
    sites = list(dict.fromkeys(site for panel in PANELS for site in series[panel]))
    figure = Figure(figsize=(10.0, 7.5), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(PANELS), 1, sharex=True)
    for axes, (panel, label) in zip(grid, PANELS.items(), strict=True):
        axes.axvspan(found["cut_s"], found["heal_s"], color=_SHADE, alpha=0.15, linewidth=0)
        for place, site in enumerate(sites):
            points = series[panel].get(site, [])
            axes.plot(
                [at for at, _ in points], [value for _, value in points], linewidth=1.6,
                color=_COLOURS[place % len(_COLOURS)], linestyle=_DASHES[place % len(_DASHES)],
                label="a test site next to the learner" if site == WITNESS else site,
            )  # fmt: skip
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    last = max((at for lines in series.values() for points in lines.values() for at, _ in points), default=1.0)
    grid[-1].set_xlim(0, last)
    grid[-1].set_xlabel("seconds since the begin")
    handles, labels = grid[0].get_legend_handles_labels()
    figure.legend(
        [*handles, Patch(color=_SHADE, alpha=0.15, linewidth=0)], [*labels, "nothing gets through"],
        loc="outside upper center", ncols=len(handles) + 1, frameon=False,
    )  # fmt: skip
    figure.savefig(path, metadata={"Software": None})


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_bytes()), Path(sys.argv[2]))
