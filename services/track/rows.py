"""A step's report as one row of named numbers."""

from __future__ import annotations

import dataclasses

from heterorl.common.types.common import StepReport


def row_of(report: StepReport) -> dict[str, float]:
    """Every number of a report by name; what the learner did not state is left out, `is_applied` is 0 or 1.

    Example: {"step": 7, "version": 9, "loss": 0.1, "completions/length_mean": 212.5, "reward_parts/correct": 0.5,
        "sites/eu-1/num_tokens": 4096, "times/waiting_s": 1.5}
    """
    row: dict[str, float] = {}
    for field in dataclasses.fields(report):
        value = getattr(report, field.name)
        if isinstance(value, bool):
            row[field.name] = int(value)
        elif isinstance(value, int | float):
            row[field.name] = value
    if report.completions is not None:
        for field in dataclasses.fields(report.completions):
            value = getattr(report.completions, field.name)
            if isinstance(value, int | float):
                row[f"completions/{field.name}"] = value
        row |= {f"reward_parts/{part.name}": part.mean for part in report.completions.reward_parts}
        for site in report.completions.sites:
            row[f"sites/{site.site}/num_groups"] = site.num_groups
            row[f"sites/{site.site}/num_tokens"] = site.num_tokens
    if report.times is not None:
        row |= {f"times/{field.name}": getattr(report.times, field.name) for field in dataclasses.fields(report.times)}
    return row
