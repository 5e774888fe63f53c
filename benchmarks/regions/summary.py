"""From the rows of all runs to shares of one site, goals and a table. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.regions.arms import ARMS, ONE, SITES, Arm

Row = Mapping[str, Any]
GOAL_SHARE, GOAL_OUTAGE, GOAL_FULL, GOAL_SPARSE = 0.95, 0.90, 100.0, 1.4
SCHEMES = ("full", "sparse", "ours")
"""Bytes of the same versions in each way to send them."""
MEANS = (
    "tokens_per_s", "trained_tokens_per_s", "learner_waits", "learner_publishes", "swap_s", "staleness_p50",
    "staleness_p95", "busy_cores", "own_cores",
)  # fmt: skip


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that so large a share does not exceed; -1 without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else -1.0


def site_bytes(row: Row) -> float:
    """Bytes that a site received for a version, mean over sites."""
    return sum(row["bytes_per_version"].values()) / len(SITES)


def ratios(rows: Sequence[Row], arm: str, number: str) -> list[float]:
    """A number of an arm over that number of one site, for each repeat that has both."""
    ones = {row["repeat"]: row[number] for row in rows if row["arm"] == ONE}
    return [row[number] / ones[row["repeat"]] for row in rows if row["arm"] == arm and ones.get(row["repeat"])]


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {"mean": round(statistics.fmean(values), 4), "min": round(min(values), 4), "max": round(max(values), 4)}


def summary_of(rows: Sequence[Row], arm: Arm) -> dict[str, Any] | None:
    """An arm over its repeats; None without a row. A share divides by the one-site run of the same repeat."""
    own = [row for row in rows if row["arm"] == arm.name]
    if not own:
        return None
    dropped: dict[str, int] = {}
    for row in own:
        for reason, count in row["dropped"].items():
            dropped[reason] = dropped.get(reason, 0) + count
    share = _spread(ratios(rows, arm.name, "tokens_per_s"))
    return {
        "arm": arm.name,
        "title": arm.title,
        "runs": len(own),
        "share": share,
        "trained_share": _spread(ratios(rows, arm.name, "trained_tokens_per_s")),
        "share_of_capacity": round(share["mean"] / arm.capacity, 4) if share else None,
        **{name: round(statistics.fmean(row[name] for row in own), 4) for name in MEANS},
        "bytes_per_version_and_site": round(statistics.fmean(map(site_bytes, own))),
        "schemes": {name: round(statistics.fmean(row["schemes"][name] for row in own)) for name in SCHEMES},
        "dropped": dropped,
    }


def summaries(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """One summary for each arm that has run."""
    return [found for arm in ARMS if (found := summary_of(rows, arm)) is not None]


def goals_of(found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each goal with its number; `is_reached` is None where an arm is missing."""
    by_name = {each["arm"]: each for each in found}

    def of(arm: str, number: str) -> Any:
        return by_name.get(arm, {}).get(number)

    def over(scheme: str) -> float | None:
        sizes = of("heterorl", "schemes")
        return round(sizes[scheme] / sizes["ours"], 2) if sizes and sizes["ours"] else None

    measured = [
        ("heterorl: share of one site", (of("heterorl", "share") or {}).get("mean"), GOAL_SHARE),
        ("outage: share of one site", (of("outage", "share") or {}).get("mean"), GOAL_OUTAGE),
        ("bytes of a version: full snapshot over ours", over("full"), GOAL_FULL),
        ("bytes of a version: positions and values over ours", over("sparse"), GOAL_SPARSE),
    ]
    return [
        {"what": what, "number": number, "goal": goal, "is_reached": None if number is None else number >= goal}
        for what, number, goal in measured
    ]
