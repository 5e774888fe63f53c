"""What the report shows: the runs of one experiment, what is compared, and where.

Guarantees that every number is finite or None. Never guesses a missing number.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, field_validator

_KINDS = ("none", "fixed", "uniform", "lognormal", "weibull", "exponential", "sawtooth", "uniform_lag")
COLLAPSE_MARGIN = 0.05
"""A fall of the accuracy that is more than chance on 256 prompts; a smaller one is no collapse."""
SMOOTHED = 3
"""Evaluations in a mean of `smooth_gap`."""


Number = float | None


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class Evaluation(_Record):
    """Accuracy on held-out prompts after `step` optimizer steps; `benchmarks` by name."""

    step: int
    accuracy: Number
    benchmarks: dict[str, Number] = {}


class Run(_Record):
    """One training run: what was set, what came out. None means that it was not measured."""

    run_id: str
    algorithm: str
    delay: float
    delay_kind: str
    delay_unit: str
    seed: int
    task: str = ""
    variant: str = ""
    lr: Number = None
    weights: str = ""
    """`rollout` or `token`: what the algorithm has one weight for; empty in older results."""
    warm_start_accuracy: Number = None
    best: Number = None
    last: Number = None
    last_greedy: Number = None
    gap: Number = None
    best_per_benchmark: Number = None
    kl_mean: Number = None
    iw_var_mean: Number = None
    ess_mean: Number = None
    clip_fraction_mean: Number = None
    grad_norm_p95: Number = None
    advantage_error_mean: Number = None
    bias_gepo_mean: Number = None
    bias_gspo_mean: Number = None
    staleness_mean: Number = None
    staleness_max: Number = None
    steps: int | None = None
    groups: int | None = None
    ledger_balanced: bool | None = None
    wall_s: Number = None
    failed: str | None = None
    diverged_at: int | None = None
    """First step that was not finite; such a run ended with an accuracy of 0."""
    series: dict[str, list[Number]] = {}
    evaluations: list[Evaluation] = []

    @field_validator("evaluations", mode="before")
    @classmethod
    def _from_columns(cls, found: Any) -> Any:
        """Two lists of equal length, as results.json has them, as a list of evaluations."""
        if not isinstance(found, dict):
            return found
        if set(found) != {"step", "accuracy"} or len(found["step"]) != len(found["accuracy"]):
            raise ValueError("evaluations are neither rows nor two columns of equal length")
        return [
            {"step": step, "accuracy": accuracy}
            for step, accuracy in zip(found["step"], found["accuracy"], strict=True)
        ]

    @property
    def place(self) -> Delay:
        """The delay this run was made at; a delay of 0 is none, whatever its kind."""
        if self.delay == 0 or self.delay_kind == "none":
            return Delay(unit="", value=0.0, kind="none")
        return Delay(unit=self.delay_unit, value=self.delay, kind=self.delay_kind)

    @property
    def arm(self) -> Arm:
        """What is compared: the algorithm with its variant."""
        return Arm(algorithm=self.algorithm, variant=self.variant)

    @property
    def has_collapsed(self) -> bool:
        """Whether the run lost more than half of what it had gained, and `COLLAPSE_MARGIN`, or diverged."""
        if self.last is None or self.best is None or self.warm_start_accuracy is None:
            return self.diverged_at is not None
        gained = max(self.best - self.warm_start_accuracy, 0.0)
        lost = self.warm_start_accuracy + gained - self.last
        return self.diverged_at is not None or lost > max(gained / 2, COLLAPSE_MARGIN)

    @property
    def smooth_gap(self) -> float | None:
        """Highest mean of three evaluations in a row minus the last accuracy, itself a mean of three.

        The highest single evaluation rises with their number: a curve that rises to its end has a gap by noise alone.
        """
        values = list(self.curve.values())
        means = [sum(values[at : at + SMOOTHED]) / SMOOTHED for at in range(len(values) - SMOOTHED + 1)]
        return max(means) - self.last if means and self.last is not None else None

    @property
    def curve(self) -> dict[int, float]:
        """Accuracy by step, from the warm start on."""
        found = {evaluation.step: evaluation.accuracy for evaluation in self.evaluations}
        if found:
            found.setdefault(0, self.warm_start_accuracy)
        return {step: value for step, value in sorted(found.items()) if value is not None}

    @property
    def last_three(self) -> float | None:
        """Mean accuracy of the last three evaluations (of all, if there are fewer)."""
        return mean([evaluation.accuracy for evaluation in sorted(self.evaluations, key=lambda e: e.step)[-3:]])

    def accuracy_at(self, step: int) -> float | None:
        """Accuracy at a step, between the evaluations before and after; None beyond the first and the last."""
        curve = self.curve
        before = max((at for at in curve if at <= step), default=None)
        after = min((at for at in curve if at >= step), default=None)
        if before is None or after is None:
            return None
        share = (step - before) / (after - before) if after > before else 0.0
        return curve[before] + share * (curve[after] - curve[before])

    @property
    def arm_id(self) -> str:
        """The arm's name in the experiment's configuration: the run's without its seed."""
        return self.run_id.rpartition("-s")[0]

    def number(self, name: str) -> float | None:
        """The number called `name`: a field, `series:NAME`, `at:STEP` or `after:STEP`.

        They are the mean of a series over the steps, the accuracy at a step, on the line between the evaluations around
        it, and the last accuracy minus that.
        """
        if name.startswith("series:"):
            return mean(self.series.get(name.removeprefix("series:"), []))
        if name.startswith("at:"):
            return self.accuracy_at(int(name.removeprefix("at:")))
        if name.startswith("after:"):
            before = self.accuracy_at(int(name.removeprefix("after:")))
            return None if before is None or self.last is None else self.last - before
        value = getattr(self, name)
        return None if value is None else float(value)


