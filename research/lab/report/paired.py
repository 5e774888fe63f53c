"""Every algorithm against `gepo` on the same seeds.

Guarantees that a comparison only joins runs of the same task, delay, variant and seed. Never calls an absence of
evidence a proof of equality: the verdict is "no difference shown".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from heterorl_research.lab.report.data import Arm, Delay, Results, Run, by_cell, mean
from heterorl_research.lab.statistics.intervals import Interval, interval
from heterorl_research.lab.statistics.power import detectable_difference
from heterorl_research.lab.statistics.significance import holm, sign_flip_test, t_test, wilcoxon_test

BASELINE = "gepo"
MEASURES = {"last": "last accuracy", "last_three": "mean of the last three evaluations"}
DIFFERS = "differs"
DIFFERS_ALONE = "differs alone, not after correction"
NOT_SHOWN = "no difference shown"
TOO_FEW = "one pair: no test"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One arm minus the baseline; `difference` is over pairs of equal seeds, `adjusted_p` after Holm."""

    task: str
    delay: Delay
    measure: str
    arm: Arm
    difference: Interval
    t_p: float | None
    sign_flip_p: float | None
    wilcoxon_p: float | None
    detectable: float | None
    """True difference that so many pairs of this spread show in 80 of 100 cases, without correction."""
    adjusted_p: float | None = None

    @property
    def verdict(self) -> str:
        """Reading of the paired t-test at 5 %."""
        if self.t_p is None or self.adjusted_p is None:
            return TOO_FEW
        if self.adjusted_p < 0.05:
            return DIFFERS
        return DIFFERS_ALONE if self.t_p < 0.05 else NOT_SHOWN


def comparisons(results: Results) -> list[Comparison]:
    """All comparisons, by task, delay and measure, the largest gain over the baseline first.

    p values are corrected within one task, delay and measure: that is the question a reader asks of one table.
    """
    cells = by_cell(results.finished)
    found: list[Comparison] = []
    for task in results.tasks:
        for delay in results.delays:
            for measure in MEASURES:
                found += _family(cells, task, delay, measure, results.arms)
    return found


def _family(
    cells: dict[tuple[str, Delay, Arm], list[Run]], task: str, delay: Delay, measure: str, arms: Sequence[Arm]
) -> list[Comparison]:
    family: list[Comparison] = []
    for arm in arms:
        baseline = _by_seed(cells.get((task, delay, Arm(BASELINE, arm.variant)), []), measure)
        other = _by_seed(cells.get((task, delay, arm), []), measure)
        differences = [other[seed] - baseline[seed] for seed in sorted(baseline.keys() & other.keys())]
        difference = interval(differences)
        if arm.algorithm == BASELINE or difference is None:
            continue
        family.append(
            Comparison(
                task=task,
                delay=delay,
                measure=measure,
                arm=arm,
                difference=difference,
                t_p=t_test(differences),
                sign_flip_p=sign_flip_test(differences),
                wilcoxon_p=wilcoxon_test(differences),
                detectable=detectable_difference(sd=difference.sd, num=difference.num),
            )
        )
    adjusted = holm([comparison.t_p for comparison in family])
    family = [replace(comparison, adjusted_p=p) for comparison, p in zip(family, adjusted, strict=True)]
    return sorted(family, key=lambda comparison: (-comparison.difference.mean, comparison.arm))


def _by_seed(runs: Sequence[Run], measure: str) -> dict[int, float]:
    values: dict[int, list[float | None]] = {}
    for run in runs:
        values.setdefault(run.seed, []).append(run.number(measure))
    return {seed: value for seed, found in values.items() if (value := mean(found)) is not None}
