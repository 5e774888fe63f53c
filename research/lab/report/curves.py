"""Figures over training: accuracy at each delay, and what the batch looked like at the longest one."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from heterorl_research.lab.report.data import Arm, Delay, Results, Run, by_cell, mean
from heterorl_research.lab.report.drawing.canvas import BAND, MEAN, WORST, Picture, say_empty, scale, whole_steps
from heterorl_research.lab.report.drawing.palette import Look
from heterorl_research.lab.statistics.intervals import interval

_BINS = 60
_DELAYS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#8C8C8C")
_DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.5, 1)), (0, (6, 1.5, 1, 1.5)))
_SERIES = {
    "reward": "reward",
    "kl": "KL, nats",
    "iw_var": "variance of importance weights",
    "ess": "ESS / batch",
    "grad_norm": "gradient norm",
    "entropy": "entropy, nats",
}


def slug(text: str) -> str:
    """`text` as part of a file name."""
    return re.sub(r"[^A-Za-z0-9]+", "_", text).strip("_").lower()[:40]


def accuracy(results: Results, looks: dict[Arm, Look]) -> list[Picture]:
    """Held-out accuracy against step: one picture per task, one panel per delay."""
    pictures = []
    for number, task in enumerate(results.tasks):
        runs = [run for run in results.finished if run.task == task and run.evaluations]
        if runs:
            pictures += [_accuracy_of(task, number, runs, results, looks), _each_arm(task, number, runs, results)]
    return pictures


def across_tasks(results: Results, looks: dict[Arm, Look], titles: Mapping[str, str]) -> Picture:
    """Held-out accuracy against step, one panel per task in `titles`, whose values are the panels' titles."""
    runs = [run for run in results.finished if run.evaluations]
    panels = {title: [run for run in runs if run.task == task] for task, title in titles.items()}
    return _lines_of("accuracy_tasks", "Accuracy during training by task", panels, results, looks)


def _accuracy_of(task: str, number: int, runs: list[Run], results: Results, looks: dict[Arm, Look]) -> Picture:
    delays = [delay for delay in results.delays if any(run.place == delay for run in runs)]
    panels = {delay.label: [run for run in runs if run.place == delay] for delay in delays}
    title = f"Accuracy during training; {task}" if task else "Accuracy during training"
    return _lines_of(_name("accuracy", number, task, results), title, panels, results, looks)


def _lines_of(
    name: str, title: str, panels: Mapping[str, Sequence[Run]], results: Results, looks: dict[Arm, Look]
) -> Picture:
    def draw(grid: Sequence[Any]) -> None:
        for axes, runs in zip(grid, panels.values(), strict=True):
            for arm in reversed(results.arms):
                shade = 0.1 if len(results.arms) <= 8 else 0.05
                _accuracy_lines(axes, [run for run in runs if run.arm == arm], looks[arm], shade=shade)
            whole_steps(axes)
            axes.set_ylabel("held-out accuracy")
        # No band is cut off, but that an accuracy is 1 at most.
        top = max((axes.dataLim.y1 for axes in grid), default=1.0)
        for axes in grid:
            axes.set_ylim(0, min(1.02, top * 1.04) if top > 0 else 1)

    several = any(len(cell) > 1 for runs in panels.values() for cell in by_cell(runs).values())
    return Picture(
        name=name,
        title=title,
        caption="Thick: mean over seeds; shade: 95 % t-interval (none for one seed); thin: the seed that ends worst. "
        "The value at step 0 is the warm start.",
        panels=list(panels),
        draw=draw,
        panel_height=4.6,
        legend=looks,
        has_markers=False,
        signs=(MEAN, WORST, BAND) if several else (),
    )


