"""Best and last of a set over the versions of a run, and the gap between them. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from heterorl.common.types.evaluation import Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """The best version and the last one; `gap` is how far the last one fell below the best, never negative.

    The three numbers in which arXiv 2508.17850 compares algorithms under delay: one that collapses has a good best and
    a large gap.
    """

    best_version: int
    best: float
    last_version: int
    last: float

    @property
    def gap(self) -> float:
        """Best minus last."""
        return self.best - self.last


def standing(averages: Iterable[tuple[int, Estimate | None]]) -> Standing | None:
    """Best and last of (version, avg@n); None where nothing is known. Of equal ones the first version is the best."""
    known = sorted((version, found.mean) for version, found in averages if found is not None)
    if not known:
        return None
    best_version, best = max(known, key=lambda entry: (entry[1], -entry[0]))
    last_version, last = known[-1]
    return Standing(best_version=best_version, best=best, last_version=last_version, last=last)
