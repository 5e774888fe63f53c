"""Student's t-intervals of a mean."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from heterorl.common.evaluation.summary import standard_error, t_quantile


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Mean of `num` values, half width of its t-interval, and standard deviation.

    A single value has no `half`, and `sd` 0.
    """

    mean: float
    half: float | None
    lowest: float
    highest: float
    num: int
    sd: float = 0.0

    @property
    def low(self) -> float:
        return self.mean - (self.half or 0.0)

    @property
    def high(self) -> float:
        return self.mean + (self.half or 0.0)


def interval(values: Sequence[float], *, confidence: float = 0.95) -> Interval | None:
    """Mean +- t_{(1+confidence)/2, n-1} s / sqrt(n), s with n - 1; None without values."""
    if not values:
        return None
    num = len(values)
    center = math.fsum(values) / num
    if num == 1:
        return Interval(mean=center, half=None, lowest=center, highest=center, num=1)
    error = standard_error(values)
    return Interval(
        mean=center,
        half=t_quantile(confidence, df=num - 1) * error,
        lowest=min(values),
        highest=max(values),
        num=num,
        sd=error * math.sqrt(num),
    )
