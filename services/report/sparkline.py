"""Numbers of a run on a screen of text: the newest accuracy, and values as a line of characters."""

from __future__ import annotations

from collections.abc import Sequence

from heterorl.common.types.common import StepReport

_BARS = "_.-=+*#"
_BLOCKS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"


def newest_accuracy(reports: Sequence[StepReport]) -> float | None:
    """The newest held-out accuracy."""
    return next((r.evaluation_accuracy for r in reversed(reports) if r.evaluation_accuracy is not None), None)


def sparkline(values: Sequence[float], *, width: int = 40, is_unicode: bool = False) -> str:
    """Values as a line of characters, low to high; as blocks where the screen knows them."""
    bars = _BLOCKS if is_unicode else _BARS
    if not values:
        return ""
    step = max(1, len(values) // width)
    means = [sum(values[i : i + step]) / len(values[i : i + step]) for i in range(0, len(values), step)]
    low, high = min(means), max(means)
    span = high - low or 1.0
    return "".join(bars[int((mean - low) / span * (len(bars) - 1))] for mean in means)
