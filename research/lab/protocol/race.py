"""Which trials of an arm are run next, and which learning rate wins: successive halving over the tuning seeds. Pure.

Every rate of the grid is tried on the first seed. Of n rates the better max(2, n / 2) by the mean last accuracy over
the seeds so far are tried on the next seed, and so on; the best after the last seed wins, the smaller of two equals.
Six rates and three seeds are 6 + 3 + 2 = 11 trials of 18, and no rate wins by one seed alone.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from heterorl_research.lab.cell import Cell

_LEAST_KEPT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Mean last accuracy of a rate over the seeds that it was tried on."""

    last: float
    seeds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """How far the trials of an arm are: what to run, what failed, and the rate once both are none."""

    missing: tuple[Cell, ...] = ()
    failed: tuple[Cell, ...] = ()
    lr: float | None = None
    scores: Mapping[float, Score]


def standing(
    members: Sequence[Cell], rows: Mapping[str, Mapping[str, Any]], *, tried: Collection[str] | None = None
) -> Standing:
    """The standing of an arm.

    A run that diverged has a last accuracy of 0, which is the rate's fault. A run that failed has none, which is not:
    it is run again, and what fails again leaves the arm without a rate.

    Args:
        members: all trials of the arm, each rate with each seed.
        rows: of trials that ended by any end, by run id.
        tried: run ids that are not to be run again where they failed; None is all.
    """
    cells = {(cell.seed, cell.regime.lr): cell for cell in members}
    seeds = list(dict.fromkeys(cell.seed for cell in members))
    kept = sorted({cell.regime.lr for cell in members})
    last: dict[float, list[float]] = {rate: [] for rate in kept}
    for number, seed in enumerate(seeds):
        asked = [cells[seed, rate] for rate in kept]
        lost = [cell for cell in asked if not _is_scored(rows.get(cell.run_id))]
        again = [cell for cell in lost if cell.run_id not in rows or not (tried is None or cell.run_id in tried)]
        if lost:
            failed = () if again else tuple(lost)
            return Standing(missing=tuple(again), failed=failed, scores=_scores(last))
        for cell in asked:
            last[cell.regime.lr].append(float(rows[cell.run_id]["last"]))
        means = {rate: sum(last[rate]) / len(last[rate]) for rate in kept}
        kept = sorted(kept, key=lambda rate: (-means[rate], rate))
        if number < len(seeds) - 1:
            kept = kept[: max(_LEAST_KEPT, math.ceil(len(kept) / 2))]
    return Standing(lr=kept[0], scores=_scores(last))


def _is_scored(row: Mapping[str, Any] | None) -> bool:
    return row is not None and not row["failed"] and row["last"] is not None


def _scores(last: Mapping[float, Sequence[float]]) -> dict[float, Score]:
    return {
        rate: Score(last=sum(values) / len(values), seeds=len(values))
        for rate, values in sorted(last.items())
        if values
    }
