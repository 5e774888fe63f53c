"""Phase diagram: where in the plane of learning rate and delay an algorithm ends above the warm start it began from.

Drawn for experiments that sweep `lr` at several delays. A cell counts as learning where the whole 95 % t-interval of
last minus warm start, over seeds, is above zero, and as falling where it is below.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from heterorl_research.lab.report.data import Delay, Results, Run
from heterorl_research.lab.report.drawing.canvas import Picture, Sign, short
from heterorl_research.lab.report.sweeps import settings
from heterorl_research.lab.statistics.intervals import Interval, interval

_LEAST_LAGS = 2
_MOST, _SHADES = 0.505, 101
"""A shade for each number of two digits, so that equal numbers have equal colours."""
_DARK = 0.33
"""From here on white is read better than black."""


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
            image = _panel(axes, cells)
        bar = grid[0].figure.colorbar(image, ax=list(grid), shrink=0.6, aspect=30, pad=0.02)
        bar.set_label("last accuracy minus warm start, mean over seeds")

    return Picture(
        name=name,
        title=f"Learning rate and delay; {task}" if task else "Learning rate and delay",
        caption="Last accuracy minus warm start, mean over seeds; blue is above, red below. A sign stands where the "
        "whole 95 % t-interval is on one side.",
        panels=list(planes_of),
        draw=draw,
        columns=3 if len(planes_of) in (5, 6) else 4,
        panel_width=3.3,
        panel_height=2.9,
        signs=(
            Sign(mark="plus", text="the whole 95 % t-interval is above the warm start"),
            Sign(mark="minus", text="the whole interval is below it"),
        ),
    )


def _panel(axes: Any, cells: Sequence[Cell]) -> Any:
    from matplotlib import colormaps

    rates = sorted({cell.lr for cell in cells})
    delays = sorted({cell.delay for cell in cells}, key=lambda delay: delay.rank)
    at = {(cell.delay, cell.lr): cell for cell in cells}
    values = [[_mean(at[delay, rate]) for rate in rates] for delay in delays]
    shades = colormaps["RdBu"].resampled(_SHADES)
    image = axes.imshow(values, origin="lower", aspect="auto", cmap=shades, vmin=-_MOST, vmax=_MOST)
    for row, delay in enumerate(delays):
        for column, rate in enumerate(rates):
            cell = at[delay, rate]
            sign = "+" if cell.learns else "\u2212" if cell.falls else ""
            number = "" if cell.gain is None else f"{cell.gain.mean:+.2f}"
            is_dark = cell.gain is not None and abs(cell.gain.mean) > _DARK
            axes.text(
                column, row, f"{sign}\n{number}", ha="center", va="center", fontsize=9,
                color="white" if is_dark else "black",
            )  # fmt: skip
    axes.set_xticks(range(len(rates)), [short(rate) for rate in rates])
    axes.set_yticks(range(len(delays)), [delay.label for delay in delays])
    axes.set_xlabel("learning rate")
    axes.grid(visible=False)
    return image


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
