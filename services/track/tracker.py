"""What a tracker must do: say what it has, take more, close."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from heterorl.common.types.common import StepReport


@dataclass(frozen=True, slots=True, order=True)
class Mark:
    """A report's place in the order of publication: versions only grow, steps go back with a rollback."""

    version: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a tracker writes: a project and a run in it, a directory for what stays here; `facts` of the learner."""

    project: str
    run: str
    directory: Path
    facts: Mapping[str, str]


class Tracker(Protocol):
    """One run in one tracker; all calls block. One that fails raises Unreachable, and is opened anew."""

    def last(self) -> Mark | None:
        """The newest report that the tracker itself still has whole; None of an empty run."""

    def write(self, reports: Sequence[StepReport]) -> None:
        """Append reports in order; a process killed meanwhile leaves some of the first ones."""

    def close(self) -> None:
        """Write out what is buffered."""


def mark_of(report: StepReport) -> Mark:
    """The place of a report."""
    return Mark(report.version, report.step)
