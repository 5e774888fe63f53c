"""Outcome of a run -> the numbers that tables and figures show. Pure; every number is finite or null."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from heterorl.common.errors import ConfigError
from heterorl.common.process.config_file import Config
from heterorl.common.wire.common_messages import bytes_digest
from heterorl.sampler.delay import DelayConfig
from heterorl_research.lab.cell import Cell
from heterorl_research.losses.kinds import level_of

if TYPE_CHECKING:
    from heterorl_research.lab.world import Outcome

LATER_KEYS: Mapping[str, frozenset[str]] = {
    "loss": frozenset(
        {"dual_clip", "baseline", "negative_keep", "reference_kl", "negative_weight", "tempering_ess", "drift_limit"}
    ),
    "delay": frozenset({"default"}),
    "task": frozenset({"lr", "warm_start_lr", "warm_start_seed"}),
    "prompts": frozenset(
        {
            "data",
            "system_prompt",
            "rewards",
            "sources",
            "sandbox",
            "environment",
            "environment_path",
            "environment_workers",
            "environment_memory_bytes",
            "max_turns",
            "trajectory_s",
            "step_timeout_s",
            "max_observation_chars",
            "tool_parser",
        }
    ),
    "regime": frozenset(
        {
            "last_evaluations",
            "evaluation_offset",
            "evaluation_noise",
            "top_p",
            "top_k",
            "sampler_noise",
            "lease_order",
            "sampler_speed",
            "versions_in_flight",
            "steps_per_version",
        }
    ),
}
"""Keys that came after the first tables: a digest names them only where they are set, so that runs keep theirs."""
PARAMETERS = {"lognormal": ("mu", "sigma"), "weibull": ("shape", "scale"), "exponential": ("start", "scale")}
SAMPLER_KL = "kl_coefficient"
"""What a digest calls `loss.sampler_kl`, as those of earlier results do."""
_POINTS = 10
_DIGITS = 3
_DIGITS_OF_MEANS = 6

_MEANS = {
    "kl_mean": "kl",
    "iw_var_mean": "iw_var",
    "ess_mean": "ess",
    "clip_fraction_mean": "clip_fraction",
    "advantage_error_mean": "advantage_error",
    "bias_gepo_mean": "bias_gepo",
    "bias_gspo_mean": "bias_gspo",
    "staleness_mean": "staleness",
}


def cell_digest(cell: Cell) -> str:
    """Digest of everything that a run depends on."""
    algorithm = cell.algorithm.model_dump_json(exclude={"loss": _unset(cell.algorithm.loss, "loss")})
    parts = (
        algorithm.replace('"sampler_kl":', f'"{SAMPLER_KL}":'),
        _with_parameters(cell.delay),
        cell.task.model_dump_json(
            exclude={"task": _unset(cell.task.task, "prompts"), **dict.fromkeys(_unset(cell.task, "task"), True)}
        ),
        cell.regime.model_dump_json(exclude=_unset(cell.regime, "regime")),
    )
    return bytes_digest("\n".join([cell.run_id, *parts]).encode())


def _with_parameters(delay: DelayConfig) -> str:
    """A delay as JSON, with the parameters that earlier results state too."""
    text = delay.model_dump_json(exclude=_unset(delay, "delay"))
    names = PARAMETERS.get(delay.kind, ())
    return text[:-1] + "".join(f",{json.dumps(name)}:{getattr(delay, name)!r}" for name in names) + "}"


def _unset(part: Config, name: str) -> set[str]:
    """Later keys of a part that have their defaults."""
    fields = type(part).model_fields
    return {
        key
        for key in LATER_KEYS[name] & fields.keys()
        if getattr(part, key) == fields[key].get_default(call_default_factory=True)
    }


def identity(cell: Cell) -> dict[str, Any]:
    """Which run it is."""
    kind: str = cell.delay.kind
    if cell.is_refreshed:
        kind = f"{kind} refresh"
    if cell.delay_default:
        kind = f"{kind} less {cell.delay_default:g}"
    return {
        "run_id": cell.run_id,
        "algorithm": cell.algorithm.name,
        "delay": cell.delay_value,
        "delay_kind": kind,
        "delay_unit": cell.delay_unit,
        "seed": cell.seed,
        "task": cell.task.name,
        "variant": cell.variant,
        "lr": cell.regime.lr,
        "weights": "token" if level_of(cell.algorithm.loss) == "token" else "rollout",
        "cell_digest": cell_digest(cell),
    }


def summarise(cell: Cell, outcome: Outcome, *, wall_s: float) -> dict[str, Any]:
    """The row of a run that ended, with its series and evaluations.

    A run that diverged has collapsed: its last accuracy is 0, and so is every evaluation from that step on.

    `best` is that of a single checkpoint; `best_per_benchmark` is the mean over benchmarks of each one's own best
    checkpoint, which is never smaller. `last` is the mean of the last `regime.last_evaluations`, `last_greedy`
    is of the likeliest tokens at the end (engine `fast` alone). `warm_start_accuracy` is the evaluation of version 0.
    """
    steps = [row for row in outcome.steps if outcome.diverged_at is None or (row["step"] or 0) < outcome.diverged_at]
    columns = {name: [_finite(row[name]) for row in steps] for name in (steps or [{}])[0]}
    evaluations = _evaluations(cell, outcome)
    accuracies = [row["accuracy"] for row in evaluations if row["accuracy"] is not None]
    best = max(accuracies, default=None)
    last = _mean(accuracies[-cell.regime.last_evaluations :]) if outcome.diverged_at is None else 0.0
    norms = [value for value in columns.get("grad_norm", []) if value is not None]
    staleness = [value for value in columns.get("staleness", []) if value is not None]
    return {
        **identity(cell),
        "warm_start_accuracy": accuracies[0] if accuracies else None,
        "best": best,
        "last": last,
        "last_greedy": None if outcome.diverged_at is not None or not evaluations else evaluations[-1].get("greedy"),
        "gap": None if best is None or last is None else best - last,
        "best_per_benchmark": _best_per_benchmark(evaluations),
        **{name: _mean(columns.get(source, [])) for name, source in _MEANS.items()},
        "grad_norm_p95": float(np.percentile(norms, 95)) if norms else None,
        "staleness_max": max(staleness, default=None),
        "steps": len(steps),
        "groups": None if outcome.status is None else outcome.status.ledger.acked,
        "ledger_balanced": outcome.ledger_balanced,
        "wall_s": round(wall_s, 2),
        "failed": None,
        "diverged_at": outcome.diverged_at,
        "series": columns,
        "evaluations": evaluations,
    }


def _evaluations(cell: Cell, outcome: Outcome) -> list[dict[str, Any]]:
    end = outcome.diverged_at
    if end is None:
        return outcome.evaluations
    every = cell.regime.evaluate_every
    lost = range(math.ceil(end / every) * every, cell.regime.max_steps + 1, every)
    return [row for row in outcome.evaluations if row["step"] < end] + [
        {"step": step, "accuracy": 0.0, "benchmarks": {}} for step in lost
    ]


def failure(cell: Cell, *, problem: str, wall_s: float) -> dict[str, Any]:
    """The row of a run that did not end."""
    return {**identity(cell), "failed": problem, "wall_s": round(wall_s, 2), "series": {}, "evaluations": []}


def mixed_warm_starts(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """What is wrong where runs that are to be paired began from different weights, a sentence for each seed.

    Weights of one seed differ between kinds of processors: matrix products round otherwise there.
    """
    found: dict[tuple[str, str, int], set[float]] = {}
    for row in rows:
        if row.get("warm_start_accuracy") is not None:
            key = (row.get("task", ""), row.get("variant", ""), row["seed"])
            found.setdefault(key, set()).add(row["warm_start_accuracy"])
    return [
        f"{task} {variant} seed {seed}: runs begin from {len(several)} warm starts, of accuracies"
        f" {', '.join(f'{one:.4f}' for one in sorted(several))}: they were computed on machines of different kinds and"
        " make no pairs; remove those of one kind and run them again"
        for (task, variant, seed), several in found.items()
        if len(several) > 1
    ]


def kept(row: Mapping[str, Any]) -> dict[str, Any]:
    """What stands in results.json: evaluations as two lists, and each series as means over 10 stretches of steps.

    Accuracies of evaluations have four digits after the point, series three significant ones, other numbers six: about
    2 KB a run.
    """
    evaluations = row["evaluations"]
    return {
        **{
            name: _significant(value, _DIGITS_OF_MEANS) if isinstance(value, float) else value
            for name, value in row.items()
        },
        "series": {name: _stretches(values) for name, values in row["series"].items()},
        "evaluations": {
            "step": [found["step"] for found in evaluations],
            "accuracy": [_rounded(found["accuracy"], 4) for found in evaluations],
        },
    }


def restored(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row of a run from what stands of it in results.json: `kept` of it is equal to what it was made from.

    Its series are the means of 10 stretches, and the accuracies of single benchmarks are lost.
    """
    found = row["evaluations"]
    evaluations = [
        {"step": step, "accuracy": accuracy, "benchmarks": {}}
        for step, accuracy in zip(found["step"], found["accuracy"], strict=True)
    ]
    return {**row, "evaluations": evaluations}


