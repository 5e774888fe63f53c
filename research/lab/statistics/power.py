"""What a number of paired seeds can show: the power of the paired t-test, and the difference it finds mostly."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np

from heterorl.common.evaluation.summary import t_quantile

_NODES = 200


def power(difference: float, *, sd: float, num: int, level: float = 0.05) -> float:
    """Chance that a two-sided paired t-test at `level` says "differs" when the true mean difference is `difference`.

    P(|T| > t) of the noncentral t with num - 1 degrees of freedom and noncentrality difference sqrt(num) / sd, as the
    integral over S = s / sd, whose square times df is chi-squared, of Phi(nc - t S) + Phi(-nc - t S).

    Args:
        difference: true mean of the paired differences.
        sd: their standard deviation over seeds, positive.
        num: pairs, at least 2.
        level: of the test.
    """
    df, shift = num - 1, abs(difference) * math.sqrt(num) / sd
    critical = t_quantile(1.0 - level, df=df)
    spread = 12.0 / math.sqrt(2.0 * df)
    low, high = max(0.0, 1.0 - spread), 1.0 + spread
    nodes, weights = _legendre()
    s = low + (high - low) * (nodes + 1.0) / 2.0
    log_density = (
        math.log(2.0) + df / 2.0 * math.log(df / 2.0) - math.lgamma(df / 2.0) + (df - 1) * np.log(s) - df / 2.0 * s * s
    )
    beyond = [_normal(shift - critical * one) + _normal(-shift - critical * one) for one in s]
    return float(min(1.0, (high - low) / 2.0 * np.sum(weights * np.exp(log_density) * np.asarray(beyond))))


def detectable_difference(*, sd: float, num: int, target: float = 0.8, level: float = 0.05) -> float | None:
    """The smallest true mean difference that `num` pairs of standard deviation `sd` show with power `target`.

    Returns:
        None for fewer than two pairs; 0 without spread.
    """
    if num < 2:
        return None
    if sd == 0.0:
        return 0.0
    high = sd
    while power(high, sd=sd, num=num, level=level) < target:
        high *= 2.0
    return _bisect(lambda value: power(value, sd=sd, num=num, level=level) >= target, 0.0, high)


def _bisect(is_enough: Callable[[float], bool], low: float, high: float) -> float:
    for _ in range(40):
        middle = (low + high) / 2.0
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


@lru_cache(maxsize=1)
def _legendre() -> tuple[np.ndarray, np.ndarray]:
    """Nodes and weights, which take longer than the integral."""
    return np.polynomial.legendre.leggauss(_NODES)


def _normal(z: float) -> float:
    return 0.5 * math.erfc(-z / math.sqrt(2.0))
