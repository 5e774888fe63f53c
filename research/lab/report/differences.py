"""Curves of paired differences: every arm minus GEPO at the same delay, and minus itself without delay, step by step.

Equal seeds are joined, so what all of a seed's runs share (warm start, prompts, held-out prompts) cancels. The
intervals are of one step each; a crossing of curves is a question for a test at a step that was chosen beforehand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from heterorl_research.lab.report.data import Arm, Delay, Results, Run, by_cell
from heterorl_research.lab.report.drawing.canvas import BAND, MEAN, Picture, same_range, whole_steps
from heterorl_research.lab.report.drawing.palette import Look
from heterorl_research.lab.report.paired import BASELINE
from heterorl_research.lab.statistics.intervals import Interval, interval

ONLINE = "online"


@dataclass(frozen=True, slots=True, kw_only=True)
class DifferenceCurve:
    """One arm minus its reference: an interval over seeds for each step that both were evaluated at."""

    task: str
    delay: Delay
    arm: Arm
    reference: str
    steps: tuple[int, ...]
    points: tuple[Interval, ...]


def difference_curves(results: Results) -> list[DifferenceCurve]:
    """All curves, by task, reference, delay and arm; an arm without a pair of seeds has none."""
    cells = by_cell(results.finished)
    found = []
    for reference in (BASELINE, ONLINE):
        for (task, delay, arm), runs in cells.items():
            at, of = (delay, Arm(BASELINE, arm.variant)) if reference == BASELINE else (_online(results), arm)
            if at is None or (at, of) == (delay, arm):
                continue
            curve = _curve(runs, cells.get((task, at, of), []))
            if curve:
                found.append(
                    DifferenceCurve(
                        task=task, delay=delay, arm=arm, reference=reference,
                        steps=tuple(curve), points=tuple(curve.values()),
                    )
                )  # fmt: skip
    return sorted(found, key=lambda one: (one.task, one.reference == ONLINE, one.delay.rank, one.arm))


def as_json(curves: Sequence[DifferenceCurve]) -> list[dict[str, Any]]:
    """The curves as columns; `low` and `high` are null where there is one seed."""
    return [
        {
            "task": curve.task,
            "delay": curve.delay.label,
            "algorithm": curve.arm.algorithm,
            "variant": curve.arm.variant,
            "minus": curve.reference,
            "step": list(curve.steps),
            "difference": [round(point.mean, 5) for point in curve.points],
            "low": [None if point.half is None else round(point.low, 5) for point in curve.points],
            "high": [None if point.half is None else round(point.high, 5) for point in curve.points],
            "seeds": [point.num for point in curve.points],
        }
        for curve in curves
    ]


def pictures(results: Results, looks: dict[Arm, Look]) -> list[Picture]:
    """A picture per task and reference, a panel per delay."""
    curves = difference_curves(results)
    found = []
    for number, task in enumerate(results.tasks):
        for reference in (BASELINE, ONLINE):
            chosen = [curve for curve in curves if (curve.task, curve.reference) == (task, reference)]
            if chosen:
                found.append(_picture(task, number, reference, chosen, results, looks))
    return found


def _picture(
    task: str, number: int, reference: str, curves: list[DifferenceCurve], results: Results, looks: dict[Arm, Look]
) -> Picture:
    delays = sorted({curve.delay for curve in curves}, key=lambda delay: delay.rank)
    shown = {arm: look for arm, look in looks.items() if any(curve.arm == arm for curve in curves)}

    def draw(grid: Sequence[Any]) -> None:
        for axes, delay in zip(grid, delays, strict=True):
            axes.axhline(0.0, color="#51606e", linewidth=1.0)
            for curve in (curve for curve in curves if curve.delay == delay):
                _line(axes, curve, shown[curve.arm], shade=0.12 if len(shown) <= 8 else 0.05)
            whole_steps(axes)
            axes.set_ylabel(f"held-out accuracy minus {of}, equal seeds")
        same_range(grid)

    of = "GEPO's" if reference == BASELINE else "that without delay"
    against = f"minus {BASELINE} at the same delay" if reference == BASELINE else "minus the same arm without delay"
    several = len(results.tasks) > 1
    return Picture(
        name=f"difference_{reference}" + (f"_{number}" if several else ""),
        title=f"Paired differences, {against}" + (f"; {task}" if several else ""),
        caption=f"Held-out accuracy {against}, joined by seed: mean and 95 % t-interval of the difference at a step.",
        panels=[delay.label for delay in delays],
        draw=draw,
        panel_height=4.6,
        legend=shown,
        has_markers=False,
        signs=(MEAN, BAND) if any(point.half is not None for curve in curves for point in curve.points) else (),
    )


def _line(axes: Any, curve: DifferenceCurve, look: Look, *, shade: float) -> None:
    points = curve.points
    axes.plot(curve.steps, [p.mean for p in points], color=look.color, linestyle=look.dash, linewidth=look.width)
    if any(point.half is not None for point in points):
        axes.fill_between(
            curve.steps, [p.low for p in points], [p.high for p in points],
            color=look.color, alpha=shade, linewidth=0,
        )  # fmt: skip


def _online(results: Results) -> Delay | None:
    return next((delay for delay in results.delays if delay.kind == "none"), None)


def _curve(runs: Sequence[Run], references: Sequence[Run]) -> dict[int, Interval]:
    others = {run.seed: run.curve for run in references}
    by_step: dict[int, list[float]] = {}
    for run in runs:
        other = others.get(run.seed, {})
        for step, value in run.curve.items():
            if step in other:
                by_step.setdefault(step, []).append(value - other[step])
    return {step: found for step in sorted(by_step) if (found := interval(by_step[step])) is not None}
