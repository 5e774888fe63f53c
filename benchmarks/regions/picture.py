"""Picture of the arms: `python -m benchmarks.regions.picture RESULTS.json PICTURE.png`.

Three panels with one row for each arm: share of one site's throughput, bytes of a version, staleness. A thin line spans
the repeats.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.regions.arms import ARMS, ONE
from benchmarks.regions.summary import GOAL_OUTAGE, GOAL_SHARE

_MADE, _TRAINED, _OURS, _OTHERS = "#56B4E9", "#0072B2", "#009E73", "#D55E00"
_GOALS = {"heterorl": GOAL_SHARE, "outage": GOAL_OUTAGE}
CAPACITIES = {arm.name: arm.capacity for arm in ARMS}
_OTHER_SCHEMES = ("full", "sparse")
"""Arms with another scheme than heterorl's."""


def megabytes(num_bytes: float) -> str:
    """A short number of MB."""
    value = num_bytes / 1e6
    return f"{value:.0f} MB" if value >= 10 else f"{value:.2f} MB"


def draw(found: Mapping[str, Any], path: Path) -> None:
    """Write the picture of a results file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    rows = [one for one in found["summaries"] if one["share"] is not None]
    places = range(len(rows))
    figure = Figure(figsize=(11.0, 0.62 * len(rows) + 1.7), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    shares, sizes, ages = figure.subplots(1, 3, sharey=True, width_ratios=(1.7, 1, 1))
    for place, one in zip(places, rows, strict=True):
        for name, colour, shift in (("share", _MADE, -0.19), ("trained_share", _TRAINED, 0.19)):
            value = one[name]
            shares.barh(place + shift, value["mean"], height=0.36, color=colour)
            shares.hlines(place + shift, value["min"], value["max"], color="black", linewidth=1.2)
            shares.text(
                max(value["mean"], value["max"]) + 0.015, place + shift, f"{value['mean']:.2f}", va="center", fontsize=9
            )
        if (goal := _GOALS.get(one["arm"])) is not None:
            shares.vlines(goal, place - 0.42, place + 0.42, color="black", linestyle=":", linewidth=1.6)
        if (capacity := CAPACITIES[one["arm"]]) < 1:
            shares.vlines(capacity, place - 0.42, place + 0.42, color=_OTHERS, linestyle="--", linewidth=1.6)
        colour = _OTHERS if one["arm"] in _OTHER_SCHEMES else _OURS
        size = one["bytes_per_version_and_site"]
        sizes.plot(max(size, 1.0) / 1e6, place, "o", color=colour, markersize=8)
        sizes.text(max(size, 1.0) / 1e6 * 1.7, place, megabytes(size), va="center", fontsize=9)
        ages.hlines(place, one["staleness_p50"], one["staleness_p95"], color=colour, linewidth=3)
        ages.plot(one["staleness_p50"], place, "o", color=colour)
        ages.plot(one["staleness_p95"], place, "|", color=colour, markersize=14, markeredgewidth=3)
        ages.text(one["staleness_p95"] + 0.6, place, f"{round(one['staleness_p95'], 1):g}", va="center", fontsize=9)
    shares.set_yticks(list(places), [one["title"] for one in rows])
    shares.invert_yaxis()
    shares.set_xlim(0, 1.18)
    shares.set_xlabel(f"tokens a second / {next(one['title'] for one in rows if one['arm'] == ONE)}")
    figure.legend(
        handles=[
            Patch(color=_MADE, label="generated"), Patch(color=_TRAINED, label="trained on"),
            Line2D([], [], color="black", linestyle=":", label="goal"),
            Line2D([], [], color=_OTHERS, linestyle="--", label="speed of its engines"),
            Line2D([], [], color="black", linewidth=1.2, label="least to most of the repeats"),
        ],
        loc="outside upper center", ncols=5, frameon=False, fontsize=9,
    )  # fmt: skip
    sizes.set_xscale("log")
    sizes.xaxis.set_major_formatter("{x:g}")
    megabytes_of = [max(one["bytes_per_version_and_site"], 1.0) / 1e6 for one in rows]
    sizes.set_xlim(min(megabytes_of) / 3, max(megabytes_of) * 30)
    sizes.set_xlabel("MB for a version and site")
    ages.set_xlim(0, max(one["staleness_p95"] for one in rows) * 1.2 + 1)
    ages.set_xlabel("versions behind, p50 and p95")
    for axes in (shares, sizes, ages):
        axes.grid(alpha=0.25, axis="x")
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Software": None})


def main() -> None:
    """Draw the picture of a file."""
    draw(json.loads(Path(sys.argv[1]).read_bytes()), Path(sys.argv[2]))


if __name__ == "__main__":
    main()
