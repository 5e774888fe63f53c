"""What a backend can do whose ranks make versions together."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from heterorl.learner.backends.ranks.versions.divided import Source
from heterorl.learner.backends.ranks.versions.engine import DividedArena


@runtime_checkable
class VersionMaker(Protocol):
    """A backend whose ranks may hold, compare and code versions together."""

    @property
    def is_divided(self) -> bool:
        """Whether there is more than one rank; `store` is for one."""
        ...

    def stage(self, *, published: DividedArena | None) -> DividedArena:
        """`TrainBackend.store` into weights that all ranks hold together."""
        ...

    def divide(self, source: Source) -> DividedArena:
        """Take the chunks of published weights, each by the rank that holds it.

        Raises:
            CorruptData: the source is broken.
            OSError: it cannot be read.
        """
        ...
