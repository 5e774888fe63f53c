"""What the learner asks of an engine that trains: one Protocol, whatever stands behind it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from heterorl.common.types.common import StepReport
from heterorl.common.types.rollout import QueuedGroup
from heterorl.common.weights.arena import Arena, Layout
from heterorl.learner.train.step_report import LogRatios

if TYPE_CHECKING:
    from torch import nn


class TrainBackend(Protocol):
    """Masters, optimizer and loss. Called from one thread at a time, never from the event loop."""

    @property
    def layout(self) -> Layout:
        """Layout of the published weights."""
        ...

    @property
    def torch_model(self) -> nn.Module:
        """The model being trained, for evaluation between steps; not to be changed."""
        ...

    def train_step(self, groups: Sequence[QueuedGroup], *, head_version: int, step: int) -> StepReport:
        """Take one optimizer step on whole groups.

        A non-finite loss or gradient leaves weights and optimizer bit-identical; `is_applied` is then False.
        """
        ...

    @property
    def last_log_ratios(self) -> LogRatios:
        """Of the newest step's groups whose note is wanted; empty before the first."""
        ...

    @property
    def last_metrics(self) -> dict[str, float]:
        """What the newest step's loss measured, where it is the user's own; empty for other kinds."""
        ...

    def store(self, arena: Arena, *, published: Arena | None = None) -> None:
        """Round the masters to the published type and write their bits.

        Args:
            arena: receives the bits; may be `published` itself.
            published: what was published last; a backend with a dead band keeps elements that are near enough to it,
                so that storing again on top of the result changes nothing.
        """
        ...

    def load_published(self, arena: Arena, *, keep_optimizer: bool = False) -> None:
        """Take published weights as masters, and begin with a new optimizer: its moments belong to other weights.

        `keep_optimizer` where they do not, because these weights are a few steps away.
        """
        ...

    def freeze(self, directory: Path) -> Callable[[], None]:
        """Take weights, optimizer, random state and counters as they are now.

        Args:
            directory: an empty one, for their files; making these durable is the caller's.

        Returns:
            What writes the files, once, from any thread, while steps go on. A backend that cannot hold a copy has
            written them when it returns.
        """
        ...

    def restore(self, directory: Path) -> None:
        """Read what `freeze` left; the next step is then bit for bit the step after `freeze`.

        Raises:
            CorruptStore: a file is missing, broken, or of another model.
        """
        ...
