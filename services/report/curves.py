"""The pictures of completions, rewards and time: drawn where a learner stated them, left out where none did."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from heterorl.common.types.common import CompletionNumbers, LearnerPhase, StepReport, StepTimes
from heterorl.report.figures import STRONG, WEAK

TITLES = {
    "length": "Length of the completions",
    "signal": "Truncated completions, groups with equal rewards",
    "parts": "Parts of the reward",
    "time": "Where the time of a step went",
}
NOTES = {
    "length": "Look for a level line. A creep towards the limit is a policy that talks; lengths of high and low "
    "rewards that drift apart say whether talking pays.",
    "signal": "Both low is good. Completions that are cut off rarely count as right; groups with equal rewards teach "
    "nothing: prompts are too easy or too hard.",
    "parts": "Look for parts that rise together. One that rises alone is easier than the task: it is being gamed.",
    "time": "Computing is what one pays for. Waiting: samplers or the link are too slow. Examining: the checks are. "
    "Publishing: versions are too large for the time of a step.",
}
"""Under each picture: what to look for."""
_COLOURS = (STRONG, WEAK, "#4a9b6e", "#9b59b6", "#51606e", "#c0392b", "#16a085", "#8e6f3e")
_Draw = Callable[[Any], None]


def curves(reports: Sequence[StepReport]) -> dict[str, _Draw]:
    """What draws each picture of TITLES on given axes, of applied steps in order; none that nobody stated."""
    stated = [(report.step, report.completions) for report in reports if report.completions is not None]
    timed = [(report.step, report.times) for report in reports if report.times is not None]
    drawn: dict[str, _Draw] = {}
    if stated:
        drawn |= {"length": _length(stated), "signal": _signal(stated)}
        if any(numbers.reward_parts for _, numbers in stated):
            drawn["parts"] = _parts(stated)
    if timed:
        drawn["time"] = _time(timed)
    return drawn


def _length(stated: Sequence[tuple[int, CompletionNumbers]]) -> _Draw:
    lines = (
        ("length_p95", "95th percentile", WEAK, ":"),
        ("length_mean", "mean", STRONG, "-"),
        ("length_high_reward", "reward above the mean", _COLOURS[2], "--"),
        ("length_low_reward", "reward not above it", _COLOURS[5], "--"),
    )

    def draw(axes: Any) -> None:
        for name, label, colour, style in lines:
            known = [(step, value) for step, n in stated if (value := getattr(n, name)) is not None]
            if known:
                axes.plot(*zip(*known, strict=True), color=colour, linestyle=style, label=label)
        axes.set_ylim(0, None)
        axes.set_ylabel("tokens")
        axes.legend(loc="best")

    return draw


def _signal(stated: Sequence[tuple[int, CompletionNumbers]]) -> _Draw:
    def draw(axes: Any) -> None:
        steps = [step for step, _ in stated]
        axes.plot(steps, [n.uniform_fraction for _, n in stated], color=WEAK, label="groups with equal rewards")
        axes.plot(steps, [n.truncated_fraction for _, n in stated], color=STRONG, label="completions cut off")
        axes.set_ylim(0, 1.02)
        axes.set_ylabel("share")
        axes.legend(loc="best")

    return draw


def _parts(stated: Sequence[tuple[int, CompletionNumbers]]) -> _Draw:
    names = sorted({part.name for _, numbers in stated for part in numbers.reward_parts})[: len(_COLOURS)]

    def draw(axes: Any) -> None:
        for name, colour in zip(names, _COLOURS, strict=False):
            known = [(step, part.mean) for step, n in stated for part in n.reward_parts if part.name == name]
            axes.plot(*zip(*known, strict=True), color=colour, label=name[:30])
        axes.set_ylabel("mean")
        axes.legend(loc="best")

    return draw


def _time(timed: Sequence[tuple[int, StepTimes]]) -> _Draw:
    def draw(axes: Any) -> None:
        shares = [
            [getattr(times, f"{phase.value}_s") / (times.period_s or 1.0) for _, times in timed]
            for phase in LearnerPhase
        ]
        axes.stackplot(
            [step for step, _ in timed],
            shares,
            labels=[phase.value for phase in LearnerPhase],
            colors=[WEAK, _COLOURS[3], STRONG, _COLOURS[2], _COLOURS[4]],
        )
        axes.set_ylim(0, 1.02)
        axes.set_ylabel("share of the time")
        axes.legend(loc="lower left")

    return draw
