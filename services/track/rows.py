"""A step's report and an evaluation as rows of named numbers."""

from __future__ import annotations

import dataclasses
from typing import Any

from heterorl.common.types.common import StepReport
from heterorl.common.types.evaluation import Estimate, Evaluation, EvaluationState


def row_of(report: StepReport) -> dict[str, float]:
    """Every number of a report by name; what the learner did not state is left out, `is_applied` is 0 or 1.

    `tokens_per_s` is tokens divided by `times.period_s`, from the end of one step to the end of the next.

    Example: {"step": 7, "version": 9, "loss": 0.1, "completions/length_mean": 212.5, "reward_parts/correct": 0.5,
        "sites/eu-1/num_tokens": 4096, "times/waiting_s": 1.5}
    """
    row = _numbers(report, "")
    if not report.published_time:
        del row["published_time"]
    period_s = 0.0 if report.times is None else report.times.period_s
    if report.completions is not None:
        row |= _numbers(report.completions, "completions/")
        row |= {f"reward_parts/{part.name}": part.mean for part in report.completions.reward_parts}
        for site in report.completions.sites:
            row |= _numbers(site, f"sites/{site.site}/")
            if period_s > 0.0:
                row[f"sites/{site.site}/tokens_per_s"] = site.num_tokens / period_s
    if report.times is not None:
        row |= _numbers(report.times, "times/")
        if period_s > 0.0:
            row["tokens_per_s"] = report.num_tokens / period_s
    for source in report.sources:
        row |= _numbers(source, f"sources/{source.label}/")
    return row


def version_name(task_set: str) -> str:
    """The number of an evaluation's row that is its version, and the x axis of the others."""
    return f"evaluation/{task_set}/version"


def set_of(name: str) -> str | None:
    """The set whose version a number is; None of any other number."""
    inner = name.removeprefix("evaluation/").removesuffix("/version")
    return inner if name == version_name(inner) else None


def evaluation_row(found: Evaluation) -> dict[str, float]:
    """Every number of an evaluation under the name of its set; `low` and `high` end the 95 % interval over prompts.

    Example: {"evaluation/math/version": 64, "evaluation/math/is_done": 1, "evaluation/math/mean": 0.42,
        "evaluation/math/mean_low": 0.38, "evaluation/math/pass_at_4": 0.6}
    """
    summary = found.summary
    row: dict[str, float] = {"version": found.version, "is_done": int(found.state is EvaluationState.DONE)}
    row |= {name: value for name, value in _numbers(summary, "").items() if name != "num_truncated"}
    if summary.num_samples:
        row["truncated_fraction"] = summary.num_truncated / summary.num_samples
    if summary.average is not None:
        row |= _estimate("mean", summary.average)
    for passed in summary.passes:
        row |= _estimate(f"pass_at_{passed.k}", passed.estimate)
    return {f"evaluation/{found.task_set}/{name}": value for name, value in row.items()}


def _estimate(name: str, found: Estimate) -> dict[str, float]:
    return {name: found.mean, f"{name}_low": found.low, f"{name}_high": found.high}


def _numbers(value: Any, prefix: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for field in dataclasses.fields(value):
        number = getattr(value, field.name)
        if isinstance(number, bool):
            found[prefix + field.name] = int(number)
        elif isinstance(number, int | float):
            found[prefix + field.name] = number
    return found
