"""Which of the house's rules the runs behind a comparison relax, by what their own protocol says. Pure.

The house's rules are the defaults of `[protocol]`. A file may state a weaker one; it then counts only for comparisons
that it touches: fewer steps for a delay matter to the runs at that delay, not to those of a shorter one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from heterorl_research.lab.config import ProtocolConfig
from heterorl_research.lab.report.data import Run

HOUSE = ProtocolConfig()
"""Every rule at its full strength."""


def relaxed(protocol: Mapping[str, Any], runs: Sequence[Run]) -> list[str]:
    """What is weaker than the house's rules, in words; empty where all of them are kept.

    Args:
        protocol: as results state it; a key that it lacks is at its default.
        runs: of both sides of the comparison.
    """
    kept = {**HOUSE.model_dump(), **protocol}
    found = []
    seeds = len({run.seed for run in runs})
    if seeds < HOUSE.least_seeds:
        found.append(f"{seeds} seeds")
    if kept["steps_per_lag"] < HOUSE.steps_per_lag and any(_is_short(run) for run in runs):
        found.append(f"{kept['steps_per_lag']:g} x delay")
    if kept["least_prompts"] < HOUSE.least_prompts:
        found.append(f"{kept['least_prompts']:,} prompts")
    if kept["least_evaluations"] < HOUSE.least_evaluations:
        count = kept["least_evaluations"]
        found.append(f"{count} evaluation{'s' if count > 1 else ''}")
    return [*found, *_rates(kept, runs)]


def _is_short(run: Run) -> bool:
    """Whether a run has fewer steps than the house asks for at its delay; delays in seconds have no steps."""
    return run.place.unit == "versions" and (run.steps or 0) < HOUSE.steps_per_lag * run.place.value


def _rates(kept: Mapping[str, Any], runs: Sequence[Run]) -> list[str]:
    """A rate is chosen for each arm, or the comparison is a mean over several of them."""
    if kept["tune"]:
        lenders = {kept["tune_as"][run.algorithm] for run in runs if run.algorithm in kept["tune_as"]}
        return [f"rate of {name}" for name in sorted(lenders)]
    return ["one rate"] if len({run.lr for run in runs}) == 1 else []
