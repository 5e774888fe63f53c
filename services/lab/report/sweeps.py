"""Figures of a sweep: last accuracy against the value of each swept key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from heterorl.common.evaluation.intervals import interval
from heterorl.lab.report.data import Arm, Delay, Results, Run, numbers
from heterorl.lab.report.drawing.canvas import Picture, say_empty
from heterorl.lab.report.drawing.palette import Look, looks


def settings(variant: str) -> dict[str, str]:
    """`lr=0.003,beta=0` as a mapping; text without `=` is the value of `variant`."""
    found: dict[str, str] = {}
    for part in (part.strip() for part in variant.split(",")):
        if part:
            key, sign, value = part.partition("=")
            found[key.strip() if sign else "variant"] = value.strip() if sign else key.strip()
    return found


def swept_keys(results: Results) -> list[str]:
    """Keys that have more than one value over the runs; an absent key counts as a value (the default)."""
    seen = [settings(variant) for variant in sorted({run.variant for run in results.runs})]
    keys = sorted({key for found in seen for key in found})
    return [key for key in keys if len({found.get(key) for found in seen}) > 1]


def sweeps(results: Results) -> list[Picture]:
    """One picture per task with swept keys, a panel per key and delay."""
    keys = swept_keys(results)
    legend = looks([Arm(name) for name in results.algorithms])
    pictures = []
    for number, task in enumerate(results.tasks):
        runs = [run for run in results.finished if run.task == task]
        panels = [(key, delay) for key in keys for delay in results.delays]
        if not keys:
            continue

        def draw(grid: Sequence[Any], runs: list[Run] = runs, panels: list[tuple[str, Delay]] = panels) -> None:
            for axes, (key, delay) in zip(grid, panels, strict=True):
                _panel(axes, key, [run for run in runs if run.place == delay], legend)

        pictures.append(
            Picture(
                name=f"sweep_{number}",
                title=f"Sweeps; {task}" if task else "Sweeps",
                caption="Mean of the last accuracy over seeds (and over the other swept keys), 95 % t-intervals; "
                "dotted lines are the regime itself, or, where no run is of it, all that leave the key at its default.",
                panels=[f"{key}; {delay.label}" for key, delay in panels],
                draw=draw,
                columns=max(1, min(3, len(results.delays))),
                legend=legend,
            )
        )
    return pictures


def _panel(axes: Any, key: str, runs: list[Run], legend: Mapping[Arm, Look]) -> None:
    values = sorted({value for run in runs if (value := settings(run.variant).get(key)) is not None}, key=_order)
    axes.set_xlabel(key)
    axes.set_ylabel("last accuracy")
    if not values:
        say_empty(axes)
        return
    spread = 0.3 / max(1, len(legend) - 1)
    for place, (arm, look) in enumerate(legend.items()):
        own = [run for run in runs if run.algorithm == arm.algorithm]
        found = [
            interval(numbers((run for run in own if settings(run.variant).get(key) == value), "last"))
            for value in values
        ]
        shift = (place - (len(legend) - 1) / 2) * spread
        known = [(x + shift, point) for x, point in enumerate(found) if point is not None]
        axes.errorbar(
            [x for x, _ in known],
            [point.mean for _, point in known],
            yerr=[point.half or 0.0 for _, point in known],
            color=look.color, linestyle=look.dash, marker=look.marker, linewidth=look.width, markersize=4.5,
            elinewidth=1.0, capsize=2,
        )  # fmt: skip
        default = interval(numbers(_at_default(key, own), "last"))
        if default is not None:
            axes.axhline(default.mean, color=look.color, linestyle=":", linewidth=1)
    axes.set_xticks(range(len(values)), values)
    axes.set_xlim(-0.5, len(values) - 0.5)
    axes.set_ylim(bottom=0)


def _at_default(key: str, runs: Sequence[Run]) -> list[Run]:
    """Runs of the regime itself; without any, all that leave this key, whatever else they change."""
    return [run for run in runs if not run.variant] or [run for run in runs if key not in settings(run.variant)]


def _order(value: str) -> tuple[bool, float, str]:
    try:
        return (False, float(value), value)
    except ValueError:
        return (True, 0.0, value)
