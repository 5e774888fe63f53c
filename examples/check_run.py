"""Compare a run with what its recipe must reach.

    python examples/check_run.py examples/smollm2-sums runs/smollm2-sums [--picture expect.png]

The first directory has an `expected.json`; `examples/expected.schema.json` says what stands in it. The second is a
coordinator's data_dir, or a directory that holds it and the learner's state_dir. Exit code 0: every bound is kept.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from heterorl.common.errors import HeterorlError
from heterorl.report.past_run import InUse, PastRun, read_run

FEW = 10
"""Steps that the first and the last rewards are means of."""


def measured(run: PastRun) -> dict[str, float]:
    """What can be bounded; what the run did not measure is missing."""
    steps = [report for report in run.reports if report.is_applied]
    rewards = [report.reward_mean for report in steps]
    found = {
        "steps": float(len(steps)),
        "reward_first": statistics.fmean(rewards[:FEW]),
        "reward_last": statistics.fmean(rewards[-FEW:]),
        "staleness_max": float(max(report.staleness_max for report in steps)),
        "staleness_last": statistics.fmean(report.staleness_mean for report in steps[-FEW:]),
        "kl_max": max(report.kl for report in steps),
    }
    found["reward_gain"] = found["reward_last"] - found["reward_first"]
    held_out = [float(row["accuracy"]) for row in run.evaluations if row.get("accuracy") is not None]
    if held_out:
        found |= {"held_out_first": held_out[0], "held_out_last": held_out[-1], "held_out_best": max(held_out)}
        found["held_out_gain"] = held_out[-1] - held_out[0]
    means = {one.task_set: one.summary.average.mean for one in run.sets if one.summary.average is not None}
    if means:
        found["sets_last"] = statistics.fmean(means.values())
    deltas = [float(row["bytes"]) for row in run.versions if row["version"] > 0]
    if deltas:
        found["bytes_per_version"] = statistics.median(deltas)
    if run.ledger is not None:
        found["unaccounted_groups"] = float(not run.ledger.is_balanced)
    return found


def draw(run: PastRun, out: Path) -> None:
    """Reward, staleness and bytes of a run, side by side, as a small PNG."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    steps = [report for report in run.reports if report.is_applied]
    numbers = [report.step for report in steps]
    rewards = [report.reward_mean for report in steps]
    smooth = [statistics.fmean(rewards[max(0, place - FEW + 1) : place + 1]) for place in range(len(rewards))]
    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(10, 2.8), layout="constrained")
    left.plot(numbers, rewards, color="0.8", linewidth=1, label="a step")
    left.plot(numbers, smooth, color="tab:blue", label=f"mean of {FEW} steps")
    held_out = [(row["version"], row["accuracy"]) for row in run.evaluations if row.get("accuracy") is not None]
    if held_out:
        left.plot(*zip(*held_out, strict=True), "o-", color="tab:orange", label="held out, by version")
    left.set(title="mean reward", xlabel="step")
    left.set_ylim(bottom=0)
    left.legend(fontsize=7)
    middle.plot(numbers, [report.staleness_mean for report in steps], color="tab:green")
    middle.set(title="staleness, versions", xlabel="step")
    deltas = [(row["version"], row["bytes"] / 1e6) for row in run.versions if row["version"] > 0]
    right.plot(*zip(*deltas, strict=True), color="tab:purple")
    right.set(title="delta of a version, MB", xlabel="version")
    right.set_ylim(bottom=0)
    figure.savefig(out, dpi=80)
    pyplot.close(figure)


def problem(bound: dict[str, Any], found: dict[str, float]) -> str:
    """Why a bound is not kept; empty where it is, or where it is a number to compare with and no bound."""
    value = found.get(bound["metric"])
    if value is None:
        return "not measured" if "at_least" in bound or "at_most" in bound else ""
    if value < bound.get("at_least", value):
        return f"below {bound['at_least']:g}"
    if value > bound.get("at_most", value):
        return f"above {bound['at_most']:g}"
    return ""


def main() -> None:
    """Print a table and exit with 1 where a bound is not kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path, help="directory of the recipe")
    parser.add_argument("run", type=Path, help="directory of the run")
    parser.add_argument("--picture", type=Path, help="PNG file of the run's curves")
    arguments = parser.parse_args()
    try:
        expected = json.loads((arguments.recipe / "expected.json").read_text(encoding="utf-8"))
        run = read_run(arguments.run)
    except InUse:
        parser.error(f"a coordinator is running on {arguments.run}: compare when the run is over and it has ended")
    except (HeterorlError, OSError) as error:
        parser.error(str(error))
    found = measured(run)
    if arguments.picture is not None:
        draw(run, arguments.picture)
    table = Table("metric", "measured", "expected", "", title=f"{arguments.run} against {arguments.recipe}")
    problems = []
    for bound in expected["bounds"]:
        wanted = [f"{word.replace('_', ' ')} {bound[word]:g}" for word in ("at_least", "at_most") if word in bound]
        wanted += [f"published {bound['published']:g}"] if "published" in bound else []
        value = found.get(bound["metric"])
        wrong = problem(bound, found)
        problems += [wrong] if wrong else []
        table.add_row(bound["metric"], "-" if value is None else f"{value:.4g}", ", ".join(wanted), wrong or "ok")
    Console().print(table)
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
