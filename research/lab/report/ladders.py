"""Ladders: last accuracy minus GEPO's on equal seeds, rung by rung, over delays, over tasks or over tokens."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from heterorl_research.lab.report.data import Arm, Delay, Results, Run, by_cell
from heterorl_research.lab.report.drawing.canvas import BAR, PAIRED_BAR, Picture, Sign, short
from heterorl_research.lab.report.drawing.palette import Look
from heterorl_research.lab.report.paired import BASELINE, Comparison, comparisons
from heterorl_research.lab.statistics.intervals import Interval, interval

_BARS = "Dots are means over seeds, bars 95 % t-intervals; a dot without bar is one seed."
_ASIDE = 1.8
_SPREAD = 0.4
"""Of the room between two rungs, what the arms of one rung take side by side."""


def ladders(results: Results, looks: dict[Arm, Look]) -> list[Picture]:
    """Last accuracy minus GEPO's on equal seeds, rung by rung: over three delays or more, and over several tasks."""
    found: dict[tuple[str, str], list[Comparison]] = defaultdict(list)
    for one in comparisons(results):
        if one.measure == "last":
            found[one.task, one.delay.label].append(one)
    others = {arm: look for arm, look in looks.items() if arm.algorithm != BASELINE}
    tasks = {task: float(place) for place, task in enumerate(results.tasks)}
    delays = {delay.label: place for delay, place in zip(results.delays, _places(results.delays), strict=True)}
    pictures = []
    if found and len(delays) > 2:
        pictures.append(_ladder("delay", list(tasks), delays, lambda task, delay: found[task, delay], others))
    if found and len(tasks) > 1:
        pictures.append(_ladder("task", list(delays), tasks, lambda delay, task: found[task, delay], others))
    return pictures


def _places(delays: Sequence[Delay]) -> list[float]:
    """Where delays stand: by powers of two, no delay below the shortest; where kinds differ, one after another."""
    sizes = [delay.value for delay in delays if delay.kind != "none"]
    if len(sizes) < 2 or len({delay.kind for delay in delays} - {"none"}) != 1 or min(sizes) <= 0:
        return [float(place) for place in range(len(delays))]
    powers = [math.log2(size) for size in sizes]
    # No delay has no place on such an axis: it is as far from the shortest as rungs are from each other on average.
    before = [powers[0] - max(1.0, (powers[-1] - powers[0]) / (len(powers) - 1))] if len(sizes) < len(delays) else []
    return [*before, *powers]


def _ladder(
    axis: str,
    panels: Sequence[str],
    rungs: Mapping[str, float],
    at: Callable[[str, str], Sequence[Comparison]],
    looks: dict[Arm, Look],
) -> Picture:
    places = list(rungs.values())
    gap = min(second - first for first, second in itertools.pairwise(places))

    def draw(grid: Sequence[Any]) -> None:
        for axes, panel in zip(grid, panels, strict=True):
            axes.set_ylabel("last accuracy minus GEPO's")
            axes.axhline(0.0, color="#57606a", linewidth=1.0)
            for (arm, look), shift in zip(looks.items(), _shifts(len(looks), gap), strict=True):
                points = {
                    place + shift: one.difference
                    for rung, place in rungs.items()
                    for one in at(panel, rung)
                    if one.arm == arm
                }
                _points(axes, points, look)
            axes.set_xticks(places, list(rungs))
            axes.set_xlim(places[0] - gap / 2, places[-1] + gap / 2)
            axes.grid(visible=False, axis="x")

    return Picture(
        name=f"ladder_{axis}", title=f"Difference to GEPO by {axis}", caption=f"Paired by seed. {_BARS}",
        panels=panels if len(panels) > 1 else [""], draw=draw, legend=looks, panel_height=4.2, signs=(PAIRED_BAR,),
    )  # fmt: skip


def by_tokens(results: Results, looks: dict[Arm, Look], tokens: Mapping[str, int]) -> Picture:
    """Gain on the warm start, and the difference to GEPO, against the tokens of a completion.

    Args:
        results: of one delay.
        looks: of the arms.
        tokens: of the completions of each task; of two tasks with as many tokens the second is drawn hollow, and no
            line leads to it.
    """
    cells = {(task, arm): runs for (task, _, arm), runs in by_cell(results.finished).items()}
    found = {(one.task, one.arm): one.difference for one in comparisons(results) if one.measure == "last"}
    gains = {key: gain for key, runs in cells.items() if (gain := _gain(runs)) is not None}
    first = {count: task for task, count in reversed(list(tokens.items()))}
    counts = sorted(first)
    again = {task: count for task, count in tokens.items() if first[count] != task}
    rates = {run.task: short(run.lr) for run in results.finished if run.lr is not None}

    def draw(grid: Sequence[Any]) -> None:
        for axes, values in zip(grid, (gains, found), strict=True):
            axes.axhline(0.0, color="#57606a", linewidth=1.0)
            for (arm, look), shift in zip(looks.items(), _shifts(len(looks), 1.0), strict=True):
                side = 1.0 + 0.7 * shift
                whole = {count * side: values[first[count], arm] for count in counts if (first[count], arm) in values}
                _points(axes, whole, look)
                second = {
                    _ASIDE * count * side: values[task, arm] for task, count in again.items() if (task, arm) in values
                }
                _points(axes, second, look, is_hollow=True)
            axes.set_xscale("log")
            axes.set_xticks(
                [*counts, *(_ASIDE * count for count in again.values())],
                [*map(str, counts), *(f"{count} at\n{rates.get(task, task)}" for task, count in again.items())],
            )
            axes.set_xticks([], minor=True)
            axes.set_xlim(counts[0] / 1.6, counts[-1] * (_ASIDE * 1.4 if again else 1.6))
            axes.set_xlabel("tokens of a completion")
            axes.grid(visible=False, axis="x")
        grid[0].set_ylabel("last accuracy minus warm start")
        grid[1].set_ylabel("last accuracy minus GEPO's, equal seeds")

    return Picture(
        name="ladder_tokens",
        title="Gain and difference to GEPO by tokens",
        caption=f"Left: last accuracy minus the warm start's. Right: minus GEPO's, paired by seed. {_BARS}",
        panels=["gain on the warm start", "difference to GEPO"],
        draw=draw,
        panel_height=4.4,
        legend=looks,
        signs=(BAR, *([Sign(mark="hollow", text="another learning rate")] if again else [])),
    )


def _gain(runs: Sequence[Run]) -> Interval | None:
    return interval(
        [
            run.last - run.warm_start_accuracy
            for run in runs
            if run.last is not None and run.warm_start_accuracy is not None
        ]
    )


def _shifts(num: int, gap: float) -> list[float]:
    step = _SPREAD * gap / max(1, num - 1)
    return [(place - (num - 1) / 2) * step for place in range(num)]


def _points(axes: Any, points: Mapping[float, Interval], look: Look, *, is_hollow: bool = False) -> None:
    axes.errorbar(
        list(points), [found.mean for found in points.values()], yerr=[found.half or 0.0 for found in points.values()],
        color=look.color, marker=look.marker, linestyle="" if is_hollow else look.dash, linewidth=look.width * 0.6,
        markersize=5, elinewidth=1.0, capsize=1.5, markerfacecolor="white" if is_hollow else look.color,
    )  # fmt: skip
