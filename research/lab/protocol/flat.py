"""Whether training has come to its end: does the accuracy still rise, or fall, over the last quarter of the steps?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from heterorl_research.lab.statistics.intervals import Interval, interval

EVALUATIONS = 3
"""Evaluations that are averaged at either end of the last quarter."""
TOLERANCE = 0.02
"""A rise or fall over the last quarter that counts as flat, as accuracy."""


def late_rise(curve: Mapping[int, float]) -> float | None:
    """Accuracy at the end minus a quarter of the steps before, each the mean of three evaluations.

    Args:
        curve: accuracy by step.

    Returns:
        None where there are fewer than three evaluations up to either point.
    """
    steps = sorted(curve)
    if not steps:
        return None
    before = [step for step in steps if step <= 0.75 * steps[-1]]
    if len(before) < EVALUATIONS:
        return None
    return _mean(curve, steps[-EVALUATIONS:]) - _mean(curve, before[-EVALUATIONS:])


def rise(curves: Sequence[Mapping[int, float]]) -> Interval | None:
    """Mean late rise over the seeds of an arm, with its 95 % t-interval."""
    return interval([found for curve in curves if (found := late_rise(curve)) is not None])


def is_flat(found: Interval | None) -> bool:
    """Whether both ends of the interval are within the tolerance: what is unknown, or falls, is not flat."""
    return found is not None and found.half is not None and found.low >= -TOLERANCE and found.high <= TOLERANCE


def _mean(curve: Mapping[int, float], steps: Sequence[int]) -> float:
    return sum(curve[step] for step in steps) / len(steps)
