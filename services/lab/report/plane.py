"""Phase diagram: where in the plane of learning rate and delay an algorithm ends above the warm start it began from.

Drawn for experiments that sweep `lr` at several delays. A cell counts as learning where the whole 95 % t-interval of
last minus warm start, over seeds, is above zero, and as falling where it is below; the area is the share of the cells
that learn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from heterorl.common.evaluation.intervals import Interval, interval
from heterorl.lab.report.data import Delay, Results, Run
from heterorl.lab.report.drawing.canvas import Picture
from heterorl.lab.report.sweeps import settings

_LEAST_LAGS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One learning rate at one delay: last minus warm start over the seeds; None where no run ended."""

    lr: float
    delay: Delay
    gain: Interval | None

    @property
    def learns(self) -> bool:
        """Whether the accuracy has risen for sure."""
        return self.gain is not None and self.gain.half is not None and self.gain.low > 0.0

    @property
    def falls(self) -> bool:
        """Whether the accuracy has fallen for sure."""
        return self.gain is not None and self.gain.half is not None and self.gain.high < 0.0


def swept_rate(run: Run) -> float | None:
    """The learning rate that the run's variant sets and nothing else, if it does so."""
    found = settings(run.variant)
    try:
        return float(found["lr"]) if set(found) == {"lr"} else None
    except ValueError:
        return None


def planes(results: Results, task: str) -> dict[str, list[Cell]]:
    """The cells of each algorithm, by delay and rate; none where fewer than two rates or delays were run."""
    runs = [(rate, run) for run in results.finished if run.task == task and (rate := swept_rate(run)) is not None]
    rates = sorted({rate for rate, _ in runs})
    delays = sorted({run.place for _, run in runs}, key=lambda delay: delay.rank)
    if len(rates) < _LEAST_LAGS or len(delays) < _LEAST_LAGS:
        return {}
    return {
        algorithm: [
            Cell(
                lr=rate,
                delay=delay,
                gain=_gain([run for at, run in runs if (at, run.place, run.algorithm) == (rate, delay, algorithm)]),
            )
            for delay in delays
            for rate in rates
        ]
        for algorithm in results.algorithms
        if any(run.algorithm == algorithm for _, run in runs)
    }


def area(cells: Sequence[Cell]) -> float | None:
    """Share of the cells that learn, of those that were run."""
    known = [cell for cell in cells if cell.gain is not None]
    return sum(cell.learns for cell in known) / len(known) if known else None


def pictures(results: Results) -> list[Picture]:
    """A picture per task with such a sweep, a panel per algorithm."""
    found = []
    for number, task in enumerate(results.tasks):
        cells = planes(results, task)
        if cells:
            found.append(_picture(f"plane_{number}", task, cells))
    return found


def _picture(name: str, task: str, planes_of: dict[str, list[Cell]]) -> Picture:
    def draw(grid: Sequence[Any]) -> None:
        for axes, cells in zip(grid, planes_of.values(), strict=True):
            _panel(axes, cells)

    titles = []
    for algorithm, cells in planes_of.items():
        share = area(cells)
        titles.append(algorithm if share is None else f"{algorithm}: learns in {share:.0%}")
    return Picture(
        name=name,
        title=f"Learning rate and delay; {task}" if task else "Learning rate and delay",
        caption="Last accuracy minus warm start, mean over seeds; blue is above, red below. A sign stands where the "
        "whole 95 % t-interval is on one side; the title has the share of cells with a plus.",
        panels=titles,
        draw=draw,
        columns=3 if len(planes_of) in (5, 6) else 4,
        panel_width=3.6,
        panel_height=3.0,
    )


def _panel(axes: Any, cells: Sequence[Cell]) -> None:
    rates = sorted({cell.lr for cell in cells})
    delays = sorted({cell.delay for cell in cells}, key=lambda delay: delay.rank)
    at = {(cell.delay, cell.lr): cell for cell in cells}
    values = [[_mean(at[delay, rate]) for rate in rates] for delay in delays]
    axes.imshow(values, origin="lower", aspect="auto", cmap="RdBu", vmin=-0.5, vmax=0.5)
    for row, delay in enumerate(delays):
        for column, rate in enumerate(rates):
            cell = at[delay, rate]
            sign = "+" if cell.learns else "-" if cell.falls else ""
            number = "" if cell.gain is None else f"{cell.gain.mean:+.2f}"
            axes.text(column, row, f"{sign}\n{number}", ha="center", va="center", fontsize=7)
    axes.set_xticks(range(len(rates)), [f"{rate:g}" for rate in rates], fontsize=7)
    axes.set_yticks(range(len(delays)), [delay.label for delay in delays], fontsize=7)
    axes.set_xlabel("learning rate")
    axes.grid(visible=False)


def _mean(cell: Cell) -> float:
    return float("nan") if cell.gain is None else cell.gain.mean


def _gain(runs: Sequence[Run]) -> Interval | None:
    return interval(
        [
            run.last - run.warm_start_accuracy
            for run in runs
            if run.last is not None and run.warm_start_accuracy is not None
        ]
    )
