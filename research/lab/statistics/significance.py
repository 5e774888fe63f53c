"""Tests of paired differences: Student's t, sign flips, Wilcoxon, equivalence; of shares; and Holm's correction.

Pure arithmetic on lists of finite numbers. Fewer than two pairs are no test: the answer is None.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from heterorl.common.evaluation.summary import standard_error, t_central

_EXACT_SIGNS = 16
_RANDOM_FLIPS = 65_536


def t_test(differences: Sequence[float]) -> float | None:
    """Two-sided p of the paired t-test that the mean difference is 0."""
    if len(differences) < 2:
        return None
    return 1.0 - t_central(abs(_t(differences, 0.0)), df=len(differences) - 1)


def equivalence_test(differences: Sequence[float], *, margin: float) -> float | None:
    """p of the hypothesis that the mean difference is at least `margin` from 0: the larger of two one-sided t-tests.

    Small p: the means are equal but for the margin (Schuirmann, 1987).
    """
    if len(differences) < 2:
        return None
    df = len(differences) - 1
    return max(_upper_tail(_t(differences, -margin), df=df), _upper_tail(-_t(differences, margin), df=df))


def sign_flip_test(differences: Sequence[float]) -> float | None:
    """Two-sided p that the differences are symmetric about 0: the share of sign patterns with as large a sum.

    Exact up to 16 pairs: no p of n pairs is below 2 / 2^n, so five seeds cannot get under 0.0625. Beyond, 65 536
    random patterns of a fixed seed and the observed one, which keeps the test valid.
    """
    if len(differences) < 2:
        return None
    signs = _signs(len(differences))
    sums = np.abs(signs @ np.asarray(differences, dtype=np.float64))
    observed = abs(math.fsum(differences))
    num = int(np.sum(sums >= observed - 1e-12 * max(1.0, observed)))
    is_exact = len(differences) <= _EXACT_SIGNS
    return num / sums.size if is_exact else (num + 1) / (sums.size + 1)


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


def binomial_test(num: int, of: int, *, share: float) -> float:
    """Two-sided exact p that a property of the share `share` is had by `num` of `of`: twice the smaller tail.

    Args:
        num: how many have the property.
        of: how many there are.
        share: of the hypothesis, above 0 and below 1.
    """
    chances = [math.comb(of, count) * share**count * (1.0 - share) ** (of - count) for count in range(of + 1)]
    return min(1.0, 2.0 * min(math.fsum(chances[: num + 1]), math.fsum(chances[num:])))


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Adjust p values of one family so that the chance of any false "differs" stays below the level (Holm, 1979)."""
    known = sorted((p, index) for index, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for place, (p, index) in enumerate(known):
        largest = max(largest, min(1.0, p * (len(known) - place)))
        adjusted[index] = largest
    return adjusted


def _t(differences: Sequence[float], null: float) -> float:
    error = standard_error(differences)
    center = math.fsum(differences) / len(differences) - null
    # Equal differences have no spread to judge by: p is 0 if they differ from the null at all, else 1.
    if error > 1e-15 * max(1.0, abs(center)):
        return center / error
    return math.copysign(math.inf, center) if center else 0.0


def _upper_tail(t: float, *, df: int) -> float:
    beyond = (1.0 - t_central(abs(t), df=df)) / 2.0
    return beyond if t >= 0.0 else 1.0 - beyond


def _signs(num: int) -> npt.NDArray[np.float64]:
    if num <= _EXACT_SIGNS:
        patterns = (np.arange(2**num)[:, None] >> np.arange(num)) & 1
    else:
        patterns = np.random.default_rng(0).integers(0, 2, size=(_RANDOM_FLIPS, num))
    return np.asarray(patterns * 2 - 1, dtype=np.float64)
