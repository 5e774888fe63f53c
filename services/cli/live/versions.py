"""The versions that a run can go back to, with what was measured of each on held-out prompts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from heterorl.cli.live.evaluations import Known, read_evaluations
from heterorl.common.types.evaluation import EvaluationState

if TYPE_CHECKING:
    from heterorl.common.api import OperatorApi

LEARNER = "held out, by the learner"
PAGE = 1000


@dataclass(slots=True, kw_only=True)
class Restorable:
    """One version; `held_out` has the mean reward of each set of prompts that it was evaluated on."""

    version: int
    reward: float | None = None
    """Mean reward of the step that made it."""
    held_out: dict[str, float] = field(default_factory=dict)


async def read_versions(api: OperatorApi) -> tuple[Restorable, ...]:
    """Ask which versions one can go back to, and for their results; the newest first."""
    found = {version: Restorable(version=version) for version in await api.list_restorable()}
    after = -1
    while page := await api.list_steps(after_step=after, limit=PAGE):
        after = page[-1].step
        for report in page:
            if report.version in found and report.is_applied:
                found[report.version].reward = report.reward_mean
                if report.evaluation_accuracy is not None and math.isfinite(report.evaluation_accuracy):
                    found[report.version].held_out[LEARNER] = report.evaluation_accuracy
    known: Known = {}
    await read_evaluations(api, known)
    for (version, name), each in known.items():
        if version in found and each.state is EvaluationState.DONE and each.summary.average is not None:
            found[version].held_out[name] = each.summary.average.mean
    return tuple(sorted(found.values(), key=lambda each: -each.version))


def shown(versions: Sequence[Restorable], *, num: int | None) -> tuple[Restorable, ...]:
    """The newest `num` of versions that are listed newest first, and the best of each set; all where num is None."""
    if num is None:
        return tuple(versions)
    names = {name for each in versions for name in each.held_out}
    best = {max(_with(versions, name), key=lambda each: each.held_out[name]).version for name in names}
    return tuple(each for place, each in enumerate(versions) if place < num or each.version in best)


def _with(versions: Sequence[Restorable], name: str) -> list[Restorable]:
    return [each for each in versions if name in each.held_out]


def versions_table(versions: Sequence[Restorable]) -> Table:
    """A line a version; the best of each set is marked."""
    names = sorted({name for each in versions for name in each.held_out}, key=lambda name: (name != LEARNER, name))
    best = {name: max(each.held_out.get(name, -math.inf) for each in versions) for name in names}
    table = Table("version", "reward of its step", title="versions to go back to")
    for name in names:
        table.add_column(Text(name))
    for each in versions:
        cells = [_cell(each.held_out.get(name), best=best[name]) for name in names]
        table.add_row(str(each.version), _cell(each.reward, best=None), *cells)
    return table


def _cell(value: float | None, *, best: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.3f} best" if value == best else f"{value:.3f}"
