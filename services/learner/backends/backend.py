"""What the learner asks of an engine that trains: one Protocol, whatever stands behind it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from services.common.types import QueuedGroup, StepReport
from services.common.weights.arena import Arena, Layout


class TrainBackend(Protocol):
    """Masters, optimizer and loss. Called from one thread at a time, never from the event loop."""

    @property
    def layout(self) -> Layout:
        """Layout of the published weights."""
        ...

    def train_step(self, groups: Sequence[QueuedGroup], *, head_version: int, step: int) -> StepReport:
        """One optimizer step on whole groups; a non-finite loss or gradient changes nothing and says so."""
        ...

    def store(self, arena: Arena) -> None:
        """Round the masters to the published type and write their bits."""
        ...

    def adopt(self, arena: Arena) -> None:
        """Take published weights as masters and start the optimizer anew."""
        ...

    def save(self, directory: Path) -> None:
        """Write weights, optimizer and random state into an empty directory; `restore` continues bit for bit."""
        ...

    def restore(self, directory: Path) -> None:
        """Read what `save` wrote."""
        ...
