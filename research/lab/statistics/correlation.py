"""Correlations of two lists: Pearson's, and Spearman's of the ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


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
