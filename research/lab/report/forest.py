"""A forest: every rule minus one on equal seeds, a row for each setting, so that one look says where it loses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from heterorl_research.lab.report.data import Arm, Run
from heterorl_research.lab.report.drawing.canvas import PAIRED_BAR, Picture
from heterorl_research.lab.report.drawing.palette import looks
from heterorl_research.lab.statistics.intervals import Interval, interval

_SPREAD = 0.5
"""Of the room between two rows, what the rules of one row take one above another."""


def forest(settings: Mapping[str, Sequence[Run]], baseline: str) -> Picture:
    """Last accuracy of every rule minus the baseline's, on equal seeds.

    Args:
        settings: the runs of each row, by what the row says; the first row stands at the top.
        baseline: the algorithm that stands at 0.
    """
    names = dict.fromkeys(run.algorithm for runs in settings.values() for run in runs if run.algorithm != baseline)
    legend = looks([Arm(name) for name in names])
    rows = [{arm: _beside(arm.algorithm, baseline, runs) for arm in legend} for runs in settings.values()]

    def draw(grid: Sequence[Any]) -> None:
        (axes,) = grid
        axes.axvline(0.0, color="#57606a", linewidth=1.0)
        step = _SPREAD / max(1, len(legend) - 1)
        for place, (arm, look) in enumerate(legend.items()):
            found = [(row, difference) for row, by_arm in enumerate(rows) if (difference := by_arm[arm]) is not None]
            axes.errorbar(
                [difference.mean for _, difference in found],
                [row + (place - (len(legend) - 1) / 2) * step for row, _ in found],
                xerr=[difference.half or 0.0 for _, difference in found],
                color=look.color, marker=look.marker, linestyle="", markersize=6, elinewidth=1.2, capsize=2,
            )  # fmt: skip
        axes.set_yticks(range(len(settings)), list(settings))
        axes.set_ylim(len(settings) - 0.5, -0.5)
        axes.set_xlabel(f"last accuracy minus {baseline}'s: left of the line {baseline} is ahead")
        axes.grid(visible=False, axis="y")

    return Picture(
        name="forest",
        title=f"Every rule minus {baseline} on equal seeds",
        caption="Means of the paired differences over seeds, 95 % t-intervals.",
        panels=[""],
        draw=draw,
        panel_height=0.75 * len(settings) + 0.6,
        legend=legend,
        signs=(PAIRED_BAR,),
    )


def _beside(algorithm: str, baseline: str, runs: Sequence[Run]) -> Interval | None:
    last = {(run.algorithm, run.seed): run.last for run in runs if not run.failed and run.last is not None}
    seeds = sorted(seed for name, seed in last if name == algorithm and (baseline, seed) in last)
    return interval([last[algorithm, seed] - last[baseline, seed] for seed in seeds])
