"""What a tracker must do: say what it has, take more, close."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from heterorl.common.types.common import StepReport
from heterorl.common.types.evaluation import Evaluation
from heterorl.track.texts import TextTable


@dataclass(frozen=True, slots=True, order=True)
class Mark:
    """A report's place in the order of publication: versions only grow, steps go back with a rollback."""

    version: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Had:
    """What the tracker itself still has whole: the newest report, evaluation of each set, and table of samples."""

    steps: Mark | None = None
    """None of a run without steps."""
    evaluations: Mapping[str, int] = field(default_factory=dict)
    """Sets to versions."""
    table: int = -1
    """A version; -1 without a table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a tracker writes: a project and a run in it, a directory for what stays here; `facts` of the learner."""

    project: str
    run: str
    directory: Path
    facts: Mapping[str, str]


class Tracker(Protocol):
    """One run in one tracker; all calls block. One that fails raises Unreachable, and is opened anew."""

    def had(self) -> Had:
        """What it had when it was opened."""

    def write(self, reports: Sequence[StepReport]) -> None:
        """Append reports in order; a process killed meanwhile leaves some of the first ones."""

    def write_evaluations(self, evaluations: Sequence[Evaluation]) -> None:
        """Append evaluations in order."""

    def write_table(self, table: TextTable) -> None:
        """Show these samples as the newest ones."""

    def close(self) -> None:
        """Write out what is buffered."""


def mark_of(report: StepReport) -> Mark:
    """The place of a report."""
    return Mark(report.version, report.step)