@dataclass(frozen=True, slots=True, order=True)
class Delay:
    """One column of the experiment: how long a policy travels."""

    unit: str
    value: float
    kind: str

    @property
    def label(self) -> str:
        """What figures and tables call it."""
        if self.kind == "none":
            return "no delay"
        unit = "s" if self.unit == "seconds" else self.unit.removesuffix("s") if self.value == 1 else self.unit
        return f"{self.value:g} {unit}" if self.kind == "fixed" else f"{self.kind} <= {self.value:g} {unit}"

    @property
    def rank(self) -> tuple[bool, str, float, int, str]:
        """Sort key: no delay first, versions apart from seconds, then by size and kind."""
        kind = _KINDS.index(self.kind) if self.kind in _KINDS else len(_KINDS)
        return (self.kind != "none", "" if self.unit == "versions" else self.unit, self.value, kind, self.kind)


@dataclass(frozen=True, slots=True, order=True)
class Arm:
    """An algorithm and its variant; the variant is empty outside sweeps."""

    algorithm: str
    variant: str = ""

    @property
    def label(self) -> str:
        """What figures and tables call it."""
        return f"{self.algorithm} [{self.variant}]" if self.variant else self.algorithm


class Tuning(_Record):
    """What chose the learning rates, and the arms whose rate is at an end of the grid."""

    engine: str
    device: str
    at_edge: list[str]


class Results(_Record):
    """An experiment: its name and all its runs, sorted by task, delay, arm and seed."""

    experiment: str = ""
    title: str = ""
    heterorl_version: str = ""
    config_digest: str = ""
    protocol: dict[str, Any] | None = None
    """What the experiment kept; None for a quick look, and for results from before there were protocols."""
    tuning: Tuning | None = None
    runs: list[Run]
    missing_files: list[str] = []
    num_not_finite: int = 0

    @property
    def finished(self) -> list[Run]:
        """Runs that ended without an error."""
        return [run for run in self.runs if not run.failed]

    @property
    def failed(self) -> list[Run]:
        """Runs that ended with an error: listed, in no mean."""
        return [run for run in self.runs if run.failed]

    @property
    def tasks(self) -> list[str]:
        """All tasks, by name; numbers in names count as numbers."""
        return sorted({run.task for run in self.runs}, key=_by_numbers)

    @property
    def delays(self) -> list[Delay]:
        """All delays, the shortest first."""
        return sorted({run.place for run in self.runs}, key=lambda delay: delay.rank)

    @property
    def arms(self) -> list[Arm]:
        """All arms, `gepo` first."""
        return sorted({run.arm for run in self.runs}, key=lambda arm: (arm.algorithm != "gepo", arm))

    @property
    def algorithms(self) -> list[str]:
        """All algorithms, `gepo` first."""
        return list(dict.fromkeys(arm.algorithm for arm in self.arms))


def _by_numbers(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", name)]


def mean(values: Iterable[float | None]) -> float | None:
    """Mean of what was measured; None if nothing was."""
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


def numbers(runs: Iterable[Run], name: str) -> list[float]:
    """The number called `name` of each run that has it."""
    return [value for run in runs if (value := run.number(name)) is not None]


def by_cell(runs: Sequence[Run]) -> dict[tuple[str, Delay, Arm], list[Run]]:
    """Group runs by task, delay and arm; the seeds of a cell stay together."""
    cells: dict[tuple[str, Delay, Arm], list[Run]] = {}
    for run in runs:
        cells.setdefault((run.task, run.place, run.arm), []).append(run)
    return cells
