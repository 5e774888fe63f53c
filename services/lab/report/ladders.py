"""Ladders: last accuracy minus GEPO's on equal seeds, rung by rung, over delays or over tasks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from heterorl.lab.report.data import Arm, Results
from heterorl.lab.report.drawing.canvas import Picture
from heterorl.lab.report.drawing.palette import Look
from heterorl.lab.report.paired import BASELINE, Comparison, comparisons

_BARS = "Dots are means over seeds, bars 95 % t-intervals; a dot without bar is one seed."


def ladders(results: Results, looks: dict[Arm, Look]) -> list[Picture]:
    """Last accuracy minus GEPO's on equal seeds, rung by rung: over three delays or more, and over several tasks."""
    found: dict[tuple[str, str], list[Comparison]] = defaultdict(list)
    for one in comparisons(results):
        if one.measure == "last":
            found[one.task, one.delay.label].append(one)
    others = {arm: look for arm, look in looks.items() if arm.algorithm != BASELINE}
    tasks, delays = results.tasks, [delay.label for delay in results.delays]
    pictures = []
    if found and len(delays) > 2:
        pictures.append(_ladder("delay", tasks, delays, lambda task, delay: found[task, delay], others))
    if found and len(tasks) > 1:
        pictures.append(_ladder("task", delays, tasks, lambda delay, task: found[task, delay], others))
    return pictures


def _ladder(
    axis: str,
    panels: Sequence[str],
    rungs: Sequence[str],
    at: Callable[[str, str], Sequence[Comparison]],
    looks: dict[Arm, Look],
) -> Picture:
    def draw(grid: Sequence[Any]) -> None:
        for axes, panel in zip(grid, panels, strict=True):
            axes.set_ylabel("last accuracy minus GEPO's")
            axes.axhline(0.0, color="#57606a", linewidth=1.0)
            step = 0.6 / max(1, len(looks) - 1)
            for place, (arm, look) in enumerate(looks.items()):
                shift = (place - (len(looks) - 1) / 2) * step
                points = [
                    (column + shift, one.difference)
                    for column, rung in enumerate(rungs)
                    for one in at(panel, rung)
                    if one.arm == arm
                ]
                axes.errorbar(
                    [x for x, _ in points], [found.mean for _, found in points],
                    yerr=[found.half or 0.0 for _, found in points], color=look.color, marker=look.marker,
                    linestyle=look.dash, linewidth=look.width * 0.6, markersize=4.5, elinewidth=1.0, capsize=1.5,
                )  # fmt: skip
            axes.set_xticks(range(len(rungs)), rungs)
            axes.set_xlim(-0.5, len(rungs) - 0.5)
            for border in range(len(rungs) - 1):
                axes.axvline(border + 0.5, color="#d8dee4", linewidth=0.8)
            axes.grid(visible=False, axis="x")

    return Picture(
        name=f"ladder_{axis}", title=f"Difference to GEPO by {axis}", caption=f"Paired by seed. {_BARS}",
        panels=panels if len(panels) > 1 else [""], draw=draw, legend=looks,
    )  # fmt: skip
