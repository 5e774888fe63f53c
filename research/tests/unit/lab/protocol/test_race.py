"""Rates race over the tuning seeds: the worse half is not tried again, and a run that failed is no verdict on a rate."""

import pytest

from heterorl_research.lab.cell import list_cells
from heterorl_research.lab.config import ExperimentConfig
from heterorl_research.lab.protocol.race import standing

RATES = (1e-4, 2e-4, 4e-4, 8e-4, 1.6e-3, 3.2e-3)
SEEDS = (7, 8, 9)


def cells_of(rates=RATES):
    variants = tuple({"name": f"lr={rate:g}", "set": {"lr": rate}} for rate in rates)
    return list_cells(ExperimentConfig(variants=variants, seeds=SEEDS))


def race(cells, last):
    """Run what is asked for until nothing is; returns the standing and what each round ran."""
    rows, rounds = {}, []
    found = standing(cells, rows)
    while found.missing:
        rounds.append([(cell.seed, cell.regime.lr) for cell in found.missing])
        rows |= {cell.run_id: {"failed": None, "last": last(cell)} for cell in found.missing}
        found = standing(cells, rows)
    return found, rounds


def test_the_worse_half_is_dropped_after_each_seed():
    # 4e-4 is the best; the farther in the grid, the worse.
    found, rounds = race(cells_of(), lambda cell: 0.6 - 0.1 * abs(RATES.index(cell.regime.lr) - 2))

    assert rounds == [
        [(7, rate) for rate in RATES],
        [(8, rate) for rate in (4e-4, 2e-4, 8e-4)],
        [(9, rate) for rate in (4e-4, 2e-4)],
    ]
    assert found.lr == 4e-4
    assert {rate: score.seeds for rate, score in found.scores.items()} == dict(
        zip(RATES, (1, 3, 3, 2, 1, 1), strict=True)
    )


def test_the_mean_over_seeds_decides_and_the_smaller_of_two_equals():
    lucky, _ = race(
        cells_of(RATES[:2]), lambda cell: 0.9 if (cell.seed, cell.regime.lr) == (7, 2e-4) else 0.5 - cell.regime.lr
    )
    tied, _ = race(cells_of(), lambda _: 0.4)

    assert lucky.lr == 2e-4
    assert lucky.scores[2e-4].last == pytest.approx((0.9 + 0.4998 + 0.4998) / 3)
    assert tied.lr == 1e-4


def test_a_run_that_diverged_counts_0_and_one_that_failed_is_run_again_or_shown():
    cells = cells_of(RATES[:2])
    rows = {cell.run_id: {"failed": None, "last": 0.0 if cell.regime.lr == 1e-4 else 0.3} for cell in cells}
    assert standing(cells, rows).lr == 2e-4

    broken = cells[0].run_id
    rows[broken] = {"failed": "out of memory", "last": None}
    again, shown = standing(cells, rows, tried=()), standing(cells, rows)

    assert ([cell.run_id for cell in again.missing], again.failed, again.lr) == ([broken], (), None)
    assert (shown.missing, [cell.run_id for cell in shown.failed], shown.lr) == ((), [broken], None)
