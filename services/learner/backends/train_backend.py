"""The interface of engines that train; a version's weights, whole or sharded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from heterorl.common.types.common import StepReport
from heterorl.common.types.rollout import QueuedGroup
from heterorl.common.weights.arena import Arena, Layout
from heterorl.learner.backends.ranks.sharded_weights import ShardedArena
from heterorl.learner.train.step_report import LogRatios

if TYPE_CHECKING:
    from torch import nn


class TrainBackend(Protocol):
    """Masters, optimizer and loss.
    Called from one thread at a time, never from the event loop."""

    @property
    def layout(self) -> Layout:
        """Layout of the published weights."""

    @property
    def torch_model(self) -> nn.Module:
        """The model being trained, for evaluation between steps; not to be changed."""

    def train_step(self, groups: Sequence[QueuedGroup], *, head_version: int, step: int) -> StepReport:
        """Take one optimizer step on whole groups.

        A loss or gradient that is not finite leaves weights and optimizer bit-identical; `is_applied` is then False.
        """

    @property
    def last_log_ratios(self) -> LogRatios:
        """Log-ratios of the newest step's groups whose note is wanted.
        Empty before the first step."""

    @property
    def last_metrics(self) -> dict[str, float]:
        """Metrics of the newest step's custom loss; empty for other kinds."""

    def store(self, arena: Arena) -> None:
        """Round the masters to the published type and write them into `arena`."""

    def load_published(self, arena: Arena, *, keep_optimizer: bool = False) -> None:
        """Take published weights as masters.

        The optimizer is new, since its moments belong to other weights; `keep_optimizer` where these are a few steps
        away.
        """

    def freeze(self, directory: Path) -> Callable[[], None]:
        """Copy weights, optimizer, random state and counters as they are now.

        Returns a function that writes them into `directory`, which is empty: once, from any thread, while steps go on;
        the caller makes the files durable. A backend that cannot hold a copy has written them when this returns.
        """

    def restore(self, directory: Path) -> None:
        """Read the files of `freeze`.
        The next step is then bit for bit the step after it. With several ranks this needs a gradient of each parameter
        in a step before: they store one count of Adam's steps for all.

        Raises CorruptStore: a file is missing, broken, or of another model.
        """


Weights = Arena | ShardedArena
