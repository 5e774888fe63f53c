"""Results of a demo: measures and verdict of its journals, HTML page.

Pure. Invariants: a number that was not measured is None, never 0; only a run that took all its steps is judged by its
promises; a failed run names its failure.
"""

from __future__ import annotations

import enum
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from heterorl.common.types.common import StepReport, amount
from heterorl.common.types.run import RunStatus
from heterorl.demo.demo_config import Regime
from heterorl.report.figures import Rows
from heterorl.report.past_run import read_run
from heterorl.report.report_page import render

PROMISED_BY = "gepo"
"""Only this algorithm promises a rise in accuracy; the others are for comparison."""


class Ending(enum.Enum):
    """How a run ended."""

    COMPLETE = "complete"
    BROKEN = "broken"
    """All steps were taken, but a promise was broken."""
    INTERRUPTED = "interrupted"
    FAILED = "failed"


def start_accuracy(evaluations: Rows) -> float | None:
    """Version 0's held-out accuracy, on the prompts and seeds of later versions."""
    return next((row["accuracy"] for row in evaluations if row["version"] == 0), None)


def measure(
    *,
    reports: Sequence[StepReport],
    status: RunStatus | None,
    versions: Rows,
    evaluations: Rows,
    samplers: Sequence[Rows],
    regime: Regime,
) -> dict[str, Any]:
    """Numbers of a run; None for what was not measured."""
    scored = [row for row in evaluations if row["accuracy"] is not None]
    return {
        "steps": reports[-1].step if reports else 0,
        "max_steps": regime.max_steps,
        "warm_start_accuracy": start_accuracy(scored),
        "final_accuracy": scored[-1]["accuracy"] if scored else None,
        "final_accuracy_version": scored[-1]["version"] if scored else None,
        "best_accuracy": max((row["accuracy"] for row in scored), default=None),
        "evaluation_prompts": scored[-1]["num_prompts"] if scored else None,
        "staleness_versions_mean": _mean([report.staleness_mean for report in reports]),
        "staleness_versions_steady": _mean([r.staleness_mean for r in reports if r.step > regime.lag_versions]),
        "versions": len(versions),
        "groups_accepted": None if status is None else status.ledger.acked,
        "groups_trained": sum(report.num_groups for report in reports),
        "digest_mismatches": digest_mismatches(versions, samplers),
        "ledger_balanced": None if status is None else status.ledger.is_balanced,
    }


def broken_promises(
    summary: Mapping[str, Any], *, regime: Regime, algorithm: str, exit_codes: Mapping[str, int | None]
) -> list[str]:
    """Promises that an uninterrupted run broke."""
    problems = []
    if not summary["ledger_balanced"]:
        problems.append("the ledger does not balance")
    if summary["digest_mismatches"]:
        problems.append(f"{summary['digest_mismatches']} sampler states differ from the learner's")
    if summary["steps"] < regime.max_steps:
        problems.append(f"{summary['steps']} of {regime.max_steps} steps were taken")
    before, after = summary["warm_start_accuracy"], summary["final_accuracy"]
    if before is None or after is None:
        problems.append("held-out accuracy was not measured")
    elif algorithm == PROMISED_BY and after - before < regime.required_gain:
        problems.append(f"accuracy rose by {after - before:.3f}, promised is {regime.required_gain:.2f}")
    problems += [f"{name} ended with code {code}" for name, code in exit_codes.items() if code != 0]
    return problems


def verdict(summary: Mapping[str, Any], *, is_smoke: bool = False) -> list[str]:
    """Last lines for the user; a smoke run cannot judge accuracy."""
    ending = Ending(summary["status"])
    before, after = summary["warm_start_accuracy"], summary["final_accuracy"]
    done = f"{summary['steps']} of {summary['max_steps']} steps"
    lines = []
    if ending is Ending.FAILED:
        lines += [f"failed after {done}: {summary['failure']}", f"logs: {summary['logs']}"]
        if not summary["report"]:
            lines.append(f"no report was written; what is known: {summary['summary']}")
    if ending is Ending.INTERRUPTED:
        lines.append(f"interrupted after {done}; every process was stopped; what is known: {summary['summary']}")
    if ending in (Ending.FAILED, Ending.INTERRUPTED) and summary["steps"] and not summary["report"]:
        lines.append(f"heterorl report {PurePath(summary['summary']).parent} makes a page of what lies there")
    if summary["groups_accepted"] is not None:
        lines.append(
            f"{amount(summary['versions'], 'version')} published; "
            f"{amount(summary['groups_accepted'], 'group')} accepted, {summary['groups_trained']} trained"
        )
    if before is not None and summary["final_accuracy_version"]:
        lines.append(
            f"held-out accuracy {before:.3f} -> {after:.3f} (version {summary['final_accuracy_version']}, "
            f"best {summary['best_accuracy']:.3f}) on the same {summary['evaluation_prompts']} prompts, "
            f"trained on groups {summary['staleness_versions_mean']:.1f} versions old on average"
        )
        if is_smoke:
            lines.append("a smoke run: too few steps to judge accuracy by; it may go up or down by chance")
    lines += [f"{name}: {summary[key]}" for name, key in (("report", "report"), ("model", "model_dir")) if summary[key]]
    return lines + [f"broken promise: {problem}" for problem in summary["problems"]]


def digest_mismatches(versions: Rows, samplers: Sequence[Rows]) -> int:
    """Number of sampler states unlike the learner's state of that version."""
    roots = {entry["version"]: entry["state_root"] for entry in versions}
    return sum(roots.get(entry["version"]) != entry["state_root"] for records in samplers for entry in records)


def _mean(values: Sequence[float]) -> float | None:
    return round(statistics.fmean(values), 2) if values else None


def write_report(out: Path, summary: Mapping[str, Any]) -> Path:
    """Write report.html, as `heterorl report` does; returns its path.
    The run has at least one step."""
    lag = summary["lag_versions"]
    remarks = [
        f"After the first {lag} versions, each answer that the learner trains on was written by a policy about {lag}"
        " versions older. The learning rate is about a thousand times a large model's, so versions are far apart."
        " --algorithm grpo shows a loss that this hurts; one run is one seed.",
        *(f"Not as promised: {problem}." for problem in summary["problems"]),
    ]
    done = f"after {summary['steps']} of {summary['max_steps']} steps"
    if summary["failure"]:
        remarks.append(f"The run failed {done}: {summary['failure']}")
    elif summary["steps"] < summary["max_steps"]:
        remarks.append(f"The run was interrupted {done}.")
    page, _ = render(read_run(out), remarks=remarks)
    path = out / "report.html"
    path.write_text(page, encoding="utf-8")
    return path
