"""Figures of a sweep: last accuracy against the value of each swept key, by itself and as paired differences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from heterorl_research.lab.report.data import Arm, Delay, Results, Run, numbers
from heterorl_research.lab.report.drawing.canvas import PAIRED_BAR, Picture, Sign, same_range, say_empty, short
from heterorl_research.lab.report.drawing.palette import Look, looks
from heterorl_research.lab.report.paired import BASELINE
from heterorl_research.lab.statistics.intervals import Interval, interval

WORDS = {
    "G": "group size",
    "kl": "KL coefficient",
    "lr": "learning rate",
    "clip": "clip range",
    "top_k": "top-k",
    "top_p": "top-p",
}
"""What axes call the short names of keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Paired:
    """How differences over a swept key are drawn; without a baseline they are to the regime itself."""

    baseline: str = ""
    regime: Mapping[str, str] = field(default_factory=dict)
    """The value that each key has in the regime, where runs of it are."""
    floor: float | None = None
    """Means below it are arrows at the edge, with their number: they would squash the rest."""


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


def differences(results: Results) -> list[Picture]:
    """One picture per task and delay with swept keys: minus the regime, or minus GEPO where no run is of the regime."""
    places = sorted({(run.task, run.place) for run in results.finished}, key=lambda at: (at[0], at[1].rank))
    found = []
    for number, (task, delay) in enumerate(places):
        runs = [run for run in results.finished if (run.task, run.place) == (task, delay)]
        of = "" if any(not run.variant for run in runs) else BASELINE
        picture = paired(results.model_copy(update={"runs": runs}), Paired(baseline=of))
        has_pairs = not of or any(run.algorithm == of for run in runs)
        if has_pairs and picture.panels and picture.legend:
            title = "; ".join(part for part in (picture.title, task, delay.label) if part)
            found.append(replace(picture, name=f"sweep_difference_{number}", title=title))
    return found


def paired(results: Results, how: Paired) -> Picture:
    """Last accuracy minus the baseline's at the same value, or minus the regime's, on equal seeds.

    A panel per key that runs change by itself. Runs of a single task and delay are meant.
    """
    runs = [run for run in results.finished if len(settings(run.variant)) < 2]
    keys = [key for key in swept_keys(results) if key in {one for run in runs for one in settings(run.variant)}]
    legend = looks([Arm(name) for name in results.algorithms if name != how.baseline])

    def draw(grid: Sequence[Any]) -> None:
        for axes, key in zip(grid, keys, strict=True):
            _paired_panel(axes, key, runs, legend, how)
            if how.floor is not None:
                axes.set_ylim(bottom=how.floor)
        same_range(grid)

    return Picture(
        name="sweep_paired",
        title=f"Sweeps, minus {how.baseline or 'the regime'} on equal seeds",
        caption="Means of the paired differences over seeds, 95 % t-intervals.",
        panels=["" for _ in keys],
        draw=draw,
        columns=3 if len(keys) > 2 else len(keys),
        panel_width=3.33 if len(keys) > 2 else 5.0,
        panel_height=3.0 if len(keys) > 2 else 4.4,
        legend=legend,
        signs=(PAIRED_BAR, *([] if how.baseline else [Sign(mark="hollow", text="the regime itself")])),
    )


def _paired_panel(axes: Any, key: str, runs: Sequence[Run], legend: Mapping[Arm, Look], how: Paired) -> None:
    set_by_runs = {value for run in runs if (value := settings(run.variant).get(key)) is not None}
    regime = "" if how.baseline else how.regime.get(key, "regime")
    values = sorted(set_by_runs | ({regime} if regime else set()), key=_order)
    axes.axhline(0.0, color="#57606a", linewidth=1.0)
    axes.set_xlabel(WORDS.get(key, key))
    axes.set_ylabel(f"last accuracy minus {how.baseline or 'the regime'}")
    spread = min(0.66, 0.1 * (len(legend) - 1)) / max(1, len(legend) - 1)
    for place, (arm, look) in enumerate(legend.items()):
        shift = (place - (len(legend) - 1) / 2) * spread
        points: list[tuple[float, Interval]] = []
        for x, value in enumerate(values):
            own = _lasts(runs, arm.algorithm, key, value)
            other = _lasts(runs, how.baseline, key, value) if how.baseline else _lasts(runs, arm.algorithm, key, None)
            found = interval([own[seed] - other[seed] for seed in sorted(own.keys() & other.keys())])
            if value == regime:
                found = Interval(mean=0.0, half=None, lowest=0.0, highest=0.0, num=1)
                axes.plot(
                    x + shift, 0.0, look.marker, color=look.color, markerfacecolor="white", markersize=6, zorder=4
                )
            if found is not None:
                points.append((x + shift, found))
        _with_bars(axes, points, look, how.floor)
    axes.set_xticks(range(len(values)), [_label(key, value) for value in values])
    axes.set_xlim(-0.5, len(values) - 0.5)
    axes.grid(visible=False, axis="x")


def _with_bars(axes: Any, points: Sequence[tuple[float, Interval]], look: Look, floor: float | None) -> None:
    axes.errorbar(
        [x for x, _ in points], [point.mean for _, point in points], yerr=[point.half or 0.0 for _, point in points],
        color=look.color, linestyle=look.dash, marker=look.marker, linewidth=look.width * 0.6, markersize=5,
        elinewidth=1.0, capsize=2,
    )  # fmt: skip
    for x, point in points:
        if floor is not None and point.mean < floor:
            axes.annotate(
                f"{point.mean:+.2f}", (x, floor), xytext=(x, floor + 0.02), color=look.color, ha="center", fontsize=8.5,
                arrowprops={"arrowstyle": "->", "color": look.color}, rotation=90, va="bottom",
            )  # fmt: skip


def _lasts(runs: Sequence[Run], algorithm: str, key: str, value: str | None) -> dict[int, float]:
    """Last accuracy by seed of the runs that set `key` to `value`, or that set nothing."""
    wanted = {} if value is None else {key: value}
    return {
        run.seed: run.last
        for run in runs
        if run.algorithm == algorithm and settings(run.variant) == wanted and run.last is not None
    }


def _panel(axes: Any, key: str, runs: list[Run], legend: Mapping[Arm, Look]) -> None:
    values = sorted({value for run in runs if (value := settings(run.variant).get(key)) is not None}, key=_order)
    axes.set_xlabel(WORDS.get(key, key))
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


def _label(key: str, value: str) -> str:
    try:
        return short(float(value)) if key == "lr" else value
    except ValueError:
        return value


def _order(value: str) -> tuple[bool, float, str]:
    try:
        return (False, float(value), value)
    except ValueError:
        return (True, 0.0, value)
