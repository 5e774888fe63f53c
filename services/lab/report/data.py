"""What the report reads: the results of one experiment, checked.

Guarantees that every number is finite or None, and that runs come in a fixed order. Never guesses a missing number.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from heterorl.common.errors import ConfigError

_KINDS = ("none", "fixed", "uniform", "lognormal", "weibull", "exponential", "sawtooth", "uniform_lag")
_SAFE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=+,@-]*")
COLLAPSE_MARGIN = 0.05
"""A run has collapsed when its last accuracy is this much below its warm start: more than chance on 256 prompts."""


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
    warm_start_accuracy: Number = None
    best: Number = None
    last: Number = None
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
        """Whether the last accuracy is below the warm start by more than `COLLAPSE_MARGIN`."""
        return (
            self.last is not None
            and self.warm_start_accuracy is not None
            and self.last < self.warm_start_accuracy - COLLAPSE_MARGIN
        )

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

    def number(self, name: str) -> float | None:
        """The number called `name`: a field, or `series:NAME` for the mean of a series over the steps."""
        if name.startswith("series:"):
            return mean(self.series.get(name.removeprefix("series:"), []))
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


class Results(_Record):
    """An experiment: its name and all its runs, sorted by task, delay, arm and seed."""

    experiment: str = ""
    title: str = ""
    heterorl_version: str = ""
    config_digest: str = ""
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
        """All tasks."""
        return sorted({run.task for run in self.runs})

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


def load(directory: Path) -> Results:
    """Read results.json and runs/<run_id>.json under `directory`.

    NaN and infinite numbers become None and are counted in `num_not_finite`.

    Raises:
        ConfigError: results.json is absent or not what is described here, or two runs share an id.
    """
    not_finite: list[str] = []
    found = _parse(directory / "results.json", not_finite)
    runs: list[Run] = []
    missing: list[str] = []
    try:
        table = Results.model_validate(found)
        for run in table.runs:
            if not _SAFE_ID.fullmatch(run.run_id):
                raise ConfigError("run_id", f"{run.run_id!r} is not a file name")
            path = directory / "runs" / f"{run.run_id}.json"
            if not path.exists():
                # results.json has both in short; older files have neither.
                if not run.evaluations:
                    missing.append(run.run_id)
                runs.append(run)
                continue
            detail = Run.model_validate(
                {**run.model_dump(), **_only(_parse(path, not_finite), "series", "evaluations")}
            )
            runs.append(detail)
    except ValidationError as error:
        raise ConfigError(str(directory), f"not the results of an experiment: {error}") from None
    return _sorted(table, runs, directory / "results.json").model_copy(
        update={"missing_files": sorted(missing), "num_not_finite": len(not_finite)}
    )


def load_table(path: Path) -> Results:
    """Read one file of results by itself, as it is committed: evaluations and series are the short ones.

    Raises:
        ConfigError: the file is absent or not what is described here, or two runs share an id.
    """
    not_finite: list[str] = []
    try:
        table = Results.model_validate(_parse(path, not_finite))
    except ValidationError as error:
        raise ConfigError(str(path), f"not the results of an experiment: {error}") from None
    return _sorted(table, table.runs, path).model_copy(update={"num_not_finite": len(not_finite)})


def _sorted(table: Results, runs: Sequence[Run], path: Path) -> Results:
    if len({run.run_id for run in runs}) != len(runs):
        raise ConfigError(str(path), "two runs share a run_id")
    ordered = sorted(runs, key=lambda run: (run.task, run.place.rank, run.arm, run.seed, run.run_id))
    return table.model_copy(update={"runs": ordered})


def _only(found: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: found[name] for name in names if found.get(name) is not None}


def _parse(path: Path, not_finite: list[str]) -> dict[str, Any]:
    try:
        # list.append answers None: NaN and infinities become "not measured", and are counted.
        found = json.loads(path.read_text(encoding="utf-8"), parse_constant=not_finite.append)
    except FileNotFoundError:
        raise ConfigError(str(path), "does not exist", action="run the experiment first") from None
    except ValueError as error:
        raise ConfigError(str(path), f"is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(str(path), "is not a JSON object")
    return found
