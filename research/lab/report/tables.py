"""The tables of the report: best, last and gap; comparisons; runs. As rows and as CSV."""

from __future__ import annotations

import csv
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from heterorl.common.evaluation.summary import wilson
from heterorl_research.lab.protocol.flat import is_flat, rise
from heterorl_research.lab.report.data import Arm, Delay, Results, Run, by_cell, numbers
from heterorl_research.lab.report.paired import Comparison
from heterorl_research.lab.statistics.intervals import Interval, interval

_NOT_IN_CSV = {"series", "evaluations"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One arm at one delay of one task; intervals are None where no run was measured."""

    task: str
    delay: Delay
    arm: Arm
    warm_start: Interval | None
    best: Interval | None
    best_per_benchmark: Interval | None
    last: Interval | None
    gap: Interval | None
    num_finished: int
    num_failed: int
    num_collapsed: int
    late_rise: Interval | None
    lr: str = "-"
    is_at_edge: bool = False
    """Whether the grid that the learning rate was chosen from ends at it."""

    @property
    def collapse_share(self) -> str:
        """Share of the seeds that collapsed with Wilson's 95 % interval; what failed is in no share, so it is said."""
        failed = f", {self.num_failed} failed" if self.num_failed else ""
        if not self.num_finished:
            return f"-{failed}"
        low, high = wilson(self.num_collapsed, self.num_finished)
        return f"{self.num_collapsed}/{self.num_finished} ({low:.2f} to {high:.2f}){failed}"

    @property
    def is_unfinished(self) -> bool:
        """Whether an arm without delay is not shown to be flat: then the order of the arms may still turn."""
        return self.delay.kind == "none" and self.late_rise is not None and not is_flat(self.late_rise)

    @property
    def flatness(self) -> str:
        """Rise of the accuracy over the last quarter of the steps, and whether that counts as the end of training."""
        if self.late_rise is None:
            return "-"
        return f"{plus_minus(self.late_rise, signed=True)}{', flat' if is_flat(self.late_rise) else ''}"


def rows(results: Results) -> list[Row]:
    """A row for each cell that has a run, by task and delay, the best last accuracy first."""
    edges = set(results.tuning.at_edge) if results.tuning is not None else set()
    found = [_row(task, delay, arm, runs, edges) for (task, delay, arm), runs in by_cell(results.runs).items()]
    return sorted(
        found, key=lambda row: (row.task, row.delay.rank, -row.last.mean if row.last else float("inf"), row.arm)
    )


def _row(task: str, delay: Delay, arm: Arm, runs: Sequence[Run], edges: Collection[str]) -> Row:
    finished = [run for run in runs if not run.failed]
    return Row(
        task=task,
        delay=delay,
        arm=arm,
        warm_start=interval(numbers(finished, "warm_start_accuracy")),
        best=interval(numbers(finished, "best")),
        best_per_benchmark=interval(numbers(finished, "best_per_benchmark")),
        last=interval(numbers(finished, "last")),
        gap=interval(numbers(finished, "gap")),
        num_finished=len(finished),
        num_failed=len(runs) - len(finished),
        num_collapsed=sum(run.has_collapsed for run in finished),
        late_rise=rise([run.curve for run in finished]),
        lr=", ".join(f"{rate:g}" for rate in sorted({run.lr for run in runs if run.lr is not None})) or "-",
        is_at_edge=any(run.arm_id in edges for run in runs),
    )


def plus_minus(found: Interval | None, *, digits: int = 3, signed: bool = False) -> str:
    """`mean +- half`; a single value says that it is one seed."""
    if found is None:
        return "-"
    text = f"{found.mean:+.{digits}f}" if signed else f"{found.mean:.{digits}f}"
    return f"{text} (1 seed)" if found.half is None else f"{text} \u00b1 {found.half:.{digits}f}"


def p_text(p: float | None) -> str:
    """A p value in four digits."""
    return "-" if p is None else "< 0.0001" if p < 0.0001 else f"{p:.4f}"


def write_runs(results: Results, path: Path) -> None:
    """Write every run, one a line, with whether it collapsed and its mean of the last three evaluations."""
    names = [name for name in Run.model_fields if name not in _NOT_IN_CSV]
    lines = [[*(getattr(run, name) for name in names), run.last_three, run.has_collapsed] for run in results.runs]
    _write(path, [*names, "last_three", "collapsed"], lines)


def write_comparisons(found: Iterable[Comparison], path: Path) -> None:
    """Write every comparison with the baseline, one a line."""
    header = [
        "task", "delay", "measure", "algorithm", "variant", "pairs", "mean_difference", "half_interval",
        "lowest_difference", "highest_difference", "t_p", "holm_p", "sign_flip_p", "wilcoxon_p",
        "detectable", "verdict",
    ]  # fmt: skip
    lines = [
        [
            c.task, c.delay.label, c.measure, c.arm.algorithm, c.arm.variant, c.difference.num, c.difference.mean,
            c.difference.half, c.difference.lowest, c.difference.highest, c.t_p, c.adjusted_p, c.sign_flip_p,
            c.wilcoxon_p, c.detectable, c.verdict,
        ]
        for c in found
    ]  # fmt: skip
    _write(path, header, lines)


def _write(path: Path, header: Sequence[str], lines: Iterable[Sequence[object]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        writer.writerows([_csv_cell(value) for value in line] for line in lines)


def _csv_cell(value: object) -> object:
    # A spreadsheet would run text that starts like a formula.
    if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")):
        return "'" + value
    return value
