"""Rows of a curve, numbers of a run and of all runs, and time limits; pure functions."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

GOAL = 0.2
"""Rise of the mean reward that each seed should reach."""
LEAST_SEEDS = 3
WINDOW = 16
"""Steps of the mean at the beginning and at the end of a training curve."""
RESERVE_S = 80.0
"""Time between the last step and the end: processes stop, and versions are evaluated."""
NUM_EVALUATED = 6
"""Versions of a run that are evaluated after version 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One run: an environment, a seed, a lag in versions, and who trains: heterorl or trl."""

    environment: str
    seed: int
    lag: int
    trainer: str = "heterorl"

    @property
    def name(self) -> str:
        """Name of its directory."""
        return f"{self.trainer}-{self.environment}-lag{self.lag}-seed{self.seed}"


def arm_of(run: Mapping[str, Any]) -> Arm:
    """The arm of a run's results."""
    return Arm(**{each.name: run[each.name] for each in dataclasses.fields(Arm)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Seconds from the start of a run until its training stops and until it is killed."""

    train_s: float
    end_s: float


def limits(minutes: float, *, num_runs: int, jobs: int) -> Limits:
    """Limits of each run, if `jobs` of `num_runs` runs go on at once and all end within `minutes`."""
    end_s = 60.0 * minutes / max(1, math.ceil(num_runs / max(1, jobs)))
    return Limits(train_s=end_s - min(RESERVE_S, end_s / 2), end_s=end_s)


def curve_of(journal: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows of the learner's journal of steps; a later row of a step replaces an earlier one."""
    rows = {row["step"]: _row(row) for row in journal if row["is_applied"]}
    return [rows[step] for step in sorted(rows)]


def _row(report: Mapping[str, Any]) -> dict[str, Any]:
    row = {
        "step": report["step"],
        "reward": round(report["reward_mean"], 4),
        "staleness": round(report["staleness_mean"], 2),
        "staleness_max": report["staleness_max"],
        "kl": round(report["kl"], 4),
    }
    if completions := report.get("completions"):
        row |= {
            "turns": round(completions["turns_mean"], 3),
            "given_tokens": round(completions["given_mean"], 2),
            "drawn_tokens": round(completions["length_mean"], 2),
            "endings": {ending["name"]: round(ending["mean"], 4) for ending in completions["endings"]},
        }
    return row


def versions_to_evaluate(head: int) -> list[int]:
    """Version 0, the newest one, and some between them; ascending."""
    return sorted({round(head * part / NUM_EVALUATED) for part in range(NUM_EVALUATED + 1)})


def held_out_of(answer: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Versions and their held-out reward from the JSON of `heterorl evaluate`."""
    return [
        {
            "version": row["version"],
            **{key: round(row["average"][key], 4) for key in ("mean", "low", "high")},
            "num_samples": row["num_samples"],
            "num_errors": row["num_errors"],
        }
        for row in answer["evaluations"]
        if row["average"] is not None
    ]


def summary_of(run: Mapping[str, Any]) -> dict[str, Any]:
    """First and last numbers of a run; None where it has none. `gain` is held out if two versions were evaluated."""
    curve, held_out = run["curve"], run["held_out"]
    first, last = curve[:WINDOW], curve[-WINDOW:]
    trained = [_mean(first, "reward"), _mean(last, "reward")]
    evaluated = [held_out[0]["mean"], held_out[-1]["mean"]] if len(held_out) > 1 else [None, None]
    ends = evaluated if evaluated[0] is not None else trained
    return {
        **dataclasses.asdict(arm_of(run)),
        "steps": curve[-1]["step"] if curve else 0,
        "training_first": trained[0],
        "training_last": trained[1],
        "held_out_first": evaluated[0],
        "held_out_last": evaluated[1],
        "gain": None if ends[0] is None or ends[1] is None else round(ends[1] - ends[0], 4),
        "turns_first": _mean(first, "turns"),
        "turns_last": _mean(last, "turns"),
        "staleness_last": _mean(last, "staleness"),
        "failure": run["failure"],
    }


def _mean(rows: Sequence[Mapping[str, Any]], key: str) -> float | None:
    values = [row[key] for row in rows if key in row]
    return round(statistics.fmean(values), 4) if values else None


def verdicts(summaries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each trainer, environment and lag the gains of its seeds, and whether all of three or more reached GOAL."""
    found = []
    keys = ("trainer", "environment", "lag")
    for cell in dict.fromkeys(tuple(one[key] for key in keys) for one in summaries):
        own = [one for one in summaries if tuple(one[key] for key in keys) == cell]
        gains = [one["gain"] for one in own if one["gain"] is not None]
        is_whole = len(gains) == len(own) and len(own) >= LEAST_SEEDS
        found.append(
            {
                **dict(zip(keys, cell, strict=True)),
                "seeds": [one["seed"] for one in own],
                "gains": gains,
                "least_gain": min(gains, default=None),
                "is_goal_reached": is_whole and min(gains) >= GOAL,
            }
        )
    return found
