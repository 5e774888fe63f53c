"""Pictures of a run, and sparklines.

Values that a learner did not state are left out.
"""

from __future__ import annotations

import io
import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from heterorl.common.types.common import (
    SOURCE_STEPS,
    CompletionNumbers,
    LearnerPhase,
    StepReport,
    StepTimes,
    mean_of_sources,
)

PICTURES = {
    "accuracy": "Reward, trained and held out",
    "staleness": "Staleness of the trained groups",
    "kl": "KL divergence of sampler and learner policy",
    "iw_variance": "Variance of the importance weights",
    "ess": "Effective sample size",
    "bytes": "Bytes per version",
}
"""Names and headings."""
STRONG, WEAK, MARK = "#1f5fa8", "#e08a2e", "#51606e"
WIDTH, HEIGHT, DPI = 5.8, 3.2, 220
"""Inches, and dots an inch: two pictures side by side on a desktop, one at the width of a phone."""
_WIDE = 100.0
"""A series whose maximum exceeds this times its median gets a logarithmic axis."""
_LARGEST = 1e100
"""Matplotlib's axes overflow at values near 1e308."""
Rows = Sequence[Mapping[str, Any]]
"""Rows of a learner's journal."""


def drawings(reports: Sequence[StepReport], versions: Rows, start: float | None) -> dict[str, Callable[[Any], None]]:
    """Functions that draw `PICTURES` on given axes; needs an applied step.

    `start` is the mean held-out reward of version 0, None if unknown.
    """
    steps = [report.step for report in reports]
    evaluated = [(r.step, r.evaluation_accuracy) for r in reports if r.evaluation_accuracy is not None]
    evaluated = evaluated if start is None else [(0, start), *evaluated]

    def accuracy(axes: Any) -> None:
        rewards = [report.reward_mean for report in reports]
        axes.plot(steps, rewards, color=WEAK, alpha=0.6, linewidth=1, label="reward of the samplers")
        if evaluated:
            axes.plot(
                *zip(*evaluated, strict=True), color=STRONG, marker="o", markersize=4, label="held-out prompts, learner"
            )
        shown = [*rewards, *(value for _, value in evaluated)]
        # Shares from 0 to 1, other rewards on their scale.
        if min(shown) >= 0.0 and max(shown) <= 1.0:
            axes.set_ylim(0, 1)
        axes.set_ylabel("mean reward")
        # Above the axes, because held-out points lie at the top and at the bottom.
        legend(axes)

    def staleness(axes: Any) -> None:
        oldest = [report.staleness_max for report in reports]
        # The two often coincide; a wide line stays visible under a narrow one.
        axes.plot(steps, oldest, color=WEAK, linewidth=5, alpha=0.6, label="oldest of the step")
        axes.plot(steps, [report.staleness_mean for report in reports], color=STRONG, label="mean of the step")
        _from_zero(axes, oldest)
        axes.set_ylabel("versions")
        legend(axes)

    def series(name: str, label: str) -> Callable[[Any], None]:
        def draw(axes: Any) -> None:
            stated = [getattr(report, name) for report in reports]
            # A custom loss may give weights that are not finite, or too large to draw.
            axes.plot(steps, [value if _finite([value]) else math.nan for value in stated], color=STRONG)
            values = _finite(stated) or [0.0]
            if min(values) > 0 and max(values) > _WIDE * statistics.median(values):
                _logarithmic(axes)
            else:
                _from_zero(axes, values)
            axes.set_ylabel(label)

        return draw

    def ess(axes: Any) -> None:
        series("ess_fraction", "share of the batch")(axes)
        axes.set_ylim(0, 1.02)

    def size(axes: Any) -> None:
        numbers = [entry["version"] for entry in versions]
        axes.plot(numbers, [e["full_bytes"] / 1024 for e in versions], color=WEAK, linestyle="--", label="all weights")
        axes.plot(numbers, [e["bytes"] / 1024 for e in versions], color=STRONG, label="sent")
        _from_zero(axes, [e["full_bytes"] / 1024 for e in versions])
        axes.set_ylabel("KiB")
        axes.set_xlabel("version")
        whole_numbers(axes.xaxis)
        legend(axes)

    return {
        "accuracy": accuracy,
        "staleness": staleness,
        "kl": series("kl", "nats per answer"),
        "iw_variance": series("iw_variance", "variance"),
        "ess": ess,
        "bytes": size,
    }


