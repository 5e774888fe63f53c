"""Student's t-intervals and Wilson's interval of a share, without a statistics package.

Pure functions of finite numbers. A single value has no interval.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

LARGE_DF = 1000
"""Degrees of freedom from which Student's t is expanded about the normal distribution."""


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
    """Mean and t-interval: mean +- t_{(1+confidence)/2, n-1} s / sqrt(n), s with n - 1; None for no values."""
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


def standard_error(values: Sequence[float]) -> float:
    """s / sqrt(n) with s^2 = sum (x - mean)^2 / (n - 1); at least two values."""
    center = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - center) ** 2 for value in values) / (len(values) - 1) / len(values))


def t_central(t: float, *, df: int) -> float:
    """P(|T| <= t) of Student's t with `df` >= 1 (Abramowitz and Stegun, 26.7.3 and 26.7.4); df/2 terms."""
    theta = math.atan(t / math.sqrt(df))
    sine, square = math.sin(theta), math.cos(theta) ** 2
    term = total = math.cos(theta) if df % 2 else 1.0
    for k in range(3 if df % 2 else 2, df - 1, 2):
        term *= (k - 1) / k * square
        total += term
    if df % 2 == 0:
        return min(1.0, sine * total)
    return min(1.0, 2 / math.pi * (theta + (sine * total if df > 1 else 0.0)))


@lru_cache(maxsize=4096)
def t_quantile(confidence: float, *, df: int) -> float:
    """The t with P(|T| <= t) = confidence, by bisection to the last bit.

    Beyond `LARGE_DF` by the expansion about the normal quantile (Abramowitz and Stegun, 26.7.5), whose next term is
    below 1e-14 there.
    """
    if df > LARGE_DF:
        z = NormalDist().inv_cdf((1.0 + confidence) / 2.0)
        terms = (
            (z**3 + z) / 4.0,
            (5 * z**5 + 16 * z**3 + 3 * z) / 96.0,
            (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384.0,
            (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160.0,
        )
        return z + sum(term / math.pow(df, power) for power, term in enumerate(terms, start=1))
    low, high = 0.0, 1.0
    while t_central(high, df=df) < confidence:
        high *= 2
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if t_central(middle, df=df) < confidence else (low, middle)
    return high


def wilson(num: int, of: int, *, confidence: float = 0.95) -> tuple[float, float]:
    """Interval of the share num / of (Wilson, 1927), which holds near 0 and 1: all p with |num/of - p| <= z sd(p)."""
    z = NormalDist().inv_cdf((1.0 + confidence) / 2.0)
    share, weight = num / of, z * z / of
    center = (share + weight / 2.0) / (1.0 + weight)
    half = z * math.sqrt(share * (1.0 - share) / of + weight / (4.0 * of)) / (1.0 + weight)
    return max(0.0, center - half), min(1.0, center + half)
