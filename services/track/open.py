"""The trackers by name; a package is imported when its tracker is opened."""

from __future__ import annotations

import enum
import importlib
from pathlib import Path

from heterorl.common.errors import ConfigError, DependencyMissing
from heterorl.common.types.run import RunStatus
from heterorl.track.tracker import Place, Tracker


class Kind(enum.Enum):
    """A tracker that steps can go to."""

    WANDB = "wandb"
    MLFLOW = "mlflow"
    TENSORBOARD = "tensorboard"
    TRACKIO = "trackio"


_CLASSES = {
    Kind.WANDB: "WandB",
    Kind.MLFLOW: "Mlflow",
    Kind.TENSORBOARD: "TensorBoard",
    Kind.TRACKIO: "Trackio",
}


def open_tracker(kind: Kind, status: RunStatus, *, project: str, run: str, directory: Path) -> Tracker:
    """A run in a tracker, made where it is not there; `run` empty: the run's own id.

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