def _finite(values: Sequence[float]) -> list[float]:
    return [value for value in values if abs(value) < _LARGEST]


def whole_numbers(axis: Any) -> None:
    """Put the ticks of an axis at whole numbers."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))


def _logarithmic(axes: Any) -> None:
    """Make the vertical axis logarithmic, with plain numbers, not formulas."""
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}".replace("e-0", "e-"))
    axes.yaxis.set_minor_formatter("")


def _from_zero(axes: Any, values: Sequence[float]) -> None:
    axes.set_ylim(0, 1.08 * max(values) or 1.0)


def picture(
    draw: Callable[[Any], None], *, horizontal: str = "step", height: float = HEIGHT, marks: Sequence[int] = ()
) -> bytes:
    """Draw one picture as PNG; `height` in inches.

    A dotted line marks the steps of `marks` if the horizontal axis has steps.
    """
    # The object interface: no global state, no display.
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Labels come from users and are not formulas.
    with mpl.rc_context({"text.parse_math": False, "font.size": 11.5, "legend.fontsize": 10}):
        figure = Figure(figsize=(WIDTH, height), dpi=DPI, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        axes.set_xlabel(horizontal)
        if horizontal == "step":
            whole_numbers(axes.xaxis)
        draw(axes)
        # The picture of bytes has versions on its axis.
        for step in marks if axes.get_xlabel() == "step" else ():
            axes.axvline(step + 0.5, color=MARK, linestyle=":", linewidth=1.2)
        axes.set_axisbelow(True)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def legend(axes: Any) -> None:
    """Put the legend above the data."""
    for line in axes.get_lines():
        # It leaves out labels that begin with an underscore; a line without one is `_child0`.
        if (label := line.get_label()).startswith("_") and not label.startswith("_child"):
            line.set_label(f" {label}")
    axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=2, frameon=False)


TITLES = {
    "length": "Length of the completions",
    "signal": "Truncated completions, groups with equal rewards",
    "parts": "Parts of the reward",
    "sources": "Reward by source",
    "time": "Time of a step by phase",
}
NOTES = {
    "length": "It should stay level. A creep towards the limit means longer answers; if lengths of high and low "
    "rewards drift apart, length influences the reward.",
    "signal": "Both should be low. Truncated completions are rarely correct; groups with equal rewards teach nothing, "
    "because their prompts are too easy or too hard.",
    "parts": "The parts should rise together. If one rises by itself, the policy may be gaming it.",
    "sources": f"Means over {SOURCE_STEPS} steps, with each source's share of the trained groups. A share below its "
    "weight: groups of that source are lost or too old.",
    "time": "Most time should be computing. Much waiting: samplers or the link are too slow. Much examining: the "
    "checks are too slow. Much publishing: versions are too large for the time of a step.",
}
"""Under each picture: what to look for."""
_COLOURS = (STRONG, WEAK, "#4a9b6e", "#9b59b6", "#51606e", "#c0392b", "#16a085", "#8e6f3e")
_Draw = Callable[[Any], None]


def curves(reports: Sequence[StepReport]) -> dict[str, _Draw]:
    """Functions that draw each of TITLES that the learner stated."""
    stated = [(report.step, report.completions) for report in reports if report.completions is not None]
    timed = [(report.step, report.times) for report in reports if report.times is not None]
    drawn: dict[str, _Draw] = {}
    if stated:
        drawn |= {"length": partial(_length, stated), "signal": partial(_signal, stated)}
        if any(numbers.reward_parts for _, numbers in stated):
            drawn["parts"] = partial(_parts, stated)
    if any(report.sources for report in reports):
        drawn["sources"] = partial(_sources, reports)
    if timed:
        drawn["time"] = partial(_time, timed)
    return drawn


def _length(stated: Sequence[tuple[int, CompletionNumbers]], axes: Any) -> None:
    lines = (
        ("length_p95", "95th percentile", WEAK, ":"),
        ("length_mean", "mean", STRONG, "-"),
        ("length_high_reward", "reward above the mean", _COLOURS[2], "--"),
        ("length_low_reward", "reward not above it", _COLOURS[5], "--"),
    )
    for name, label, colour, style in lines:
        known = [(step, value) for step, n in stated if (value := getattr(n, name)) is not None]
        if known:
            axes.plot(*zip(*known, strict=True), color=colour, linestyle=style, label=label)
    axes.set_ylim(0, None)
    axes.set_ylabel("tokens")
    legend(axes)


def _signal(stated: Sequence[tuple[int, CompletionNumbers]], axes: Any) -> None:
    steps = [step for step, _ in stated]
    axes.plot(steps, [n.uniform_fraction for _, n in stated], color=WEAK, label="groups with equal rewards")
    axes.plot(steps, [n.truncated_fraction for _, n in stated], color=STRONG, label="completions cut off")
    axes.set_ylim(0, 1.02)
    axes.set_ylabel("share")
    legend(axes)


def _parts(stated: Sequence[tuple[int, CompletionNumbers]], axes: Any) -> None:
    names = sorted({part.name for _, numbers in stated for part in numbers.reward_parts})[: len(_COLOURS)]
    for name, colour in zip(names, _COLOURS, strict=False):
        known = [(step, part.mean) for step, n in stated for part in n.reward_parts if part.name == name]
        axes.plot(*zip(*known, strict=True), color=colour, label=name[:30])
    axes.set_ylabel("mean")
    legend(axes)


def _sources(reports: Sequence[StepReport], axes: Any) -> None:
    whole = mean_of_sources(reports)
    total = sum(source.num_groups for source in whole)
    largest = sorted(whole, key=lambda source: -source.num_groups)[: len(_COLOURS)]
    for source, colour in zip(sorted(largest, key=lambda source: source.label), _COLOURS, strict=False):
        found = [next((each for each in r.sources if each.label == source.label), None) for r in reports]
        groups = [0, *itertools.accumulate(each.num_groups if each else 0 for each in found)]
        rewards = [0.0, *itertools.accumulate(each.num_groups * each.reward_mean if each else 0.0 for each in found)]
        means = [
            (report.step, (rewards[end] - rewards[start]) / (groups[end] - groups[start]))
            for end, report in enumerate(reports, start=1)
            if groups[end] > groups[start := max(0, end - SOURCE_STEPS)]
        ]
        label = source.label if len(source.label) <= 24 else f"...{source.label[-21:]}"
        axes.plot(*zip(*means, strict=True), color=colour, label=f"{label}, {source.num_groups / total:.0%}")
    axes.set_ylabel("mean reward")
    legend(axes)


def _time(timed: Sequence[tuple[int, StepTimes]], axes: Any) -> None:
    shares = [
        [getattr(times, f"{phase.value}_s") / (times.period_s or 1.0) for _, times in timed] for phase in LearnerPhase
    ]
    axes.stackplot(
        [step for step, _ in timed],
        shares,
        labels=[phase.value for phase in LearnerPhase],
        colors=[WEAK, _COLOURS[3], STRONG, _COLOURS[2], _COLOURS[4]],
    )
    axes.set_ylim(0, 1.02)
    axes.set_ylabel("share of the time")
    legend(axes)


_BARS = "_.-=+*#"
_BLOCKS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"


def newest_evaluated(reports: Sequence[StepReport]) -> StepReport | None:
    """The newest report with a held-out accuracy."""
    return next((report for report in reversed(reports) if report.evaluation_accuracy is not None), None)


def sparkline(values: Sequence[float], *, is_unicode: bool = False) -> str:
    """Finite values as characters, low to high, or as Unicode blocks."""
    bars, values = _BLOCKS if is_unicode else _BARS, _finite(values)
    if not values:
        return ""
    step = max(1, len(values) // 40)
    means = [sum(values[i : i + step]) / len(values[i : i + step]) for i in range(0, len(values), step)]
    low, high = min(means), max(means)
    span = high - low or 1.0
    return "".join(bars[int((mean - low) / span * (len(bars) - 1))] for mean in means)
