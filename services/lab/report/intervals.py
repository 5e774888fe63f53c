"""Intervals and tests for a few seeds: Student's t, sign flips and Wilcoxon, without a statistics package.

Pure arithmetic on lists of finite numbers. A single value has no interval, and none is invented for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_EXACT_SIGNS = 16
_RANDOM_FLIPS = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Mean of `num` values and the half width of its 95 % t-interval.

    Example: Interval(mean=0.5, half=0.1, lowest=0.4, highest=0.6, num=5); `half` is None for a single value.
    """

    mean: float
    half: float | None
    lowest: float
    highest: float
    num: int

    @property
    def low(self) -> float:
        """Lower end; the mean itself where there is no interval."""
        return self.mean - (self.half or 0.0)

    @property
    def high(self) -> float:
        """Upper end; the mean itself where there is no interval."""
        return self.mean + (self.half or 0.0)


def interval(values: Sequence[float], *, confidence: float = 0.95) -> Interval | None:
    """Mean and t-interval: mean +- t_{(1+confidence)/2, n-1} s / sqrt(n), s with n - 1.

    Returns:
        None for no values; `half` None for one.
    """
    if not values:
        return None
    num = len(values)
    center = math.fsum(values) / num
    half = None
    if num > 1:
        half = t_quantile(confidence, df=num - 1) * _standard_error(values)
    return Interval(mean=center, half=half, lowest=min(values), highest=max(values), num=num)


def t_central(t: float, *, df: int) -> float:
    """P(|T| <= t) of Student's t with `df` degrees of freedom (Abramowitz and Stegun, 26.7.3 and 26.7.4).

    Args:
        t: at least 0; infinity is allowed.
        df: at least 1; the sum has df/2 terms.
    """
    theta = math.atan(t / math.sqrt(df))
    sine, square = math.sin(theta), math.cos(theta) ** 2
    term = total = math.cos(theta) if df % 2 else 1.0
    for k in range(3 if df % 2 else 2, df - 1, 2):
        term *= (k - 1) / k * square
        total += term
    if df % 2 == 0:
        return min(1.0, sine * total)
    return min(1.0, 2 / math.pi * (theta + (sine * total if df > 1 else 0.0)))


def t_quantile(confidence: float, *, df: int) -> float:
    """The t with P(|T| <= t) = confidence, by bisection to the last bit."""
    low, high = 0.0, 1.0
    while t_central(high, df=df) < confidence:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if t_central(middle, df=df) < confidence else (low, middle)
    return high


def t_test(differences: Sequence[float]) -> float | None:
    """Two-sided p of the paired t-test that the mean difference is 0; None below two pairs."""
    if len(differences) < 2:
        return None
    error = _standard_error(differences)
    center = abs(math.fsum(differences) / len(differences))
    # Equal differences have no spread to judge by: 0 if they differ from zero at all, else 1.
    t = center / error if error > 1e-15 * max(1.0, center) else math.inf if center else 0.0
    return 1.0 - t_central(t, df=len(differences) - 1)


def sign_flip_test(differences: Sequence[float]) -> float | None:
    """Two-sided p that the differences are symmetric about 0: the share of sign patterns with as large a sum.

    Exact up to 16 pairs, 65 536 random patterns of a fixed seed beyond; None below two pairs. With n pairs no p
    is below 2 / 2^n: five seeds cannot get under 0.0625.
    """
    if len(differences) < 2:
        return None
    signs = _signs(len(differences))
    sums = np.abs(signs @ np.asarray(differences, dtype=np.float64))
    observed = abs(math.fsum(differences))
    return float(np.mean(sums >= observed - 1e-12 * max(1.0, observed)))


def wilcoxon_test(differences: Sequence[float]) -> float | None:
    """Two-sided exact p of Wilcoxon's signed-rank test: zeros left out, ties share the mean rank."""
    kept = np.asarray([value for value in differences if value != 0.0], dtype=np.float64)
    if len(differences) < 2:
        return None
    if not kept.size:
        return 1.0
    # Rounding keeps differences that are equal on paper equal as ranks.
    sizes = np.round(np.abs(kept), 12)
    ranks = np.asarray([(np.sum(sizes < size) + np.sum(sizes <= size) + 1) / 2 for size in sizes])
    signed = [float(value) for value in ranks * np.sign(kept)]
    return sign_flip_test(signed) if len(signed) > 1 else 1.0


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Adjust p values of one family so that the chance of any false "differs" stays below the level (Holm, 1979)."""
    known = sorted((p, index) for index, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for place, (p, index) in enumerate(known):
        largest = max(largest, min(1.0, p * (len(known) - place)))
        adjusted[index] = largest
    return adjusted


def pearson(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Correlation of two lists of equal length; None below three points or without spread."""
    if len(x) < 3 or len(set(x)) < 2 or len(set(y)) < 2:
        return None
    return float(np.corrcoef(np.asarray(x), np.asarray(y))[0, 1])


def spearman(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Correlation of the ranks; ties share the mean rank."""
    return pearson(_ranks(x), _ranks(y))


def _ranks(values: Sequence[float]) -> list[float]:
    array = np.asarray(values, dtype=np.float64)
    return [float((np.sum(array < value) + np.sum(array <= value) + 1) / 2) for value in array]


def _standard_error(values: Sequence[float]) -> float:
    center = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - center) ** 2 for value in values) / (len(values) - 1) / len(values))


def _signs(num: int) -> npt.NDArray[np.float64]:
    if num <= _EXACT_SIGNS:
        patterns = (np.arange(2**num)[:, None] >> np.arange(num)) & 1
    else:
        patterns = np.random.default_rng(0).integers(0, 2, size=(_RANDOM_FLIPS, num))
    return np.asarray(patterns * 2 - 1, dtype=np.float64)
