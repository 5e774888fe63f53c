"""What a run's evaluations say, in words: the newest number of each set, best, last, gap, what is under way."""

from __future__ import annotations

from collections.abc import Iterable

from heterorl.common.evaluation.standing import standing
from heterorl.common.types.evaluation import Estimate, Evaluation, EvaluationState

UNDER_WAY = (EvaluationState.OPEN, EvaluationState.RUNNING)
HEADS = ("set", "version", "avg@n", "pass", "best", "last", "gap", "under way", "by")


def evaluation_rows(evaluations: Iterable[Evaluation]) -> list[tuple[str, ...]]:
    """For each set: its name, newest version, avg@n, pass@n, best, last, gap, what is under way, who computed it."""
    rows: list[tuple[str, ...]] = []
    by_set: dict[str, list[Evaluation]] = {}
    for found in sorted(evaluations, key=lambda found: (found.task_set, found.version)):
        by_set.setdefault(found.task_set, []).append(found)
    for name, of_set in by_set.items():
        done = [found for found in of_set if found.state is EvaluationState.DONE]
        both = standing((found.version, found.summary.average) for found in done)
        newest = done[-1] if done else None
        under_way = [
            f"{found.version}: {found.summary.num_prompts} of {found.num_wanted or '?'}"
            for found in of_set
            if found.state in UNDER_WAY
        ]
        passes = newest.summary.passes if newest is not None else ()
        rows.append(
            (
                name,
                "-" if newest is None else str(newest.version),
                "-" if newest is None else _estimate(newest.summary.average),
                f"@{passes[-1].k} {_estimate(passes[-1].estimate)}" if passes else "-",
                "-" if both is None else f"{both.best:.3f} ({both.best_version})",
                "-" if both is None else f"{both.last:.3f} ({both.last_version})",
                "-" if both is None else f"{both.gap:.3f}",
                ", ".join(under_way) or "-",
                "-" if newest is None else ", ".join(site for site, _ in newest.sites),
            )
        )
    return rows


def _estimate(found: Estimate | None) -> str:
    return "-" if found is None else f"{found.mean:.3f} [{found.low:.3f}, {found.high:.3f}]"
