"""Figures over delay: one number per run, its mean over seeds, and how those numbers hang together."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from heterorl_research.lab.report.data import Arm, Delay, Results, Run, by_cell, numbers
from heterorl_research.lab.report.drawing.canvas import Picture, say_empty, scale
from heterorl_research.lab.report.drawing.palette import Look
from heterorl_research.lab.report.paired import BASELINE
from heterorl_research.lab.statistics.correlation import pearson, spearman
from heterorl_research.lab.statistics.intervals import interval

_BARS = "Dots are means over seeds, bars 95 % t-intervals; a dot without bar is one seed."
_MOST_LINES = 8
# name of the file, title, caption, then (number, label) for each panel of a task.
_AGAINST_DELAY: tuple[tuple[str, str, str, tuple[tuple[str, str], ...]], ...] = (
    ("last", "Accuracy against delay", "Held-out accuracy after the last step.", (("last", "last accuracy"),)),
    ("kl", "KL divergence against delay", "Of the learner's policy from the sampler's.", (("kl_mean", "KL, nats"),)),
    (
        "iw_variance",
        "Variance of the importance weights against delay",
        "Left: the weights of the algorithm itself. Then: the weights that GEPO and GSPO would have given to the "
        "same answers.",
        (
            ("iw_var_mean", "variance, own weights"),
            ("series:iw_var_gepo", "variance, GEPO weights"),
            ("series:iw_var_gspo", "variance, GSPO weights"),
        ),
    ),
    (
        "advantage_error",
        "Estimation error of the expected advantage against delay",
        "Distance of the weighted mean advantage from the true one.",
        (("advantage_error_mean", "error of E[A]"),),
    ),
    (
        "bias",
        "Bias of GEPO and GSPO against delay",
        "Bias of both weights on the answers each algorithm trained on.",
        (("bias_gepo_mean", "bias of GEPO"), ("bias_gspo_mean", "bias of GSPO")),
    ),
    ("ess", "Effective sample size against delay", "Share of the batch.", (("ess_mean", "ESS / batch"),)),
    ("clip", "Clip fraction against delay", "Share that the clip left without gradient.",
     (("clip_fraction_mean", "clip fraction"),)),
    ("grad_norm", "Gradient norm against delay", "95th percentile over the steps of a run.",
     (("grad_norm_p95", "gradient norm, p95"),)),
    ("staleness", "Staleness against delay", "Versions between the writer of an answer and the learner.",
     (("staleness_mean", "versions, mean"),)),
)  # fmt: skip
_CORRELATED = (
    ("iw_var_mean", "variance of importance weights"),
    ("kl_mean", "KL, nats"),
    ("advantage_error_mean", "error of E[A]"),
)


def against_delay(results: Results, looks: dict[Arm, Look]) -> list[Picture]:
    """One picture per number, a panel per task; numbers that no run has are left out."""
    pictures = []
    for name, title, caption, parts in _AGAINST_DELAY:
        panels = [
            (task, number, label) for task in results.tasks for number, label in parts if numbers(results.runs, number)
        ]
        if panels:
            picture = _over_delays(results, looks, name, title, caption, panels)
            # Several numbers: a row per task.
            pictures.append(
                replace(picture, columns=len(panels) // len({task for task, *_ in panels}) if parts[1:] else 3)
            )
    return pictures


def _over_delays(
    results: Results,
    looks: dict[Arm, Look],
    name: str,
    title: str,
    caption: str,
    panels: Sequence[tuple[str, str, str]],
) -> Picture:
    def draw(grid: Sequence[Any]) -> None:
        for axes, (task, number, label) in zip(grid, panels, strict=True):
            axes.set_ylabel(label)
            _delay_panel(axes, [run for run in results.finished if run.task == task], number, results, looks)

    several = len(results.tasks) > 1
    titles = [task if several else "" for task, _, _ in panels]
    return Picture(name=name, title=title, caption=f"{caption} {_BARS}", panels=titles, draw=draw, legend=looks)


def _delay_panel(axes: Any, runs: list[Run], number: str, results: Results, looks: dict[Arm, Look]) -> None:
    delays, cells = results.delays, by_cell(runs)
    values = numbers(runs, number)
    if not values:
        say_empty(axes)
        return
    # Arms stand side by side at each delay, or their bars would hide one another.
    step = 0.7 / max(1, len(results.arms) - 1) if len(results.arms) > 1 else 0.0
    for place, arm in enumerate(results.arms):
        points = []
        for column, delay in enumerate(delays):
            found = interval(numbers((run for run in _cell(cells, delay, arm)), number))
            if found is not None:
                points.append((column + (place - (len(results.arms) - 1) / 2) * step, found, delay))
        look = looks[arm]
        for x, found, _ in points:
            bar = [[found.half or 0.0], [found.half or 0.0]] if found.half is not None else None
            axes.errorbar(
                x,
                found.mean,
                yerr=bar,
                color=look.color,
                marker=look.marker,
                markersize=4.5,
                elinewidth=1.0,
                capsize=1.5,
            )
        # A line joins delays of one kind only: between kinds there is no way. Many lines side by side would only seem
        # to differ, since they start at different places.
        is_legible = len(results.arms) <= _MOST_LINES or arm.algorithm == BASELINE
        if is_legible and len({delay.kind for _, _, delay in points} - {"none"}) <= 1:
            axes.plot(
                [x for x, _, _ in points], [found.mean for _, found, _ in points],
                color=look.color, linestyle=look.dash, linewidth=look.width * 0.6, alpha=0.6,
            )  # fmt: skip
    scale(axes, values)
    if number == "last":
        # Intervals of few seeds reach beyond what an accuracy can be.
        low, high = axes.get_ylim()
        axes.set_ylim(max(low, -0.02), min(high, 1.02))
    _label_delays(axes, delays)


def _cell(cells: dict[tuple[str, Delay, Arm], list[Run]], delay: Delay, arm: Arm) -> list[Run]:
    return [run for (_, at, of), runs in cells.items() if at == delay and of == arm for run in runs]


def _label_delays(axes: Any, delays: Sequence[Delay]) -> None:
    crowded = len(delays) > 4
    axes.set_xticks(
        range(len(delays)), [delay.label for delay in delays], rotation=25 if crowded else 0,
        ha="right" if crowded else "center",
    )  # fmt: skip
    axes.set_xlim(-0.5, len(delays) - 0.5)
    for border in range(len(delays) - 1):
        axes.axvline(border + 0.5, color="#d8dee4", linewidth=0.8)
    axes.grid(visible=False, axis="x")


def correlations(results: Results, looks: dict[Arm, Look]) -> list[Picture]:
    """Scatter of variance, KL and error, each pair, one dot per run, with Pearson's and Spearman's r."""
    pairs = [(x, y) for x, y in itertools.combinations(_CORRELATED, 2) if _both(results.finished, x[0], y[0])]
    if not pairs:
        return []

    def draw(grid: Sequence[Any]) -> None:
        for axes, (x, y) in zip(grid, pairs, strict=True):
            axes.set_xlabel(x[1])
            axes.set_ylabel(y[1])
            for run in results.finished:
                at, up = run.number(x[0]), run.number(y[0])
                if at is not None and up is not None:
                    look = looks[run.arm]
                    axes.plot(at, up, look.marker, color=look.color, markersize=4, alpha=0.7, markeredgewidth=0.4)
            dots = _both(results.finished, x[0], y[0])
            scale(axes, [dot[0] for dot in dots], side="x")
            scale(axes, [dot[1] for dot in dots])

    titles = []
    for x, y in pairs:
        dots = _both(results.finished, x[0], y[0])
        first, second = [dot[0] for dot in dots], [dot[1] for dot in dots]
        titles.append(
            f"r = {_short(pearson(first, second))}, of ranks {_short(spearman(first, second))}, n = {len(dots)}"
        )
    caption = (
        "One dot per run, all tasks and delays. r is Pearson's, on the numbers as they are; of ranks is Spearman's."
    )
    return [
        Picture(
            name="correlations", title="How variance, KL and error hang together", caption=caption, panels=titles,
            draw=draw, legend=looks,
        )
    ]  # fmt: skip


def _both(runs: Sequence[Run], x: str, y: str) -> list[tuple[float, float]]:
    pairs = ((run.number(x), run.number(y)) for run in runs)
    return [(first, second) for first, second in pairs if first is not None and second is not None]


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
