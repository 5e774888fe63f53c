"""The Protocol of trackers, and the trackers by name; a package is imported when its tracker is opened."""

from __future__ import annotations

import contextlib
import enum
import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from heterorl.common.errors import ConfigError, DependencyMissing, Unreachable
from heterorl.common.types.common import StepReport
from heterorl.common.types.evaluation import Evaluation
from heterorl.common.types.run import RunStatus
from heterorl.track.tracker_rows import TextTable


@dataclass(frozen=True, slots=True, order=True)
class Mark:
    """A report's place in the order of publication: versions only grow, steps go back with a rollback."""

    version: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Had:
    """What the tracker has: the newest report, evaluation of each set, and table of samples."""

    steps: Mark | None = None
    """None without steps."""
    evaluations: Mapping[str, int] = field(default_factory=dict)
    """Sets to versions."""
    table: int = -1
    """A version; -1 without a table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a tracker writes: a project and a run, a directory for local files; `facts` of the learner."""

    project: str
    run: str
    directory: Path
    facts: Mapping[str, str]


class Tracker(Protocol):
    """One run in one tracker; all calls block. After Unreachable the tracker is opened again."""

    def had(self) -> Had:
        """What it had when it was opened."""

    def write(self, reports: Sequence[StepReport]) -> None:
        """Append reports in order; a kill may leave only the first ones."""

    def write_evaluations(self, evaluations: Sequence[Evaluation]) -> None:
        """Append evaluations in order."""

    def write_table(self, table: TextTable) -> None:
        """Show these samples as the newest ones."""

    def close(self) -> None:
        """Write out what is buffered."""


def mark_of(report: StepReport) -> Mark:
    """The place of a report."""
    return Mark(report.version, report.step)


@contextlib.contextmanager
def reaching(name: str, *failures: type[Exception], action: str) -> Iterator[None]:
    """Turn failures of a tracker's package into Unreachable; usable as a decorator."""
    try:
        yield
    except failures as error:
        raise Unreachable(f"{name}: {error}", action=f"{action}; heterorl tries again") from error


class Kind(enum.Enum):
    """A tracker."""

    WANDB = "wandb"
    MLFLOW = "mlflow"
    TENSORBOARD = "tensorboard"
    TRACKIO = "trackio"


_CLASSES = {Kind.WANDB: "WandB", Kind.MLFLOW: "Mlflow", Kind.TENSORBOARD: "TensorBoard", Kind.TRACKIO: "Trackio"}


def open_tracker(kind: Kind, status: RunStatus, *, project: str, run: str, directory: Path) -> Tracker:
    """Open a run in a tracker, or create it; `run` empty: the run's own id.

    Raises:
        ConfigError: the directory cannot be made.
        DependencyMissing: the tracker's package is not installed.
        Unreachable: the tracker does not answer or its files cannot be written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            "--dir", f"{directory} cannot be made: {error.strerror}", action="name another one"
        ) from error
    try:
        module = importlib.import_module(f"heterorl.track.to_{kind.value}")
    except ModuleNotFoundError as error:
        raise DependencyMissing(error.name or kind.value, f"track-{kind.value}") from None
    place = Place(project=project, run=run or status.run_id, directory=directory, facts=status.facts)
    opened: Tracker = getattr(module, _CLASSES[kind])(place)
    return opened
