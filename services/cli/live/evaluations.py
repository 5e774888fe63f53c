"""What a run's evaluations say, for people: the newest number of each set, best, last, gap, and what is under way."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, MutableMapping
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from heterorl.common.errors import RemoteError
from heterorl.common.evaluation.standing import standing
from heterorl.common.types.evaluation import Estimate, Evaluation, EvaluationState

if TYPE_CHECKING:
    from heterorl.common.api import OperatorApi

PAGE = 1000
Known = MutableMapping[tuple[int, str], Evaluation]
"""Evaluations by version and set."""
_GOES_ON = (EvaluationState.OPEN, EvaluationState.RUNNING)


async def read_evaluations(api: OperatorApi, known: Known) -> None:
    """Ask for what is new since the last time; a coordinator of an earlier release has none."""
    changing = [version for (version, _), found in known.items() if found.state in _GOES_ON]
    after = min(changing, default=1 + max((version for version, _ in known), default=-1)) - 1
    for version, name in [key for key in known if key[0] > after]:
        # One that nobody had begun may be gone for a newer one.
        del known[version, name]
    with contextlib.suppress(RemoteError):
        while True:
            page = await api.list_evaluations(after_version=after, limit=PAGE)
            known.update({(found.version, found.task_set): found for found in page})
            if not page:
                return
            after = page[-1].version


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
            if found.state in _GOES_ON
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


HEADS = ("set", "version", "avg@n", "pass", "best", "last", "gap", "under way", "by")


def evaluation_tables(evaluations: Iterable[Evaluation]) -> tuple[Table, ...]:
    """A table of `evaluation_rows`; none where nothing is evaluated."""
    rows = evaluation_rows(evaluations)
    if not rows:
        return ()
    table = Table(*HEADS, title="evaluation")
    for row in rows:
        table.add_row(*map(Text, row))
    return (table,)


def _estimate(found: Estimate | None) -> str:
    return "-" if found is None else f"{found.mean:.3f} [{found.low:.3f}, {found.high:.3f}]"