def _each_arm(task: str, number: int, runs: list[Run], results: Results) -> Picture:
    arms = [arm for arm in results.arms if any(run.arm == arm for run in runs)]
    cells = by_cell(runs)
    # Dashes repeat what the colours say, for those who do not see them.
    shades = {
        delay: Look(color=_DELAYS[place % len(_DELAYS)], dash=_DASHES[place % len(_DASHES)], marker="", width=1.6)
        for place, delay in enumerate(results.delays)
    }

    def draw(grid: Sequence[Any]) -> None:
        top = max((point[1] for run in runs for point in _points(run)), default=1.0)
        for axes, arm in zip(grid, arms, strict=True):
            for delay, look in shades.items():
                _accuracy_lines(axes, cells.get((task, delay, arm), []), look, shade=0.2)
            axes.set_ylim(0, min(1.02, top * 1.08) if top > 0 else 1)
            axes.xaxis.get_major_locator().set_params(integer=True)
        for delay, look in shades.items():
            grid[0].plot([], [], color=look.color, linestyle=look.dash, label=delay.label)
        grid[0].legend(fontsize=7, frameon=False, loc="lower left")

    return Picture(
        name=_name("accuracy_each", number, task, results),
        title=f"Accuracy of each algorithm; {task}" if task else "Accuracy of each algorithm",
        caption="The same curves, a panel per algorithm, a line per delay.",
        panels=[arm.label for arm in arms],
        draw=draw,
        columns=5,
        panel_width=3.1,
        panel_height=2.3,
    )


def _name(name: str, number: int, task: str, results: Results) -> str:
    return f"{name}_{number}_{slug(task)}" if len(results.tasks) > 1 else name


def _points(run: Run) -> list[tuple[int, float]]:
    return list(run.curve.items())


def _accuracy_lines(axes: Any, runs: Sequence[Run], look: Look, *, shade: float) -> None:
    by_step: dict[int, list[float]] = {}
    for run in runs:
        for step, value in _points(run):
            by_step.setdefault(step, []).append(value)
    if not by_step:
        return
    steps = sorted(by_step)
    means = [found for step in steps if (found := interval(by_step[step])) is not None]
    axes.plot(steps, [m.mean for m in means], color=look.color, linestyle=look.dash, linewidth=look.width)
    if any(m.half is not None for m in means):
        axes.fill_between(
            steps, [m.low for m in means], [m.high for m in means], color=look.color, alpha=shade, linewidth=0
        )
    if len(runs) > 1:
        worst = min(runs, key=lambda run: (_points(run)[-1][1], run.seed) if _points(run) else (2.0, run.seed))
        axes.plot(*zip(*_points(worst), strict=True), color=look.color, linestyle=look.dash, linewidth=0.5, alpha=0.7)


def training(results: Results, looks: dict[Arm, Look]) -> list[Picture]:
    """Series against step at the longest delay of each task: mean over seeds, averaged over 60 stretches of steps."""
    pictures = []
    for number, task in enumerate(results.tasks):
        runs = [run for run in results.finished if run.task == task and run.series.get("step")]
        if not runs:
            continue
        longest = max((run.place for run in runs), key=lambda delay: delay.rank)
        pictures.append(_training_of(task, number, longest, runs, results, looks))
    return pictures


def _training_of(
    task: str, number: int, delay: Delay, runs: list[Run], results: Results, looks: dict[Arm, Look]
) -> Picture:
    here = [run for run in runs if run.place == delay]
    names = [name for name in _SERIES if any(value is not None for run in here for value in run.series.get(name, []))]
    last = max((step for run in here for step in run.series["step"] if step is not None), default=1.0)
    edges = np.linspace(0, last, _BINS + 1)

    def draw(grid: Sequence[Any]) -> None:
        for axes, name in zip(grid, names, strict=True):
            whole_steps(axes)
            drawn: list[float] = []
            for arm in reversed(results.arms):
                xs, ys = _binned([run for run in here if run.arm == arm], name, edges)
                look = looks[arm]
                axes.plot(xs, ys, color=look.color, linestyle=look.dash, linewidth=look.width * 0.8)
                drawn += ys
            if drawn:
                scale(axes, drawn)
            else:
                say_empty(axes)

    return Picture(
        name=_name("training", number, task, results),
        title=f"During training at {delay.label}" + (f"; {task}" if len(results.tasks) > 1 else ""),
        caption="Means over seeds; each point averages a stretch of steps.",
        panels=[_SERIES[name] for name in names],
        draw=draw,
        legend=looks,
        has_markers=False,
    )


def _binned(runs: Sequence[Run], name: str, edges: Any) -> tuple[list[float], list[float]]:
    stretches: dict[int, list[float]] = {}
    for run in runs:
        for step, value in zip(run.series["step"], run.series.get(name, []), strict=False):
            if step is not None and value is not None:
                stretch = min(_BINS - 1, int(np.searchsorted(edges, step, side="right")) - 1)
                stretches.setdefault(stretch, []).append(value)
    keys = sorted(stretches)
    return [float(edges[k] + edges[k + 1]) / 2 for k in keys], [mean(stretches[k]) or 0.0 for k in keys]