def rows_of(results: Path) -> dict[str, dict[str, Any]]:
    """The rows of a results.json by their runs.

    Raises:
        ConfigError: the file is not one.
    """
    try:
        return {row["run_id"]: row for row in json.loads(results.read_text(encoding="ascii"))["runs"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError("--reuse", f"{results} is not an experiment's results.json: {error!r}") from None


def one_run_a_line(results: dict[str, Any]) -> str:
    """results.json as text: short, and a run that changed is one line of a diff."""
    head = json.dumps({**results, "runs": []}, indent=1, allow_nan=False).removesuffix("[]\n}")
    runs = ",\n".join("  " + json.dumps(row, allow_nan=False, separators=(",", ":")) for row in results["runs"])
    return f"{head}[\n{runs}\n ]\n}}\n" if runs else f"{head}[]\n}}\n"


def _stretches(values: Sequence[float | None]) -> list[float | None]:
    """Means of one value or more, over at most 10 stretches of the same length, but for the last."""
    length = math.ceil(len(values) / _POINTS)
    means = (_mean(values[start : start + length]) for start in range(0, len(values), length))
    return [None if value is None else _significant(value, _DIGITS) for value in means]


def _significant(value: float, digits: int) -> float:
    return float(f"{value:.{digits}g}")


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def _best_per_benchmark(evaluations: list[dict[str, Any]]) -> float | None:
    names = {name for row in evaluations for name in row["benchmarks"]}
    bests = [
        max((row["benchmarks"][name] for row in evaluations if row["benchmarks"].get(name) is not None), default=None)
        for name in sorted(names)
    ]
    return _mean(bests)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _mean(values: Iterable[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return float(np.mean(present)) if present else None
